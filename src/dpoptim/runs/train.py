"""Train a model with privacy, on a data set that fits memory."""

import dataclasses
import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import positive_number, whole_number
from dpoptim.assumptions import Assumption, trusted
from dpoptim.data import Data
from dpoptim.data.views import moved_images, repeat_records
from dpoptim.gradients.per_sample import native
from dpoptim.installed import digests
from dpoptim.iterate import Iterate
from dpoptim.optimizers import OptimizerSettings
from dpoptim.plan import Plan
from dpoptim.runs.assumptions import BY_ANOTHER, BY_THE_CLOCK, basis_of_run
from dpoptim.runs.interrupted import SavedRun
from dpoptim.training.attach import attach
from dpoptim.training.planned_rate import PlannedRate, finds_clip_norm
from dpoptim.training.private_training import PrivateTraining
from dpoptim.training.tail_average import TailAverage
from dpoptim.version import __version__ as dpoptim_version


@dataclasses.dataclass(frozen=True)
class Optimization:
    """The optimizer, public, and what becomes of its iterates.

    Attributes:
        chosen_for: the clip norm that the learning rate was chosen for, see `PlannedRate`.
        averaged: the share of the last ones that are averaged into the result; 0: the last one.
        iterate: "random": one by chance instead.
        projection: see `attach`.
        views: of each image that a step looks at; more than one are moved by up to a pixel.
    """

    optimizer: OptimizerSettings
    learning_rate: float
    averaged: float
    physical_batch_size: int | None = None
    iterate: Iterate = "average"
    projection: float | None = None
    views: int = 1
    chosen_for: float | None = None

    def __post_init__(self) -> None:
        positive_number("learning_rate", self.learning_rate)
        whole_number("views", self.views, least=1)

    def rate_in_words(self, plan: Plan) -> str:
        """The learning rate for people."""
        follows = self.chosen_for is not None and finds_clip_norm(plan)
        told = f" for clip norm {self.chosen_for:g}, over the one found" if follows else ""
        return f"{self.learning_rate:g}{told}"

    def records(self, data: Data) -> TensorDataset:
        """Inputs and labels, each as often as it has views."""
        return TensorDataset(
            *(repeat_records(torch.from_numpy(each), self.views) for each in (data.x, data.y))
        )

    def seen(self, x: Tensor) -> Tensor:
        """Rows as a step looks at them."""
        return moved_images(x) if self.views > 1 else x


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, rows: int = 4096) -> float:
    """Share of records classified right, ``rows`` at a time. Only for data declared public."""
    right = sum(
        int((model(a).argmax(1) == b).sum())
        for a, b in zip(x.split(rows), y.split(rows), strict=True)
    )
    return right / len(y)


