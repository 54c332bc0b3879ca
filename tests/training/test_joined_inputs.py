"""Several inputs of each record in one call of the model: triplets, pairs of answers, two views."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.gradients.hooks import joined_inputs
from released_sums import sum_of_one_step

N, FEATURES = 9, 6
generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(3, N, 2, FEATURES, generator=generator).unbind(0)
Loss = Callable[[nn.Module, Any], Tensor]


class Pooled(nn.Module):
    """Layers with rules, bare parameters, a custom RMSNorm, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 4)
        self.scale, self.places = nn.Parameter(torch.ones(8)), nn.Parameter(torch.randn(1, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + self.places
        h = self.scale * h * h.square().mean(-1, keepdim=True).add(1e-3).rsqrt()
        return self.last(h.tanh().mean(1))


class Squares(torch.autograd.Function):
    """Which nothing vectorises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.square() @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 2 * x * (g @ w), g.t() @ x.square()


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(8, FEATURES)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = Squares.apply(x.mean(1), self.weight)
        return self.head(inner.tanh())


def apart(m: nn.Module, b: Any) -> Tensor:
    return F.triplet_margin_loss(*map(m, b), margin=3.0, reduction="none")


def by_batches(m: nn.Module, b: Any) -> Tensor:
    return F.triplet_margin_loss(*m(torch.cat(b)).chunk(3), margin=3.0, reduction="none")


def by_records(m: nn.Module, b: Any) -> Tensor:
    found = m(torch.stack(b, 1).flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1)
    return F.triplet_margin_loss(*found, margin=3.0, reduction="none")


def mean_of_pairs(m: nn.Module, b: Any) -> Tensor:
    a, c = m(torch.cat(b[:2])).chunk(2)
    return F.mse_loss(a, c)


def released(
    loop: Loss,
    keep: Sequence[int] = range(N),
    *,
    build: Callable[[], nn.Module] = Pooled,
    clip_norm: float = 1.0,
    bare: bool = False,
    loss: Loss | None = None,
    **batches: Any,
) -> Tensor:
    """The sum of one step, without noise."""
    torch.manual_seed(0)
    data = TensorDataset(*(each[list(keep)] for each in INPUTS))
    how = {"n": N, "clip_norm": clip_norm, "bare": bare, "batches": batches}
    return sum_of_one_step(build(), data, loop, loss=loss or loop, **how)


@pytest.mark.thinned(2)
@pytest.mark.usefixtures("tried_once_a_file")
@pytest.mark.parametrize("build", [Pooled, Custom])
@pytest.mark.parametrize("loop", [by_batches, by_records])
@pytest.mark.filterwarnings("ignore:.*record by record")
def test_the_sum_is_that_of_one_call_for_each_input(loop: Loss, build: Any) -> None:
    """By rules, of which an isolation warning would be the contrary."""
    expected = released(apart, build=build)
    torch.testing.assert_close(released(loop, build=build), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("tried_once_a_file")
@pytest.mark.parametrize("batches", [{"physical_batch_size": 4}, {"fixed_shape": True}])
def test_in_batches_of_other_sizes(batches: dict[str, Any]) -> None:
    found = released(by_batches, **batches)
    torch.testing.assert_close(found, released(apart), rtol=1e-4, atol=1e-5)


@pytest.mark.variants
@pytest.mark.usefixtures("tried_once_a_file")
def test_of_a_mean() -> None:
    def each(m: nn.Module, b: Any) -> Tensor:
        return (m(b[0]) - m(b[1])).square().mean(1)

    for bare in (False, True):
        found = released(mean_of_pairs, bare=bare)
        torch.testing.assert_close(found, released(each), rtol=0, atol=2e-2)  # margins


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("tried_once_a_file")
@pytest.mark.parametrize("loop", [by_batches, by_records])
def test_no_record_moves_the_sum_by_more_than_the_clip_norm(loop: Loss) -> None:
    bound = 1e-2
    whole = released(loop, clip_norm=bound)
    for left_out in (0, 4):
        less = released(loop, [i for i in range(N) if i != left_out], clip_norm=bound)
        assert 0.9 * bound < float((whole - less).norm()) <= bound


class Masked(Pooled):
    """Is given a mask of places, which one day is as long as a batch, or all of them."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return super().forward(mask @ x)


class Coded(Pooled):
    """Also returns a constant table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.arange(12.0)[:, None].sin())

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.codes


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:records pass alone")
@pytest.mark.parametrize("count", [3, 4, 6])
def test_tensors_that_are_no_records_are_not_taken_for_some(count: int) -> None:
    """Whatever their lengths are, in this batch: records pass alone."""
    mask = torch.tril(torch.ones(2, 2))

    def masked(m: nn.Module, b: Any) -> Tensor:
        a, c = m(torch.cat(b[:2]), mask).chunk(2)
        return (a - c).square().sum(1)

    def coded(m: nn.Module, b: Any) -> Tensor:
        found, codes = m(torch.cat(b[:2]))
        a, c = found.chunk(2)
        return (a - c).square().sum(1) * (1 + codes[3])

    for loop, build in ((masked, Masked), (coded, Coded)):
        for keep in (range(count), range(count - 1)):
            sums = [released(loop, keep, build=build), released(loop, [*keep][1:], build=build)]
            assert float((sums[0] - sums[1]).norm()) <= 1.0


def test_evaluations_between_steps_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = Pooled()
    x = torch.randn(2 * N, 2, FEATURES)
    expected = model(x).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-5
    )
    with dpoptim.attach(plan, model, optimizer, TensorDataset(*INPUTS), loss=by_batches) as private:
        for batch in private.batches():
            private.backward(by_batches(model, batch))
            with torch.no_grad():
                torch.testing.assert_close(model(x), expected)
            optimizer.step()


def test_pairs_of_different_records_are_refused() -> None:
    def rolled(m: nn.Module, b: Any) -> Tensor:
        a, c = m(torch.cat((b[0], b[1].roll(1, 0)))).chunk(2)
        return (a - c).square().mean(1)

    with pytest.raises(dpoptim.SamplesInteractError):
        released(rolled)


def test_inputs_that_stay_in_batches_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record would be clipped with others' inputs."""
    monkeypatch.setattr(joined_inputs, "_turned", lambda tree, *_: tree)
    with pytest.warns(dpoptim.IsolationWarning, match="records pass alone"):
        dpoptim.attach(
            dpoptim.DPSGD(clip_norm=1.0).plan(
                n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-5
            ),
            model := Pooled(),
            torch.optim.SGD(model.parameters(), lr=0.0),
            TensorDataset(*INPUTS),
            loss=by_batches,
        )
