"""Accuracy on records held back: optimizers, rates, views, noise, scales, scattering features.

    python benchmarks/accuracy.py NAME --out benchmarks/results

NAME is one of `EXPERIMENTS`; each writes ``accuracy_NAME.csv``, a line a run, as runs end, and goes
on where it was interrupted. Of each group of settings the one that scores best on records that are
neither trained nor tested on is trained again with other seeds, and tested. A seed fixes
initialisation, batches and noise, so that lines can be made again; such runs are for measuring, not
for release. Public data: choosing is not charged.
"""

import argparse
import csv
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import accuracy_tasks as tasks
from accuracy_tasks import Task
from dpoptim.data import FASHION_MNIST_DIRECTORY, Data, load_arrays, load_digits, load_fashion_mnist
from dpoptim.data.arrays import PIXELS
from dpoptim.data.preparation import OpponentColours, Scatter, SquareRoot, Step, Whiten
from dpoptim.data.views import moved_images
from dpoptim.methods import DPFTRL, DPSGD, ScaledClipNorm
from dpoptim.optim import AdamBC
from dpoptim.plan import Plan
from dpoptim.recipes import Recipe, recipe, steady_rate
from dpoptim.runs.models import GREY_PLANES
from dpoptim.training.attach import attach
from dpoptim.training.tail_average import TailAverage

CHOICE, TEST = "choice", "test"
SCATTERED = (SquareRoot(), OpponentColours(), Scatter())  # as `dpoptim train` has them
WHITENED = (*SCATTERED, Whiten(most_planes=GREY_PLANES))  # for linear models
TAILS = {"last": 0.0, "fifth": 0.2, "half": 0.5}  # share of the last iterates that is averaged


@dataclass(frozen=True)
class Trial:
    """Settings of a run; public."""

    task: str
    method: str
    epsilon: float
    batch_size: int
    epochs: float
    clip_norm: float
    optimizer: str
    learning_rate: float
    momentum: float = 0.0
    views: int = 1
    shift: int = 0

    def plan(self, n: int, delta: float) -> Plan:
        power = 0.25 if self.optimizer == "SGD" else 0.5
        methods: dict[str, DPSGD | DPFTRL] = {
            "DP-SGD": DPSGD(self.clip_norm),
            "DP-SGD, scaled": DPSGD(ScaledClipNorm(self.clip_norm, power=power)),
            "DP-FTRL": DPFTRL(self.clip_norm, momentum=self.momentum),
            "banded": DPFTRL(self.clip_norm, sampling="cyclic-poisson", momentum=self.momentum),
        }
        return methods[self.method].plan(
            n=n,
            batch_size=self.batch_size,
            epochs=self.epochs,
            epsilon=self.epsilon,
            delta=delta,
            neighboring="zero-out",
        )


@dataclass(frozen=True)
class Row(Trial):
    """A run: its scores by the share of last iterates that is averaged, its time, the bands of its
    noise, and how its last iterate scores on the records it was trained on.
    """

    part: str = TEST
    seed: int = 0
    last: float = math.nan
    fifth: float = math.nan
    half: float = math.nan
    seconds: float = math.nan
    step_ms: float = math.nan
    bands: int = 0
    trained_on: float = math.nan


def settings(trial: Trial) -> Trial:
    """The settings alone, also of a run."""
    return Trial(**{field.name: getattr(trial, field.name) for field in fields(Trial)})