@torch.no_grad()
def score(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Accuracy; for numbers to predict, R2. Only for data declared public."""
    if not y.is_floating_point():
        return accuracy(model, x, y)
    errors = (torch.cat([model(rows)[:, 0] for rows in x.split(4096)]) - y).double()
    return 1 - float(errors.square().sum() / (y.double() - y.double().mean()).square().sum())


def record_losses(outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """The loss of each row, (rows,): weighted cross-entropy, or half the squared error of numbers.

    Args:
        weights: of the classes; None: all are 1.
    """
    if y.is_floating_point():
        return (outputs[:, 0] - y).square() / 2
    return F.cross_entropy(outputs, y, weight=weights, reduction="none")


def batch_losses(
    model: nn.Module, batch: Sequence[Tensor], *, weights: Tensor | None = None
) -> Tensor:
    """`record_losses` of a batch's inputs and labels."""
    x, y = batch
    return record_losses(model(x), y, weights)


def weights_of(data: Data) -> Tensor | None:
    """The classes' weights, float32."""
    return None if data.class_weights is None else torch.tensor(data.class_weights)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A privately trained model, its public scores (of public data), and its start."""

    model: nn.Module
    guarantee: Guarantee
    basis: tuple[Assumption, ...]
    reservation: str | None
    scores: tuple[float, ...]
    seconds: float
    ended: str = ""  # how the run ended before its plan did; for people


def train_privately(
    data: Data,
    model: nn.Module,
    plan: Plan,
    optimization: Optimization,
    *,
    ledger: Ledger,
    label: str,
    noise_seed: int | None,
    on_step: Callable[[int], None],
    saved: SavedRun | None = None,
    resume: bool = False,
    most_seconds: float = math.inf,
) -> Trained:
    """Train a model under ``plan``; the result is the mean of the last iterates, or one.

    Args:
        model: trained in place. label: public text for the ledger. noise_seed: see `attach`.
        on_step: told the number of finished steps.
        saved: where the run is kept while it is not complete. resume: go on from there.
        most_seconds: of this part of the run. After that it ends for good, and leaves to the
            ledger's budget, if it has one, the steps that were not made.

    Raises:
        RunInterruptedError: it was asked to stop, and is saved.

    **Guarantee.** The model and everything else in the result are covered by ``guarantee``, which
    is that of the whole plan wherever the run ends; scores appear only for data declared public.
    """
    losses = partial(batch_losses, weights=weights_of(data))
    optimizer = optimization.optimizer.make(model.parameters(), optimization.learning_rate)
    rate = PlannedRate(optimizer, optimization.learning_rate, plan, optimization.chosen_for)
    average = TailAverage(model, int((1 - optimization.averaged) * plan.steps))
    checkpoint = saved.checkpoint if resume and saved is not None else None
    started, ended = time.perf_counter(), ""
    with (
        ExitStack() as stack,
        attach(
            plan,
            model,
            optimizer,
            optimization.records(data),
            persons=None if data.persons is None else data.persons.tolist(),
            rows_per_record=plan.unit.most_rows * optimization.views,
            ledger=None if plan.noise_multiplier == 0 else ledger,
            label=label,
            noise_seed=noise_seed,
            loss=losses,
            resume=checkpoint,
            projection=optimization.projection,
            random_iterate=optimization.iterate == "random",
        ) as private,
    ):
        by_chance = optimization.iterate == "random"
        swap = private.swap_random_iterate if by_chance else average.swap
        scores = HoldOutCurve(plan, model, swap, public_hold_out(data))
        if checkpoint is not None and saved is not None:
            refuse_other_settings(optimizer, rate, optimization)
            scores.values = saved.restore(private.steps_done, average)
            ended = end_in_time(private, saved, time.perf_counter() - started >= most_seconds)
        elif saved is not None:
            stack.enter_context(saved.before_steps(private, average))
        size = optimization.physical_batch_size
        for x, y in batches_left(private, size, ended):
            private.backward(losses(model, (optimization.seen(x), y)))
            rate.before(private.steps_done, private.clip_norm)
            optimizer.step()
            if not private.finished_step:
                continue
            step = private.steps_done
            average.update(step)
            on_step(step)
            scores.after_step(step)
            ended = end_in_time(private, saved, time.perf_counter() - started >= most_seconds)
            if saved is not None and not ended:
                saved.after_step(private, average, scores.values)
        swap()
        return Trained(
            model=model,
            guarantee=private.spent(),
            basis=basis_of_run(
                private.basis, data, *added_lines(ended, saved), views=optimization.views
            ),
            reservation=private.reservation,
            scores=tuple(scores.values),
            seconds=time.perf_counter() - started,
            ended=ended,
        )


def batches_left(private: PrivateTraining, size: int | None, ended: str) -> Iterable[list[Tensor]]:
    """The batches of the steps to come; none where the run has ended, or was resumed complete."""
    over = ended or private.steps_done == private.plan.steps
    return () if over else private.batches(physical_batch_size=size)


def added_lines(ended: str, saved: SavedRun | None) -> list[Assumption]:
    """Lines of this run's guarantee beside those of every run."""
    packages = saved.packages if saved is not None else ()
    by_others = [trusted(BY_ANOTHER.format(each)) for each in packages]
    return [BY_THE_CLOCK, *by_others] if ended else by_others


def refuse_other_settings(
    restored: torch.optim.Optimizer, rate: PlannedRate, optimization: Optimization
) -> None:
    """Refuse to go on by other settings of the optimizer than the run began with.

    Raises:
        ValueError: naming the one that differs.
    """
    for group in restored.param_groups:
        for name, value in optimization.optimizer.settings.items():
            if group[name] != value:
                raise ValueError(
                    f"--resume: the run has {name}={group[name]!r}, not {value!r}. Fix: the same "
                    "options."
                )
    if not rate.as_begun():
        raise ValueError(
            f"--resume: the run has another learning rate than {optimization.learning_rate:g}. "
            "Fix: the same options."
        )


class HoldOutCurve:
    """Scores after each epoch, of what the run would end with there.

    Args:
        swap: puts that in place, and takes it away again.
        hold_out: public; None: no scores.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        swap: Callable[[], None],
        hold_out: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._last, self._every = plan.steps, -(-plan.n // plan.batch_size)
        self._model, self._swap, self._hold_out = model, swap, hold_out
        self.values: list[float] = []

    def after_step(self, step: int) -> None:
        """Add a score if an epoch, or the run, is over."""
        if self._hold_out is not None and (step % self._every == 0 or step == self._last):
            self._swap()
            self.values.append(score(self._model, *self._hold_out))
            self._swap()


def end_in_time(private: PrivateTraining, saved: SavedRun | None, over: bool) -> str:
    """End the run for good, and say so, if time is over in any process and steps are left."""
    done, planned = private.steps_done, private.plan.steps
    if saved is not None:
        over = bool(saved.ranks.all_max(int(over)))
    if not over or done == planned:
        return ""
    why = private.why_no_refund
    private.finish(refund=not why)
    returned = f"nothing is given back: {why}" if why else "the budget gets the others back"
    return f"after {done} of {planned} steps, by --max-time; {returned}"


def public_hold_out(data: Data) -> tuple[Tensor, Tensor] | None:
    """The hold-out, if there is one and scores on it may be shown."""
    if not data.public or data.x_test is None or data.y_test is None:
        return None
    return torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)


def package_versions() -> dict[str, str]:
    """Versions and kinds of what computed and trained."""
    packages = ("torch", "dp-accounting", "cryptography", "numpy", "scipy")
    return {
        "dpoptim": dpoptim_version,
        **digests(),
        "gradients of single records": native.kind(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }
