"""Sums as they came: the same numbers whichever way they are taken, and nobody else's memory."""

import pytest
import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.accumulation import totals
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.accumulation.totals import means_of
from dpoptim.gradients.engine import Engine
from dpoptim.noise.few_rows import write_out


class Words(nn.Module):
    """A table, a layer that is used and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 3), nn.Linear(3, 2)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).sum(1))


def engine_of(dtype: torch.dtype) -> Engine:
    torch.manual_seed(0)
    engine = Engine(Words().to(dtype), Clipping(0.5), capacity=12, reduction="sum")
    engine.attach()
    return engine


def add(engine: Engine, seed: int, passes: int = 1) -> None:
    torch.manual_seed(seed)
    for _ in range(passes):
        engine.begin_microbatch(6)
        engine.model(torch.randint(50, (6, 4))).square().sum().backward()


@pytest.mark.parametrize("passes", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_ways_of_taking_give_the_same_sums(dtype: torch.dtype, passes: int) -> None:
    engine = engine_of(dtype)
    add(engine, 1, passes)
    vectors = [each.clone() for each in engine.split(engine.take())]
    add(engine, 1, passes)
    taken = write_out(engine.take_by_parameter())
    assert passes == 0 or sum(float(each.norm()) for each in taken) > 0.1
    for one, other in zip(vectors, engine.split(taken), strict=True):
        assert torch.equal(one, other.double())
    head = taken[engine.names.index("head.weight")]
    assert head.dtype == (torch.float64 if passes == 2 else dtype)


@pytest.mark.parametrize("by_parameter", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_were_written_stay_as_they_are(
    dtype: torch.dtype, by_parameter: bool
) -> None:
    """The memory of sums is used again, that of gradients is not; nor are they views of it."""
    engine = engine_of(dtype)
    add(engine, 1)
    take = engine.take_by_parameter if by_parameter else engine.take
    engine.write_means(write_out(take()), 6.0)
    gradients = [p.grad for p in engine.parameters]
    before = [each.clone() for each in gradients if each is not None]
    add(engine, 2)
    take()
    for p, now, then in zip(engine.parameters, gradients, before, strict=True):
        assert now is not None
        assert torch.equal(now, then)
        assert (now.shape, now.dtype) == (p.shape, p.dtype)
        assert not now._is_view()


def test_a_term_for_several_sums_is_not_shared() -> None:
    sums = Sums([3], directions=((1.0, 1.0), (1.0, 2.0)))
    term = torch.ones(3, dtype=torch.float64)
    sums.add(term, (1.0, 1.0))
    sums.add(torch.ones(6, dtype=torch.float64))
    assert [each.tolist() for each in sums.settle()] == [[2.0] * 3, [2.0] * 3]
    sums.restart()
    assert not any(each.any() for each in sums.settle())


@pytest.mark.parametrize("divisor", [1.0, 3.0, 498.37])
def test_means_by_one_call_are_those_of_each(
    divisor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, of numbers that float32 cannot hold, too."""
    torch.manual_seed(0)
    sums = [torch.randn(3, 7), torch.randn(50).double() * 1e-42, torch.randn(4, 2).double() * 1e39]
    likes = [torch.empty(each.shape) for each in sums]
    found = means_of([each.clone().flatten() for each in sums], divisor, likes)
    monkeypatch.setattr(totals, "compiled_means", lambda: None)
    expected = means_of([each.clone().flatten() for each in sums], divisor, likes)
    assert all(map(torch.equal, found, expected))
    assert [each.shape for each in found] == [each.shape for each in sums]


def test_means_on_accelerators_share_no_memory_with_other_sums() -> None:
    """A gradient is saved with its storage: nothing without noise may lie in it."""
    private = torch.randn(12)
    taken = [private[:6], torch.randn(3), torch.randn(2).double()]
    expected = [each.float() / 3 for each in taken]
    found = totals.means_there(taken, 3.0, [torch.empty(each.shape) for each in taken])
    assert all(map(torch.equal, found, expected))
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in found)
    assert found[1].data_ptr() == taken[1].data_ptr()  # which costs no copy


def test_nothing_is_added_to_a_sum_that_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """It travels to other processes then. A backward pass finds the last layers first."""
    layers = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)]
    model = nn.Sequential(nn.EmbeddingBag(9, 3), *layers)
    engine = Engine(model, Clipping(0.5), capacity=6, reduction="sum")
    engine.attach()
    finished: list[bool] = []
    sums = engine.totals.sums
    monkeypatch.setattr(
        engine.totals, "finish", lambda place: finished.append(not sums[place].empty)
    )
    engine.begin_microbatch(6)
    model(torch.randint(9, (6, 4))).square().sum().backward()
    engine.detach()
    assert finished == [True] * len(sums)