def optimizer_of(trial: Trial, model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if trial.optimizer == "SGD":
        return torch.optim.SGD(trained, lr=trial.learning_rate, momentum=trial.momentum)
    if trial.optimizer == "Adam":
        return torch.optim.Adam(trained, lr=trial.learning_rate)
    return AdamBC(trained, lr=trial.learning_rate)


def run(trial: Trial, task: Task, part: str, seed: int) -> Row:
    """Train, and score on a part of the records."""
    x, y = task.training if part == CHOICE or task.whole is None else task.whole
    if trial.views > 1:
        x = x[:, None].expand(-1, trial.views, *x.shape[1:])
        y = y[:, None].expand(-1, trial.views, *y.shape[1:])
    plan = trial.plan(len(x), task.delta)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = task.build()
    optimizer = optimizer_of(trial, model)
    averages = {
        name: TailAverage(model, int((1 - share) * plan.steps)) for name, share in TAILS.items()
    }
    started = time.perf_counter()
    with attach(
        plan, model, optimizer, TensorDataset(x, y), noise_seed=seed, rows_per_record=trial.views
    ) as private:
        for rows, labels in private.batches(physical_batch_size=task.physical_batch_size):
            seen = moved_images(rows, trial.shift, generator) if trial.shift else rows
            private.backward(task.losses(model(seen), labels))
            optimizer.step()
            if private.finished_step:
                for average in averages.values():
                    average.update(private.steps_done)
    seconds = time.perf_counter() - started
    model.eval()
    few = slice(len(task.test[0]))  # as many as it is tested on
    trained_on = task.score(model, x[few], y[few]) if trial.views == 1 else math.nan
    scores = {}
    for name, average in averages.items():
        average.swap()
        score = task.score(model, *(task.choosing if part == CHOICE else task.test))
        scores[name] = score if math.isfinite(score) else -math.inf
        average.swap()
    return Row(
        **asdict(trial),
        part=part,
        seed=seed,
        **scores,
        seconds=round(seconds, 1),
        step_ms=round(1000 * seconds / plan.steps, 1),
        bands=(plan.method.bands or 0) if isinstance(plan.method, DPFTRL) else 0,
        trained_on=trained_on,
    )


class Table:
    """The lines of a CSV, to which each run is added as it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        kinds = {field.name: field.type for field in fields(Row)}
        self.rows: list[Row] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = [
                    Row(**{name: kinds[name](value) for name, value in line.items()})  # type: ignore[operator]
                    for line in csv.DictReader(file)
                ]

    def find(self, trial: Trial, part: str, seed: int) -> Row | None:
        for row in self.rows:
            if (settings(row), row.part, row.seed) == (settings(trial), part, seed):
                return row
        return None

    def add(self, row: Row) -> Row:
        """Keep a run; the file is written whole, so that it always has every column."""
        self.rows.append(row)
        with self._path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(each) for each in self.rows)
        return row


def measure(
    groups: Sequence[Sequence[Trial]], task: Task, table: Table, seeds: int
) -> Iterator[str]:
    """Choose in each group, test what was chosen; yields a line of Markdown for each group."""

    def once(trial: Trial, part: str, seed: int) -> Row:
        return table.find(trial, part, seed) or table.add(run(trial, task, part, seed))

    def choose(group: Sequence[Trial]) -> tuple[Trial, str]:
        tried = [
            (trial, name, statistics.mean(getattr(row, name) for row in rows))
            for trial in group
            for rows in [[once(trial, CHOICE, 1000 * k) for k in range(task.tries)]]
            for name in TAILS
        ]
        return max(tried, key=lambda each: each[2])[:2]

    for group in groups:
        # a setting alone is a recipe's, which averages
        trial, averaged = choose(group) if len(group) > 1 else (group[0], "fifth")
        found = [once(trial, TEST, seed) for seed in range(1, seeds + 1)]
        yield summary(trial, averaged, found)


def summary(trial: Trial, averaged: str, found: Sequence[Row]) -> str:
    def figure(name: str) -> str:
        scores = [getattr(row, name) for row in found]
        spread = statistics.stdev(scores) if len(scores) > 1 else math.nan
        return f"{statistics.mean(scores):.3f} ± {spread:.3f}"

    return (
        f"| {trial.task} | {trial.method}, {trial.optimizer}, K = {trial.views}, shift "
        f"{trial.shift} | {trial.epsilon:g} | {figure(averaged)} ({averaged}) | "
        f"{figure('last')} | rate {trial.learning_rate:g}, batch {trial.batch_size}, "
        f"{trial.epochs:g} epochs, clip norm {trial.clip_norm:g} | "
        f"{statistics.mean(row.seconds for row in found):.0f} s |"
    )


def grid(trial: Trial, rates: Sequence[float]) -> list[Trial]:
    return [replace(trial, learning_rate=rate) for rate in rates]


@dataclass(frozen=True)
class Request:
    """Where data sets are; None: not there."""

    fashion: Path
    cache: Path | None = None
    tweets: Path | None = None
    e2e: Path | None = None
    mnist: Path | None = None
    cifar: Path | None = None

    def has(self, name: str) -> bool:
        """Whether a data set is there; says so where it is not."""
        if getattr(self, name) is None:
            print(f"left out, and not measured: --{name} was not given")
            return False
        return True


Groups = list[list[Trial]]
Experiment = Iterator[tuple[Task, Groups]]


def by_optimizer(
    task: Task, base: Trial, *, sgd: Sequence[float], adam: Sequence[float]
) -> tuple[Task, Groups]:
    """SGD, Adam and AdamBC, each by the best of its rates."""
    rates = {"SGD": sgd, "Adam": adam, "AdamBC": adam}
    return task, [
        grid(replace(base, task=task.name, epsilon=epsilon, optimizer=name), mine)
        for epsilon in (2.0, 1.0, 8.0)
        for name, mine in rates.items()
    ]


def optimizers(request: Request) -> Experiment:
    """SGD, Adam and AdamBC on digits, sentence features, a small GPT from scratch, and adapters."""
    base = Trial("", "DP-SGD", 0.0, 500, 20, 1.0, "", 0.0)
    rates = (0.008, 0.016, 0.032, 0.064, 0.128, 0.256)
    task = replace(tasks.digits("softmax"), tries=3)
    yield by_optimizer(task, base, sgd=(2.0, 4.0, 8.0, 16.0, 32.0, 64.0), adam=rates)
    if request.has("tweets"):
        task = tasks.emotion(request.tweets, request.cache)
        yield by_optimizer(task, base, sgd=(2.0, 4.0, 8.0, 16.0, 32.0, 64.0), adam=rates)
    if request.has("e2e"):
        task = tasks.restaurants(request.e2e)
        base = replace(base, batch_size=256, epochs=1, clip_norm=0.3)
        yield by_optimizer(task, base, sgd=(4.0, 8.0, 16.0), adam=(0.01, 0.03, 0.1))
    if request.tweets is not None:
        task = tasks.adapters(request.tweets, request.cache)
        base = replace(base, batch_size=250, epochs=2, clip_norm=1.0)
        yield by_optimizer(task, base, sgd=(2.0, 8.0, 32.0), adam=(0.01, 0.03, 0.1, 0.3))


def by_views(base: Trial, rates: Sequence[float]) -> Groups:
    """No views, one random view, and K."""
    kinds = [replace(base, shift=0), *(replace(base, views=K) for K in (1, 4, 8, 16))]
    return [grid(kind, rates) for kind in kinds]


def views(request: Request) -> Experiment:
    """K views, shifted by up to a pixel, against one random view and none; and all of
    Fashion-MNIST with four.
    """
    task = tasks.digits("cnn")
    base = Trial(task.name, "DP-SGD", 4.0, 256, 30, 1.0, "SGD", 0.0, 0.9, shift=1)
    yield task, by_views(base, (0.3, 1.0))
    task = tasks.fashion("cnn", request.fashion, training=10_000, halved=True)
    base = replace(base, task=task.name, batch_size=1000, epochs=10, learning_rate=1.0)
    yield task, by_views(base, (1.0,))
    # why they do not gain: rates, steps, or small images?
    plain, four = replace(base, shift=0), replace(base, views=4)
    longer = [replace(each, epochs=30) for each in (plain, four)]
    yield task, [[plain, *grid(four, (0.5, 2.0))], longer]
    task = tasks.fashion("cnn", request.fashion, training=10_000)
    plain, four = replace(plain, task=task.name), replace(four, task=task.name)
    yield task, [[plain, replace(four, learning_rate=2.0)]]
    task = tasks.fashion("cnn", request.fashion)
    base = Trial(task.name, "DP-SGD", 2.93, 4000, 10, 1.0, "SGD", 1.0, 0.9)
    yield task, [[base], [replace(base, views=4, shift=1)]]


def by_mechanism(base: Trial, epsilons: Sequence[float], rates: Sequence[float]) -> Groups:
    """Independent noise, correlated noise, and banded noise on batches sampled by turns."""
    return [
        grid(replace(base, method=method, epsilon=epsilon), rates)
        for epsilon in epsilons
        for method in ("DP-SGD", "DP-FTRL", "banded")
    ]


def mechanisms(request: Request) -> Experiment:
    """Softmax regression and a CNN by noise mechanism."""
    epsilons, rates = (1.0, 2.0, 4.0, 8.0), (0.08, 0.2, 0.5, 1.2, 3.0)
    task = replace(tasks.digits("softmax"), tries=3)
    base = Trial(task.name, "", 0.0, 100, 20, 1.0, "SGD", 0.0, 0.9)
    yield task, by_mechanism(base, epsilons, (0.03, *rates))
    task = tasks.fashion("softmax", request.fashion)
    yield task, by_mechanism(replace(base, task=task.name, batch_size=1000), epsilons, rates)
    task = tasks.fashion(tasks.TRAINED_CNN, request.fashion, training=10_000, halved=True)
    base = replace(base, task=task.name, batch_size=500, epochs=10)
    yield replace(task, tries=3), by_mechanism(base, (8.0, 4.0, 1.0, 2.0), (0.25, 0.5, 1.0, 2.0))


def scales(request: Request) -> Experiment:
    """Gradients scaled tensor by tensor before they are clipped, or not, by SGD and AdamBC."""
    adam, sgd = (0.005, 0.012, 0.03, 0.08), (0.03, 0.08, 0.2)
    models: dict[str, tuple[float, ...]] = {"mlp": (1.0, 4.0), "cnn": (1.0,)}
    for model, epsilons in models.items():
        task = replace(tasks.digits(model), tries=2)
        base = Trial(task.name, "", 0.0, 250, 30, 1.0, "", 0.0, 0.9)
        yield (
            task,
            [
                grid(replace(base, method=method, epsilon=epsilon, optimizer=optimizer), rates)
                for epsilon in epsilons
                for optimizer, rates in (("SGD", sgd), ("AdamBC", adam))
                for method in ("DP-SGD", "DP-SGD, scaled")
            ],
        )


def rates(request: Request) -> Experiment:
    """Learning rates of a CNN, beside how far the noise of all steps then moves a weight."""
    task = replace(tasks.digits("cnn"), tries=2)
    base = Trial(task.name, "DP-SGD", 4.0, 256, 30, 1.0, "SGD", 0.0, 0.9)
    tried = (0.05, 0.1, 0.2, 0.4, 1.0)
    yield task, [grid(replace(base, batch_size=size), tried) for size in (256, 512)]
    task = tasks.fashion("cnn", request.fashion, training=5_000)
    base = replace(base, task=task.name, epsilon=2.93, batch_size=512)
    yield task, [grid(base, (0.34, 1.0))]


def given_sets(
    request: Request, steps: Sequence[Step], epsilons: tuple[float, float, float, float]
) -> Iterator[tuple[Data, float]]:
    """Digits, Fashion-MNIST, and MNIST and CIFAR-10 where they are given, each at its epsilon."""
    digits, fashion, mnist, cifar = epsilons
    yield load_digits(0, steps, request.cache), digits
    yield load_fashion_mnist(request.fashion, steps, request.cache), fashion
    for name, folder, epsilon in (
        ("mnist", request.mnist, mnist),
        ("cifar", request.cifar, cifar),
    ):
        if request.has(name):
            pixels = (*PIXELS, *steps)
            yield load_arrays(folder, public=True, pixels=pixels, cache=request.cache), epsilon


def trial_by_recipe(task: Task, by: Recipe, n: int, epsilon: float) -> Trial:
    """What `dpoptim train` does with ``n`` records."""
    rest = by.clip_norm, "SGD", by.learning_rate, by.momentum
    trial = Trial(task.name, "DP-SGD", epsilon, by.batch_size, by.epochs, *rest)
    return replace(trial, learning_rate=steady_rate(by, trial.plan(n, task.delta)))


def scattering(request: Request) -> Experiment:
    """A linear classifier on scattering features, by the recipe; of digits, of Fashion-MNIST, and
    of MNIST and CIFAR-10 where they are given.
    """
    for data, epsilon in given_sets(request, WHITENED, (3.0, 2.7, 2.93, 3.0)):
        task = tasks.by_recipe(data, "softmax", "scattering")
        n = len(data.x)
        by = recipe("softmax", n, "scattering", size=math.prod(data.x.shape[1:]))
        yield task, [[trial_by_recipe(task, by, n, epsilon)]]


def cnn(request: Request) -> Experiment:
    """The CNN of `dpoptim train`, by its recipe, on scattering features and on pixels; on pixels
    also with four views of each image, itself moved by up to a pixel.
    """
    kinds = {"scattering": SCATTERED, "pixels": (SquareRoot(),)}
    for features, steps in kinds.items():
        for data, epsilon in given_sets(request, steps, (2.93, 2.93, 2.93, 3.0)):
            task, n = tasks.by_recipe(data, "cnn", features), len(data.x)
            by = recipe("cnn", n, features, size=math.prod(data.x.shape[1:]))
            groups = [[trial_by_recipe(task, by, n, epsilon)]]
            if features == "pixels":
                by = trial_by_recipe(task, recipe("cnn", n, views=4), n, epsilon)
                groups.append([replace(by, views=4, shift=1)])
            yield task, groups


EXPERIMENTS: dict[str, Callable[[Request], Experiment]] = {
    "cnn": cnn,
    "mechanisms": mechanisms,
    "optimizers": optimizers,
    "rates": rates,
    "scales": scales,
    "scattering": scattering,
    "views": views,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(EXPERIMENTS))
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV")
    parser.add_argument("--data", type=Path, default=Path(FASHION_MNIST_DIRECTORY))
    parser.add_argument("--tweets", type=Path, help="folder of TweetEval's emotion")
    parser.add_argument("--e2e", type=Path, help="folder of the E2E challenge")
    parser.add_argument("--mnist", type=Path, help="folder of MNIST's IDX files, or .npz")
    parser.add_argument("--cifar", type=Path, help="folder of CIFAR-10's Python pickles")
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/cache"), help="features are kept there"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="tasks whose names begin so")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    given = options.tweets, options.e2e, options.mnist, options.cifar
    request = Request(options.data, options.cache, *given)
    table = Table(options.out / f"accuracy_{options.name}.csv")
    for task, groups in EXPERIMENTS[options.name](request):
        if task.name.startswith(options.only):
            for line in measure(groups, task, table, options.seeds):
                print(line, flush=True)


if __name__ == "__main__":
    main()
