"""How far two sums may be apart that differ by rounding alone."""

import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from dpoptim.gradients.oracle import trainable
from dpoptim.gradients.placement import Placement
from dpoptim.runtime.torch_internals import pytree
from dpoptim.training.trials.deterministic_runs import autocast_seen

TOLERANCE = {  # of the bound, for each record
    torch.bfloat16: 3e-2,
    torch.float16: 5e-3,
    torch.float32: 1e-4,
    torch.float64: 1e-6,
}
# A batch rounds otherwise than a record alone, and a ReLU that this turns moves a large network's
# gradient by a few tolerances: one wide ResNet in six. What differs by more tolerances, or by more
# of the bound, is no rounding; what differs by less has to agree in a copy that computes in float64
# or, where there is none, with other weights, so many times.
NEAR, NEAR_BOUND, AGAIN = 100.0, 1e-2, 2


def tolerance_of(model: nn.Module, placement: Placement, computed: Iterable[torch.dtype]) -> float:
    """Tolerance of a model's sums: a share of the bound, for each record.

    Args:
        computed: `computed_dtypes`.
    """
    trained = (p.dtype for p in (*trainable(model).values(), *placement.used))
    return max(TOLERANCE.get(dtype, 0.0) for dtype in (*trained, *computed))


def computed_dtypes(model: nn.Module, run: Callable[[], object]) -> set[torch.dtype]:
    """Dtypes of what modules return meanwhile, and of autocast: others than the parameters'."""
    seen = set[torch.dtype]()

    def note(module: nn.Module, args: object, output: object) -> None:
        seen.update(leaf.dtype for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with autocast_seen() as asked:  # whose results a layer may widen before it returns them
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen | asked


def settled(
    shares: Sequence[float],
    again: Callable[[int], Sequence[float]],
    in_float64: Callable[[], bool],
    tolerance: float,
    lost: Sequence[float] = (),
) -> bool:
    """Whether two sums agree but for rounding.

    Args:
        shares: distances in tolerances.
        again: the same with other weights, by a seed.
        in_float64: whether they agree in a copy that computes in float64; not where there is none.
        tolerance: `tolerance_of` the model.
        lost: the rounding of the longest gradient, in the same tolerances; (): nobody knows.

    **Guarantee.** Nothing passes that fails by more than `NEAR` tolerances or by `NEAR_BOUND` of
    the bound for each record, but by what is `lost`, or that fails with other weights and in
    float64, too.
    """
    if all(share <= 1 for share in shares):
        return True
    near = min(NEAR, NEAR_BOUND / tolerance)
    within = (max(near, more) for more in lost) if lost else (near for _ in shares)
    return all(map(operator.le, shares, within)) and (
        in_float64() or all(share <= 1 for seed in range(AGAIN) for share in again(seed))
    )
