"""Random generators that a model, a data set or a collate function holds: their seeds are public
until batches are delivered, and theirs again afterwards.
"""

import functools
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from dis import get_instructions
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dpoptim
from dpoptim.training.randomness.generators import generators_in, loaded_by, states_of
from dpoptim.training.trials.isolation import IsolationWarning

N, D, STEPS = 8, 5, 2
X, Y = torch.randn(N, D, generator=torch.Generator().manual_seed(1)), torch.arange(N) % 3
Draw = Callable[[Any, tuple[int, ...]], Tensor]


def by_numpy(generator: Any, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(generator.random(shape)).float()


def one_by_one(generator: random.Random, shape: tuple[int, ...]) -> Tensor:
    numbers = [generator.random() for _ in range(int(np.prod(shape)))]
    return torch.tensor(numbers).view(shape)


KINDS: dict[str, tuple[Callable[[], Any], Draw]] = {
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda g, shape: torch.rand(shape, generator=g),
    ),
    "numpy": (lambda: np.random.default_rng(3), by_numpy),
    "numpy, Philox": (lambda: np.random.Generator(np.random.Philox(3)), by_numpy),
    "numpy's older": (lambda: np.random.RandomState(3), lambda g, s: by_numpy_s_older(g, s)),
    "Python": (lambda: random.Random(3), one_by_one),
}


def by_numpy_s_older(generator: np.random.RandomState, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(generator.random_sample(shape)).float()


class Augmenting(nn.Module):
    """Scales its inputs by numbers of its own, in training mode at least."""

    def __init__(self, kind: str, *, always: bool = False) -> None:
        super().__init__()
        make, self.draw = KINDS[kind]
        self.layer, self.held, self.always = nn.Linear(D, 3), {"generator": [make()]}, always
        self.drawn: list[Tensor] = []

    @property
    def generator(self) -> Any:
        return self.held["generator"][0]

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training or self.always):
            return self.layer(x)
        numbers = self.draw(self.generator, tuple(x.shape))
        self.drawn.append(numbers)
        return self.layer(x * numbers)


def each(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trained(model: nn.Module, data: Dataset[Any], **options: Any) -> Any:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=STEPS, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, data, **options) as private:
        if isinstance(model, Augmenting):
            model.drawn.clear()
        for batch in private.batches():
            private.backward(each(model, batch))
            optimizer.step()
    return private


@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", [{}, {"loss": each}, {"isolation": "alone"}])
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_knows_the_numbers_that_a_model_draws_by_itself(
    kind: str, options: dict[str, Any]
) -> None:
    model = Augmenting(kind)
    before = states_of([model.generator])
    trained(model, TensorDataset(X, Y), **options)
    drawn = torch.cat(model.drawn)
    assert drawn.shape == (STEPS * N, D)
    assert states_of([model.generator]) == before
    make, draw = KINDS[kind]
    assert not torch.isin(drawn, draw(make(), (20 * STEPS * N, D))).any()


def test_nobody_knows_the_numbers_that_a_loss_draws_by_itself() -> None:
    """Such as noise and times of diffusion; a loss that draws by other generators is refused."""
    make, draw = KINDS["torch"]
    generator, drawn = make(), list[Tensor]()

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        drawn.append(draw(generator, tuple(batch[0].shape)))
        return F.cross_entropy(model(batch[0] + drawn[-1]), batch[1], reduction="none")

    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=STEPS, noise_multiplier=0.0, delta=1e-5
    )
    model = nn.Linear(D, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, TensorDataset(X, Y), loss=noisy) as private:
        drawn.clear()
        before = states_of([generator])
        for batch in private.batches():
            private.backward(noisy(model, batch))
            optimizer.step()
    assert states_of([generator]) == before
    assert not torch.isin(torch.cat(drawn), draw(make(), (20 * STEPS * N, D))).any()


class Jittered(Dataset[Any]):
    def __init__(self, generator: Any) -> None:
        self.generator, self.drawn = generator, list[float]()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.drawn.append(float(self.generator.random()))
        return X[index] + self.drawn[-1], Y[index]


def test_nobody_knows_the_numbers_that_a_data_set_draws_by_itself() -> None:
    data = Jittered(np.random.default_rng(3))
    model, before = nn.Linear(D, 3), None
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=STEPS, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, data) as private:
        data.drawn.clear()
        before = states_of([data.generator])
        for batch in private.batches():
            private.backward(each(model, batch))
            optimizer.step()
    assert len(data.drawn) >= STEPS * N
    assert states_of([data.generator]) == before
    assert not np.isin(data.drawn, np.random.default_rng(3).random(1000)).any()


class Shown(Jittered):
    """Hands out what it draws."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x, y, torch.tensor(self.drawn[-1], dtype=torch.float64)


def public_seeds(worker: int) -> None:
    """As many programs have it, and all can read it."""
    torch.utils.data.get_worker_info().dataset.generator = np.random.default_rng(worker)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.variants)])
@pytest.mark.parametrize("first", [None, public_seeds])
def test_workers_draw_other_numbers_than_each_other_which_nobody_knows(
    first: Callable[[int], None] | None, start: str
) -> None:
    """Copies of one generator would draw for records of two microbatches the same numbers, and one
    record more would change for which.
    """
    model = nn.Linear(D, 3)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=4, noise_multiplier=0.0, delta=1e-5
    )
    optimizer, drawn = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    data = Shown(np.random.default_rng(3))
    with dpoptim.attach(plan, model, optimizer, data) as private:
        for x, y, numbers in private.batches(
            num_workers=2, worker_init_fn=first, multiprocessing_context=start
        ):
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            drawn += numbers.tolist()
    assert len(drawn) == len(set(drawn)) == 4 * N
    for seed in (0, 1, 3):
        assert not np.isin(drawn, np.random.default_rng(seed).random(1000)).any()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "torch"])
def test_draws_in_evaluation_mode_leave_nothing_to_compare(kind: str) -> None:
    with pytest.warns(IsolationWarning, match="in evaluation mode as well"):
        private = trained(Augmenting(kind, always=True), TensorDataset(X, Y))
    assert private.steps_done == STEPS
    assert any("every microbatch has one record" in item.text for item in private.basis)
    with pytest.raises(dpoptim.PrivacyError, match='isolation="alone"'):
        trained(Augmenting(kind, always=True), TensorDataset(X, Y), isolation="rules")


class Hoarding(Augmenting):
    """Adds what it computed last."""

    last = 0.0

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        found, self.last = scores + self.last, float(scores.detach().mean())
        return found


@pytest.mark.parametrize("always", [False, True])
def test_a_generator_excuses_no_memory(always: bool) -> None:
    with pytest.raises(dpoptim.SamplesInteractError):
        trained(Hoarding("numpy", always=always), TensorDataset(X, Y), isolation="alone")
    with pytest.raises(dpoptim.SamplesInteractError):
        trained(Hoarding("numpy", always=always), TensorDataset(X, Y))


class MovesSpans(nn.Module):
    """Adds distances from a learnt vector where numpy says so, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 4), nn.Linear(4, 3)
        self.mask = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x[:, :, None])
        if self.training:
            if float(x.detach().abs().max()) > 1e9:  # no vectorised call can look
                raise ValueError
            places = torch.from_numpy(np.random.rand(*x.shape) < 0.5)
            hidden = hidden + places[:, :, None] * torch.cdist(hidden, self.mask[None])
        return self.second(hidden.mean(1))


@pytest.mark.parametrize("options", [{}, {"loss": each}])
def test_what_only_training_runs_is_tried_as_it_trains(options: dict[str, Any]) -> None:
    """In evaluation mode rules serve it; in training mode they do not."""
    model = MovesSpans()
    before = model.mask.detach().clone()
    with pytest.warns(IsolationWarning, match="in training mode"):
        private = trained(model, TensorDataset(X, Y), **options)
    assert any("every microbatch has one record" in item.text for item in private.basis)
    assert not torch.equal(model.mask, before)
    with pytest.raises(dpoptim.PrivacyError, match='isolation="auto"'):
        trained(MovesSpans(), TensorDataset(X, Y), isolation="rules")


def global_names(generator: Any) -> dict[str, Any]:
    """A program in which all share a generator, as notebooks do."""
    source = """
class Scales(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(rng.random())

class OfTheClass:
    generator = rng

    def __getitem__(self, index): ...

class Names:
    rng = 1.0

    def __getitem__(self, index):
        return self.rng

draw = rng.random

def jitter(row):
    return row + draw()

def collate(rows):
    return [jitter(row) for row in rows]
"""
    program: dict[str, Any] = {"__name__": "program", "rng": generator, "nn": nn}
    exec(source, program)
    return program


def test_generators_that_a_program_shares_are_found() -> None:
    generator = np.random.default_rng(5)
    program = global_names(generator)
    for part in (program["Scales"](D, 3), program["OfTheClass"](), program["collate"]):
        assert generators_in(part) == [generator]
    assert generators_in(program["Names"]()) == []


def test_names_of_globals_are_those_that_dis_finds() -> None:
    """Also beyond the 128th name of a function, whose number takes two bytes."""
    many = compile(
        "def f():\n" + "".join(f"  a{i}.b{i} = g{i}(1)\n" for i in range(400)), "", "exec"
    )
    (long,) = [each for each in many.co_consts if isinstance(each, CodeType)]
    functions = [each for each in vars(inspect).values() if isinstance(each, FunctionType)]
    assert len(functions) > 50
    for code in (long, *(each.__code__ for each in functions)):
        found = {str(i.argval) for i in get_instructions(code) if i.opname == "LOAD_GLOBAL"}
        assert {*loaded_by(code)} == found
    assert len({*loaded_by(long)}) == 800


def test_nobody_foretells_the_numbers_of_a_generator_that_is_a_global() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        program = global_names(np.random.default_rng(5))
        model = program["Scales"](D, 3)
        trained(model, TensorDataset(X, Y), isolation="alone")
        found.append(model.weight.detach().clone())
    assert not torch.equal(*found)


@dataclass(slots=True)
class InSlots:
    generator: Any


class NamedRecords(list[Any]):
    def __init__(self, generator: Any) -> None:
        super().__init__([1, 2])
        self.generator = generator


def test_generators_are_found_wherever_a_program_holds_them() -> None:
    mine = [np.random.default_rng(i) for i in range(4)]

    class Collate:
        def __init__(self) -> None:
            self.inner = {"by": functools.partial(print, mine[0])}

        def method(self) -> None: ...

    def closed() -> object:
        return mine[1]

    found = generators_in(Collate().method, closed, [(mine[2],), {0: mine[3]}])
    assert {*map(id, found)} >= {id(mine[0]), id(mine[2]), id(mine[3])}
    assert id(mine[1]) in {*map(id, found)}
    assert generators_in(random.SystemRandom(), "text", None) == []
    assert generators_in([(f"{i}.png", i) for i in range(50_000)], [[[(mine[0],)]]]) == [mine[0]]
    assert generators_in(InSlots(mine[0])) == generators_in(NamedRecords(mine[0])) == [mine[0]]
    assert generators_in(functools.partial(mine[0].normal, 0.0)) == [mine[0]]
    assert len(generators_in([mine[0], mine[0]], [None] * 10**6)) == 1
