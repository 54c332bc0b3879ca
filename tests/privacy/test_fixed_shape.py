"""Tries to falsify the theorem in `slots`: with a fixed shape, one record moves the sum
by at most C, to the last bit of everybody else's part, with as many threads as servers have, on
the kernels that failed without it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.engine import Engine
from support import joint_norm, pairs

SLOTS, C = 24, 1.0
STEEP = {torch.float32: 1e8, torch.float64: 1e17}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]] = {
    "biases": (lambda: nn.Sequential(nn.Linear(40, 33), nn.LayerNorm(33)), (5, 40), torch.float32),
    "float64": (lambda: nn.Linear(40, 33), (5, 40), torch.float64),
    "one channel": (lambda: nn.Conv2d(1, 8, 3, padding=1), (1, 12, 12), torch.float32),
    "channels": (lambda: nn.Conv2d(3, 16, 3, stride=2), (3, 13, 13), torch.float32),
    "one axis": (lambda: nn.Conv1d(1, 8, 5), (1, 60), torch.float32),
    "volumes": (lambda: nn.Conv3d(2, 4, 3), (2, 6, 6, 6), torch.float32),
    "groups": (lambda: nn.GroupNorm(2, 6), (6, 40), torch.float32),
    "recurrent": (lambda: nn.GRU(8, 9, batch_first=True), (7, 8), torch.float32),
}


def cancelling(shape: tuple[int, ...], dtype: torch.dtype, axis: int) -> Tensor:
    """Records that are alike in all their positions, of which the features are on this axis."""
    generator = torch.Generator().manual_seed(3)
    one = [size if i == axis else 1 for i, size in enumerate(shape)]
    return (
        torch.randn(SLOTS, *one, generator=generator, dtype=dtype)
        .expand(SLOTS, *shape)
        .contiguous()
    )


def slopes_of(output: Tensor, axis: int) -> Tensor:
    """Slopes that cancel over the positions of each record: what remains of its gradient is
    rounding, and is clipped.
    """
    generator = torch.Generator().manual_seed(5)
    slopes = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    positions = [i for i in range(1, slopes.dim()) if i != axis + 1]
    return STEEP[output.dtype] * (slopes - slopes.mean(positions, keepdim=True))


def step(model: nn.Module, x: Tensor, present: Tensor, axis: int, reduction: str) -> list[Tensor]:
    engine = Engine(model, Clipping(C), capacity=SLOTS, reduction=reduction)
    engine.fixed_shape = True
    engine.attach()
    try:
        engine.begin_microbatch(len(x), present=present[:, None])
        output = model(x)
        output = output[0] if isinstance(output, tuple) else output
        losses = (output * slopes_of(output, axis)).flatten(1).sum(1)
        (losses.sum() if reduction == "sum" else losses.mean()).backward()
        return engine.split(engine.take())
    finally:
        engine.detach()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "threads", "reduction"),
    pairs(list(MODELS), [1, 2, 16, 64], ["sum", "mean"]),
    indirect=["threads"],
)
@pytest.mark.usefixtures("threads")
def test_a_record_more_takes_an_empty_slot_and_moves_nobody(name: str, reduction: str) -> None:
    build, shape, dtype = MODELS[name]
    axis = 1 if len(shape) == 2 and name in ("biases", "float64", "recurrent") else 0
    torch.manual_seed(0)
    model = build().to(dtype)
    x = cancelling(shape, dtype, axis)
    generator = torch.Generator().manual_seed(4)
    for others in (0, 2, SLOTS - 1):
        slots = torch.randperm(SLOTS, generator=generator)
        present = torch.zeros(SLOTS, dtype=torch.bool)
        present[slots[:others]] = True
        given = torch.where(present.view(-1, *[1] * len(shape)), x, 0.0)
        without = [s.clone() for s in step(model, given, present, axis, reduction)]
        joined = slots[others]
        present[joined] = True
        for row in (1e4 * x[joined], torch.full_like(x[joined], torch.inf)):
            given[joined] = row
            moved = [
                a - b
                for a, b in zip(step(model, given, present, axis, reduction), without, strict=True)
            ]
            assert joint_norm(moved) <= C


@pytest.mark.parametrize("threads", [1, 16], indirect=True)
@pytest.mark.usefixtures("threads")
def test_what_lies_in_an_empty_slot_is_not_seen() -> None:
    torch.manual_seed(0)
    model, present = (
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(800, 5)),
        torch.ones(SLOTS).bool(),
    )
    present[3:9] = False
    x = cancelling((1, 12, 12), torch.float32, 0)
    found = []
    for filled in (0.0, 7.0, torch.inf):
        x[3:9] = filled
        found.append([s.clone() for s in step(model, x, present, 0, "mean")])
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )
