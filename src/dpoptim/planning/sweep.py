"""Every method, way of sampling, batch size and number of epochs, with its noise and rank."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from dpoptim.accounting.public_numbers import RELATIONS
from dpoptim.mechanisms import IndependentNoise, RunShape
from dpoptim.methods.method import TrainingMethod
from dpoptim.planning.ranking import noise_to_signal, predicted_error
from dpoptim.planning.targets import Target, estimated_noise
from dpoptim.privacy_unit import RECORD, Unit
from dpoptim.registry import entries, entry, method_names

BATCHES_OF = (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)  # n over these are the batch sizes
SMALLEST_BATCH = 16
EPOCHS = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0)
MOST_STEPS = 100_000
# of noise that is not independent, whose strategies take time to make
MOST_STEPS_CORRELATED = 600
BATCHES_CORRELATED = (64, 16, 4, 1)


@dataclass(frozen=True)
class StepCost:
    """The time of a step: a fixed one, and some for each record. Both > 0, in seconds."""

    per_step: float
    per_record: float

    def seconds(self, steps: int, records: float) -> float:
        """The time of so many steps over so many records, counted as often as they take part."""
        return steps * self.per_step + records * self.per_record


@dataclass(frozen=True)
class Question:
    """The question that a plan answers; public numbers.

    Attributes:
        n: records, or persons. parameters: trained numbers.
        target: what the run must keep to. neighboring: the relation; None: add-or-remove-one
            where a method can hold it, else zero-out.
        methods: names in the registry; None: all, but for those `for_tables`.
        batch_size, epochs: where one is decided already. most_steps: noisy steps at most.
        cost: of a step on the machine that will train; None: not known. max_seconds: of the run.
        unit: whom the guarantee shall protect; n counts them.
        schema: the file that describes the table, for the command to run next.
    """

    n: int
    parameters: int
    target: Target
    neighboring: str | None = None
    methods: Sequence[str] | None = None
    batch_size: int | None = None
    epochs: float | None = None
    cost: StepCost | None = None
    max_seconds: float | None = None
    most_steps: int = MOST_STEPS
    unit: Unit = RECORD
    schema: str | None = None

    def __post_init__(self) -> None:
        if self.n < 1 or self.parameters < 1:
            raise ValueError("n and parameters must be at least 1.")
        if self.batch_size is not None and not 1 <= self.batch_size <= self.n:
            raise ValueError(f"batch_size must be from 1 to n={self.n}, got {self.batch_size}.")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be a finite number above 0, got {self.epochs!r}.")
        if self.max_seconds is not None and self.cost is None:
            raise ValueError("a limit on time needs the cost of a step.")


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        method: with a clip norm of 1, to which nothing here depends.
        run: its public numbers. epochs: passes. noise_multiplier: about; see `estimated_noise`.
        noise_to_signal: of a step, as independent noise would have to be for the same prefix sums.
        error: predicted; only ratios mean anything. seconds: None if the cost of a step is not
        known.
    """

    method: TrainingMethod
    run: RunShape
    epochs: float
    noise_multiplier: float
    noise_to_signal: float
    error: float
    seconds: float | None

    @property
    def records(self) -> float:
        """Gradients of single records that the run computes, expected."""
        return float(self.run.batch_size) * self.run.steps

    @cached_property
    def name(self) -> str:
        """The method, and the settings that it differs in from its defaults."""
        return " ".join([self.method.name, *self.changes])

    @cached_property
    def changes(self) -> tuple[str, ...]:
        """The settings other than the defaults, as --set takes them."""
        plain = entry(self.method.name).make(clip_norm=1.0)
        return tuple(
            f"{field.name}={getattr(self.method, field.name)}"
            for field in fields(self.method)  # type: ignore[arg-type]
            if getattr(self.method, field.name) != getattr(plain, field.name)
        )


def sweep(question: Question) -> list[Setting]:
    """All settings that the question admits, the best predicted first.

    Raises:
        ValueError: an unknown method, one that is no training loop, or no setting is left.
    """
    found = [
        setting
        for method in methods_of(question)
        for setting in candidates(question, method)
        if question.max_seconds is None
        or (setting.seconds is not None and setting.seconds <= question.max_seconds)
    ]
    if not found:
        raise ValueError(
            "no setting is left: every one takes longer than allowed, or no method holds under "
            "this relation. Fix: allow more time, or another relation."
        )
    return sorted(found, key=lambda setting: setting.error)


def candidates(question: Question, method: TrainingMethod) -> Iterator[Setting]:
    """Every batch size and number of epochs of a method and its variants."""
    for batch_size in batch_sizes(question, method):
        for epochs in EPOCHS if question.epochs is None else (question.epochs,):
            yield from settings_of_method(question, method, batch_size, epochs)


def methods_of(question: Question) -> list[TrainingMethod]:
    if question.methods is None:
        every = [listed.make(clip_norm=1.0) for listed in entries().values() if not listed.solver]
        return [method for method in every if not method.for_tables]
    for name in question.methods:
        if name not in method_names() or entry(name).solver:
            loops = ", ".join(each for each, listed in entries().items() if not listed.solver)
            raise ValueError(
                f"method {name!r} is no training loop whose steps can be planned; there are "
                f"{loops}. Solvers divide their budget up themselves; dpoptim compare tries them."
            )
    return [entry(name).make(clip_norm=1.0) for name in question.methods]


def batch_sizes(question: Question, method: TrainingMethod) -> list[int]:
    if question.batch_size is not None:
        return [question.batch_size]
    shares = BATCHES_OF if is_independent(method) else BATCHES_CORRELATED
    least = min(SMALLEST_BATCH, question.n)
    sizes = {method.batch_within(question.n // over, question.n) for over in shares}
    return sorted(size for size in sizes if size >= least)


def is_independent(method: TrainingMethod) -> bool:
    return isinstance(method.mechanism, IndependentNoise)


def settings_of_method(
    question: Question, method: TrainingMethod, batch_size: int, epochs: float
) -> Iterator[Setting]:
    """The method and its own variants at this batch size; nothing where none fits."""
    for variant in method.variants(question.n, batch_size):
        sampler = variant.sampler(question.n, batch_size)
        if sampler.whole_passes and epochs != int(epochs):
            continue
        relation = question.neighboring or next(
            each for each in RELATIONS if each in sampler.relations
        )
        steps = sampler.steps(epochs)
        if relation not in sampler.relations or steps > question.most_steps:
            continue
        run = RunShape(sampler, question.n, batch_size, steps, relation)
        if not is_independent(variant) and steps > MOST_STEPS_CORRELATED:
            continue
        noise = estimated_noise(variant.mechanism, run, question.target.mu)
        effective = noise * variant.mechanism.prefix_noise(run)
        ratio = noise_to_signal(effective, question.parameters, batch_size)
        seconds = (
            None
            if question.cost is None
            else question.cost.seconds(steps, float(batch_size) * steps)
        )
        yield Setting(
            variant,
            run,
            sampler.passes(steps),
            noise,
            ratio,
            predicted_error(ratio, batch_size, steps),
            seconds,
        )
