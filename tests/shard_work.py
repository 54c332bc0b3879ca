"""What the ranks of tests/distributed/test_shards.py do: fits of shards, alone and together."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from dp_accounting import GaussianDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy.sparse import csr_array
from sklearn.base import clone

import dpoptim
from distributed_work import caught
from dpoptim.accounting import compute_epsilon, gdp_mu
from dpoptim.data import ParquetRows
from dpoptim.distributed.process_group import ProcessGroup
from dpoptim.distributed.wrapping import ranks_of
from dpoptim.estimators import DPLinearRegression, DPLogisticRegression
from dpoptim.gate import TrialsGate
from dpoptim.noise.gaussian import add_normal
from dpoptim.noise.stream import KeyStream
from dpoptim.noise.trials import logarithmic_count
from dpoptim.preprocessing import DPMinMaxScaler, DPStandardScaler, PrivatePipeline
from dpoptim.solvers import Budget, LinearProblem, Objective, select_stationary
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.tuning import DPSearchCV
from dpoptim.tuning.search_event import SHAPE

ROWS, FEATURES = 600, 4
TRIALS, SEVERAL = 8.0, 10  # on average; a seed under which ranks by themselves draw more
SIZES = {1: [600], 2: [399, 201], 3: [300, 3, 297]}
# the batches of these take their records from all ranks: another order of the union
SINGLE_PASS = ("accelerated-srgd", "one-pass-sgd")
SOLVERS = ("momentum-gd", "noisy-gd", "kl-spider", "adaptive-gd")
FEW: dict[str, Any] = {"kl-spider": {"rounds": 4}, "adaptive-gd": {"max_steps": 12}}


def table(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, text labels of three classes (one of them on the last rows alone), targets."""
    draws = np.random.default_rng(5)
    x = draws.standard_normal((rows, FEATURES))
    labels = np.array(["no", "yes"], "<U5")[(x[:, 0] > 0).astype(int)]
    labels[-20:] = "maybe"
    return x, labels, x.sum(1) + draws.standard_normal(rows)


def own_rows(rank: int, size: int) -> slice:
    start = sum(SIZES[size][:rank])
    return slice(start, start + SIZES[size][rank])


def estimator(kind: str, **more: Any) -> Any:
    common: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-5, "noise_seed": 3, "data_norm": 2.0}
    if kind in ("sufficient-statistics", "huber"):
        loss: Any = "huber" if kind == "huber" else "squared"
        solver = "momentum-gd" if kind == "huber" else kind
        if kind == "huber":
            common["steps"] = 8
        return DPLinearRegression(target_bound=4.0, loss=loss, solver=solver, **common | more)
    if kind in FEW:
        common["solver_options"] = FEW[kind]
    if kind in ("momentum-gd", "noisy-gd"):
        common["steps"] = 8
    return DPLogisticRegression(solver=kind, l2=0.01, **common | more)


def fitted(fit: Any) -> np.ndarray:
    return np.concatenate([np.ravel(fit.coef_), np.ravel(fit.intercept_)])


def fits(rank: int, kinds: list[str], sharded: bool, folder: str) -> dict[str, Any]:
    """Weights and guarantee of each kind; shards as memory maps where they are files."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    own = own_rows(rank, size) if sharded else slice(None)
    x, labels, targets = table()
    if sharded:
        path = f"{folder}/shard-{size}-{rank}.npy"
        np.save(path, x[own])
        rows: Any = np.load(path, mmap_mode="r")
    else:
        rows = x
    found = {}
    for kind in kinds:
        form, _, solver = kind.rpartition(" ")
        fit = estimator(solver, sharded=sharded)
        weights = np.linspace(0, 2, ROWS)[own] if form == "weighted" else None
        shard = csr_array(x[own]) if form == "sparse" else rows
        fit.fit(shard, (targets if hasattr(fit, "loss") else labels)[own], weights)
        found[kind] = fitted(fit), str(fit.privacy_.epsilon)
    return found


def selected(rank: int) -> np.ndarray:
    """The solver that also chooses among points, on an objective of this rank's part."""
    x, labels, _ = table()
    size = dist.get_world_size() if dist.is_initialized() else 1
    own = own_rows(rank, size)
    problem = LinearProblem(LinearModel("logistic", FEATURES), capacity=ROWS, l2=0.05)
    objective = Objective(problem, (x[own], (labels == "yes")[own] * 1), ranks=ranks_of(None, None))
    result = select_stationary(
        objective,
        None,
        Budget(1e-5, mu=2.0),
        lipschitz=1.0,
        smoothness=1.0,
        max_steps=6,
        noise_seed=3,
    )
    return result.weights.numpy()


def dealt_order(size: int, batch_size: int, steps: int) -> np.ndarray:
    """The order of the union in which single-pass solvers see the rows of shards."""
    sizes = SIZES[size]
    own = [batch_size * each // ROWS for each in sizes]
    starts = np.cumsum([0, *sizes[:-1]])
    return np.concatenate(
        [
            np.arange(start + t * part, start + (t + 1) * part)
            for t in range(steps)
            for start, part in zip(starts, own, strict=True)
        ]
    )


def one_pass(rank: int, kind: str, steps: int, order: np.ndarray | None) -> np.ndarray:
    """A single-pass fit of shards, or of rows in a given order by one process."""
    x, labels, _ = table()
    rows = own_rows(rank, dist.get_world_size()) if order is None else order
    options = {"clip_norm": 1.0, "beta": 4.0}
    if order is not None:
        options["batch_size"] = len(order) // steps
    fit = estimator(
        kind, sharded=order is None, steps=steps, solver_options=options, classes=np.unique(labels)
    )
    return fitted(fit.fit(x[rows], labels[rows]))


def parquet(rank: int, paths: list[str], names: list[str]) -> tuple[np.ndarray, int]:
    """A fit of this rank's row groups, in one of which all of the work is at a time."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rows = ParquetRows(paths, names, part=(rank, size), dtype=np.float64)
    fit = estimator("momentum-gd", sharded=True, classes=["maybe", "no", "yes"])
    fit.fit(rows, rows.column("label"))
    return fitted(fit), len(rows)


def charged(rank: int, path: str) -> dict[str, Any]:
    """Two fits on rank 0's ledger, which admits one; whether the charge was there before a sum
    arrived.
    """
    ledger = dpoptim.Ledger(path, epsilon=6.0, delta=1e-5, neighboring="zero-out")
    options = {"ledger": ledger} if rank == 0 else {}
    honest, seen = ProcessGroup.total, []

    def total(self: ProcessGroup, local: torch.Tensor) -> torch.Tensor:
        seen.append(len(dpoptim.Ledger(path).entries()))
        return honest(self, local)

    x, labels, _ = table()
    own = own_rows(rank, dist.get_world_size())
    fit = estimator("noisy-gd", sharded=True, steps=5, noise_seed=None, **options)
    with patch.object(ProcessGroup, "total", total):
        fit.fit(x[own], labels[own])
    second = caught(lambda: fit.fit(x[own], labels[own]))
    entries = [(entry.state, entry.id) for entry in ledger.entries()] if rank == 0 else []
    return {"seen": seen, "privacy": fit.privacy_, "second": second, "entries": entries}


def charging(rank: int, path: str) -> dict[str, Any]:
    """What each rank hears that fits preprocessing or evaluates as one process would; what the
    ledger that they share shows then.
    """
    x, labels, _ = table()
    with dpoptim.Ledger(path, neighboring="zero-out") as ledger:
        options: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "ledger": ledger}
        asked: dict[str, Callable[[], Any]] = {
            "scaler": lambda: DPStandardScaler(lower=-4.0, upper=4.0, **options).fit(x),
            "quantiles": lambda: DPMinMaxScaler(-4.0, 4.0, quantile=0.1, **options).fit(x),
            "evaluation": lambda: dpoptim.evaluation.evaluate_classifier(
                np.full((ROWS, 3), 1 / 3),
                labels,
                classes=["no", "yes", "maybe"],
                records="hold-out",
                **options,
            ),
        }
        alone = ("scaler", "quantiles", "evaluation")  # on rank 0
        said = {
            name: "" if rank == 0 and name in alone and ask() is not None else caught(ask)
            for name, ask in asked.items()
        }
        dist.barrier()
        return said | {"charges": len(ledger.entries())}


def together(rank: int, path: str) -> dict[str, Any]:
    """A pipeline and a search that all ranks fit: what was learnt, charged and tried where."""
    x, labels, _ = table()
    ledger = dpoptim.Ledger(path, neighboring="zero-out") if rank == 0 else None
    options: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-5, "ledger": ledger}
    fit = estimator("momentum-gd", classes=["maybe", "no", "yes"])
    own = DPStandardScaler(lower=-4.0, upper=4.0, noise_seed=1)
    steps = [("scale", own), ("fit", fit)]
    pipeline = PrivatePipeline(steps, **options).fit(x, labels)
    tried: list[float] = []
    honest = DPLogisticRegression.fit

    def spy(self: Any, *data: Any, persons: Any = None) -> Any:
        done = honest(self, *data, persons=persons)
        tried.append(self.l2)  # where the fit did not end at its charge
        return done

    with patch.object(DPLogisticRegression, "fit", spy):
        search = DPSearchCV(fit, {"l2": [0.1, 0.2]}, mean_trials=8.0, noise_seed=5, **options).fit(
            x, labels.astype(object)
        )
    sharded = DPSearchCV(clone(fit).set_params(sharded=True), {"l2": [0.1]}, **options)
    return {
        "pipeline": (own.mean_, own.scale_, fitted(pipeline.steps[-1][1])),
        "pipeline's": pipeline.privacy_,
        "own step": pipeline.named_steps["scale"] is own,
        "search": (search.best_score_, fitted(search.best_estimator_), search.best_params_),
        "search's": search.privacy_,
        "tried": tried,
        "entries": [str(entry.event) for entry in ledger.entries()] if ledger else [],
        "refused": {}
        if not dist.is_initialized()
        else {
            "sharded": caught(lambda: sharded.fit(x, labels)),
            "differ": caught(lambda: PrivatePipeline(steps, **options).fit(x + rank, labels)),
            "persons": caught(
                lambda: DPSearchCV(clone(fit), {"l2": [0.1]}, **options).fit(
                    x, labels, persons=np.arange(ROWS) // 2 if rank == 0 else None
                )
            ),
        },
    }


def differing(rank: int) -> dict[str, str]:
    """What is said on ranks that do not agree, or one of which fails; in the same processes."""
    x, labels, targets = table()
    own = own_rows(rank, dist.get_world_size())
    broken = x[own].copy()
    broken[0, 0] = np.nan if rank else 0.0

    def fit(rows: Any, y: Any, kind: str = "noisy-gd", **more: Any) -> Callable[[], Any]:
        settings = {"sharded": True, "steps": 4} | more
        if kind != "noisy-gd":
            settings.pop("steps")
        return lambda: estimator(kind, **settings).fit(rows, y)

    def unreadable(self: LinearModel, *args: Any, **more: Any) -> Any:
        raise OSError("of rank 1 alone")

    honest = LinearModel.clipped_sum
    failing = patch.object(LinearModel, "clipped_sum", unreadable if rank else honest)
    with failing:
        in_a_sum = caught(fit(x[own], labels[own]))
    return {
        "epsilon": caught(fit(x[own], labels[own], epsilon=5.0 + rank)),
        "columns": caught(fit(x[own][:, : 4 - rank], labels[own])),
        "classes": caught(
            fit(x[own], labels[own], classes=["maybe", "no", "yes", "what"][: 3 + rank])
        ),
        "data": caught(fit(x + rank, labels, sharded=False)),
        "weights": caught(
            lambda: estimator("noisy-gd", sharded=True, steps=4).fit(
                x[own], labels[own], 2.0 if rank else None
            )
        ),
        "the whole taken for shards": caught(
            lambda: estimator("noisy-gd", sharded=True).fit(x, labels)
        ),
        "shards taken for the whole": caught(fit(x[own], labels[own], sharded=False)),
        "broken table": caught(fit(broken, labels[own])),
        "undeclared": caught(
            fit(x[own], np.where(rank, "else", labels[own]), classes=["maybe", "no", "yes"])
        ),
        "in a sum": in_a_sum,
        "statistics": caught(fit(x[own], targets[own], "sufficient-statistics", l2=-1.0)),
        "works after all that": str(fitted(fit(x[own], labels[own])()).shape),
    }


def dies(rank: int, how: str) -> tuple[str, float]:
    """The last rank is killed in the middle of a sum, or raises alone; how long others waited."""
    x, labels, _ = table()
    size = dist.get_world_size()
    honest, asked = LinearModel.clipped_sum, []

    def clipped_sum(self: LinearModel, *args: Any, **more: Any) -> Any:
        asked.append(1)
        if rank == size - 1 and len(asked) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(self, *args, **more)

    own = own_rows(rank, size)
    started = time.monotonic()
    with patch.object(LinearModel, "clipped_sum", clipped_sum):
        said = caught(lambda: estimator("noisy-gd", sharded=True).fit(x[own], labels[own]))
    return said, time.monotonic() - started


# ---- what would break the guarantee -------------------------------------------------------------


def noise_alone(rank: int, solver: str = "noisy-gd") -> float:
    """The squares of a release of nothing but noise, per standard deviation squared, less 1: in
    standard errors.
    """
    features = 20_000
    n = 40
    x, y = np.zeros((n, features), np.float32), np.arange(n) // 3 % 2
    own = slice(rank * 20, rank * 20 + 20)
    fit = DPLogisticRegression(
        1.0,
        1e-5,
        fit_intercept=False,
        solver=solver,
        steps=1,
        step_size=1.0,
        clip_norm=1.0,
        sharded=True,
    ).fit(x[own], y[own])
    deviation = dpoptim.accounting.gaussian.gdp_mu(1.0, 1e-5) ** -1 / n
    squares = float(np.square(fit.coef_ / deviation).sum())
    return (squares - features) / (2 * features) ** 0.5


def mutants(rank: int) -> dict[str, tuple[str, Any]]:
    """Bugs, by name: what would notice each, and the change to the code."""
    honest_total, honest_sum = ProcessGroup.total, LinearModel.clipped_sum
    honest_open, honest_trials = dpoptim.gate.FilteredGate.open, TrialsGate.__init__

    def noise_of_all(self: ProcessGroup, local: torch.Tensor) -> torch.Tensor:
        noisy = local.clone()
        add_normal(KeyStream(), noisy, 4.0)
        return honest_total(self, noisy)

    def forgotten(self: ProcessGroup, local: torch.Tensor) -> torch.Tensor:
        return honest_total(self, local * 0 if rank == 1 else local)

    def unclipped(self: LinearModel, x: Any, y: Any, terms: Any, bound: float, **more: Any) -> Any:
        return honest_sum(self, x, y, terms, bound * (100 if rank == 1 else 1), **more)

    waiting: list[tuple[Any, float]] = []

    def put_off(self: Any, mu: float) -> None:
        if self.reservation is None and not waiting:
            waiting.append((self, mu))
        else:
            honest_open(self, mu)

    def then_reserve(self: ProcessGroup, local: torch.Tensor) -> torch.Tensor:
        total = honest_total(self, local)
        for gate, mu in waiting:
            honest_open(gate, mu)
        return total

    @contextmanager
    def late() -> Iterator[None]:
        with (
            patch.object(ProcessGroup, "total", then_reserve),
            patch.object(dpoptim.gate.FilteredGate, "open", put_off),
        ):
            yield

    def own_event(self: TrialsGate, *, event: Any, **settings: Any) -> None:
        honest_trials(
            self, event=RepeatAndSelectDpEvent(event.event, event.mean / 2, SHAPE), **settings
        )
        self.event = event

    def without_dealing(estimator: Any, x: Any, y: Any, weights: Any, *others: Any) -> Any:
        return x, y, weights

    return {
        "none": ("", nullcontext()),
        "noise by every rank": ("noise", patch.object(ProcessGroup, "total", noise_of_all)),
        "noise by no rank": (
            "noise",
            patch.object(dpoptim.gate.adaptive, "add_normal", lambda *a: None),
        ),
        "a rank's sum left out": ("sums", patch.object(ProcessGroup, "total", forgotten)),
        "a rank not clipped": ("sums", patch.object(LinearModel, "clipped_sum", unclipped)),
        "records on all ranks": (
            "dealt",
            patch("dpoptim.estimators.linear.own_part", without_dealing),
        ),
        "reserved after the sum": ("charge", late()),
        "each rank draws its own number of trials": (
            "trials",
            patch.object(ProcessGroup, "common_stream", ProcessGroup.own_stream),
        ),
        "trials of the other rank not charged": (
            "trials",
            patch.object(TrialsGate, "__init__", own_event),
        ),
        "each rank reserves": (
            "charge",
            patch.object(ProcessGroup, "ledger", lambda self, ledger: ledger),
        ),
    }


def caught_mutants(rank: int, alone: np.ndarray, folder: str) -> dict[str, bool]:
    """Which mutants are noticed, each by its detector; the code as it is, by any."""
    x, labels, _ = table()
    own = own_rows(rank, dist.get_world_size())

    def wrong_sums(*, sharded: bool) -> bool:
        part = own if sharded else slice(None)
        fit = estimator("momentum-gd", sharded=sharded).fit(x[part], labels[part])
        return bool(np.abs(fitted(fit) - alone).max() > 1e-6)

    def wrong_charge() -> bool:
        path = f"{folder}/{name}.sqlite".replace(" ", "-")
        honest, early = ProcessGroup.total, []
        ledger = dpoptim.Ledger(path, neighboring="zero-out")

        def total(self: ProcessGroup, local: torch.Tensor) -> torch.Tensor:
            early.append(len(dpoptim.Ledger(path).entries()) != 1)
            return honest(self, local)

        with patch.object(ProcessGroup, "total", total):
            estimator("noisy-gd", sharded=True, steps=3, ledger=ledger).fit(x[own], labels[own])
        dist.barrier()
        return any(early) or len(dpoptim.Ledger(path).entries()) != 1

    def wrong_trials() -> bool:
        """Trials in another number than the ranks have in common, or too few charged."""
        path = f"{folder}/trials, {name}.sqlite".replace(" ", "-")
        honest, fits = DPLogisticRegression.fit, []

        def spy(self: Any, *data: Any, persons: Any = None) -> Any:
            fitted = honest(self, *data, persons=persons)
            fits.append(gdp_mu(self.epsilon, self.delta))  # not of fits that end at their charge
            return fitted

        with patch.object(DPLogisticRegression, "fit", spy):
            DPSearchCV(
                estimator("momentum-gd", classes=["maybe", "no", "yes"]),
                {"l2": [0.1, 0.2]},
                epsilon=4.0,
                delta=1e-5,
                mean_trials=TRIALS,
                noise_seed=SEVERAL,
                ledger=dpoptim.Ledger(path, neighboring="zero-out") if rank == 0 else None,
            ).fit(x, labels)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, fits)
        made = [mu for each in everyone for mu in each]
        (entry,) = dpoptim.Ledger(path).entries()
        spent = RepeatAndSelectDpEvent(GaussianDpEvent(1 / max(made)), TRIALS, SHAPE)
        charge, cost = (
            compute_epsilon(event, 1e-5, "zero-out").epsilon for event in (entry.event, spent)
        )
        number = logarithmic_count(KeyStream.from_seed(SEVERAL, "trials"), TRIALS)
        return len(made) != number or charge < cost * (1 - 1e-3)

    detectors = {
        "noise": lambda: abs(noise_alone(rank)) > 5,
        "sums": lambda: wrong_sums(sharded=True),
        "dealt": lambda: wrong_sums(sharded=False),
        "charge": wrong_charge,
        "trials": wrong_trials,
    }
    found = {}
    for name, (detector, change) in mutants(rank).items():
        with change:
            found[name] = any(
                detect() for key, detect in detectors.items() if detector in ("", key)
            )
        dist.barrier()
    return found
