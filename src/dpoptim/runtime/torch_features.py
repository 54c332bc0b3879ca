"""Tests of what `torch_internals` must do, before a record is touched.

They run at the first training, and say which feature is lost with this PyTorch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import dpoptim.runtime.dispatch_internals as dispatch
import dpoptim.runtime.torch_internals as inside
from dpoptim.errors import PrivacyError


@dataclass(frozen=True)
class Feature:
    """Parts of PyTorch's inside that the library needs.

    Attributes:
        lost: what cannot be done without it.
        works: whether it does what it must; may raise.
    """

    lost: str
    works: Callable[[], bool]


@cache
def require() -> None:
    """Test all of them, once.

    Raises:
        PrivacyError: naming what this PyTorch does not do any more.
    """
    lost = [feature.lost for feature in FEATURES if not _holds(feature)]
    if lost:
        raise PrivacyError(
            f"PyTorch {torch.__version__} has changed inside, so this is lost: {'; '.join(lost)}. "
            "Fix: a PyTorch within the bounds of dpoptim's requirements, or a newer dpoptim."
        )


def _holds(feature: Feature) -> bool:
    try:
        with torch.random.fork_rng([]):  # layers draw where they are made
            return feature.works()
    except Exception:  # whatever a changed name leads to
        return False


def _backward_passes() -> bool:
    seen: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            seen.append(inside.graph_task())
            inside.after_backward(lambda: seen.append(-2))
            return gradients[0]

    with torch.enable_grad():
        for _ in range(2):
            inside.applied(Look, torch.ones(1, requires_grad=True)).sum().backward()
    first, called, second, again = seen
    return (
        inside.OUTSIDE_BACKWARD < first < second
        and called == again == -2
        and inside.graph_task() == inside.OUTSIDE_BACKWARD
    )


def _graphs() -> bool:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0]

    with torch.enable_grad():
        narrow = inside.applied(Same, torch.ones(1, requires_grad=True).bfloat16())
        last: Any = narrow.float().grad_fn
    before = last.next_functions[0][0]
    forms = [inside.gradient_forms(n) for n in (last, before, before.next_functions[0][0])]
    found = [(each.dtype, [*each.shape]) for form in forms for each in form]
    return found == [(dtype, [1]) for dtype in (torch.float32, *[torch.bfloat16] * 2)]


def _autocast() -> bool:
    with torch.autocast("cpu", torch.bfloat16):
        return inside.autocast_is_on()


def _versions() -> bool:
    tensor = torch.zeros(2)
    before = inside.version_of(tensor)
    tensor.add_(1)
    return inside.version_of(tensor) > before


def _hooks() -> bool:
    def hook(*_: Any) -> None:
        return None

    m = nn.Linear(1, 1)
    p = m.weight
    if (
        inside.has_hooks(m)
        or inside.module_hooks(m)
        or inside.gradient_hooks(p)
        or inside.pre_forward_hooks(m)
    ):
        return False
    handles = [m.register_forward_hook(hook), m.register_forward_pre_hook(hook)]
    handles += [m.register_full_backward_hook(hook), m.register_full_backward_pre_hook(hook)]
    on_gradient = [p.register_hook(hook), p.register_post_accumulate_grad_hook(hook)]
    before = len(inside.hooks_on_all_modules())
    everywhere = nn.modules.module.register_module_forward_hook(hook)
    seen, newest = inside.hooks_on_all_modules(), everywhere.id
    everywhere.remove()
    found = inside.module_hooks(m)
    return (
        len(seen) == before + 1
        and inside.has_hooks(m)
        and newest == max(seen)
        and max(found) < newest < RemovableHandle.next_id
        and inside.gradient_hook_ids(p) == [handle.id for handle in on_gradient]
        and sorted(found) == sorted(handle.id for handle in handles)
        and len(inside.gradient_hooks(p)) == 2
        and list(inside.pre_forward_hooks(m).values()) == [hook]
    )


def _step_hooks() -> bool:
    order: list[str] = []
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: order.append("theirs"))
    inside.put_first(optimizer, optimizer.register_step_pre_hook(lambda *_: order.append("ours")))
    optimizer.step()
    return order == ["ours", "theirs"] and hasattr(inside.global_step_hooks, "values")


def _saved_tensors() -> bool:
    if inside.saved_tensors_hooks_are_set():
        return True  # by the caller; nothing can be told
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return inside.saved_tensors_hooks_are_set()


def _functorch() -> bool:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(inside.is_functorch_tensor(x))
        return x

    torch.func.vmap(look)(torch.zeros(2, 1))
    return seen == [True] and not inside.is_functorch_tensor(torch.zeros(1))


def _trees() -> bool:
    leaves, shape = inside.pytree.tree_flatten({"a": (1, [2]), "b": 3})
    back = inside.pytree.tree_unflatten(leaves, shape)
    collated = inside.collate_by_type([{"a": 1}, {"a": 2}], collate_fn_map=inside.collated_types)[
        "a"
    ].tolist()
    return (leaves, back, collated) == ([1, 2, 3], {"a": (1, [2]), "b": 3}, [1, 2])


def _dispatch() -> bool:
    names: list[str] = []

    class Look(inside.DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Look():
        torch.zeros(2) + 1
    return any("add" in name for name in names)


def _draws() -> bool:
    names: list[str] = []

    def look(operator: Any, args: Any, kwargs: Any) -> Any:
        names.append(operator.__name__)
        return operator(*args, **kwargs).fill_(1)

    with dispatch.drawing_operators_run_by(look):
        ones = F.dropout(torch.ones(4, 2), 0.5) * torch.rand(4, 2)
        drawn: Any = torch.rand_like
        torch.func.vmap(drawn, randomness="different")(ones)
    torch.rand(1)
    return names == ["bernoulli_.float", "rand.default", "rand_like.default"] and bool(ones.all())


def _backward_operations() -> bool:
    x = torch.arange(12.0, dtype=torch.float64).view(1, 4, 3).sin().requires_grad_()
    out = torch.cos(torch.arange(12.0, dtype=torch.float64)).view(1, 4, 3)
    w = torch.ones(2, 4, 1, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        layer, layer_mean, layer_scale = torch.native_layer_norm(x, [3], None, None, 1e-5)
        group, group_mean, group_scale = torch.native_group_norm(x, None, None, 1, 4, 3, 2, 1e-5)
        product = F.conv1d(x, w)
        expected = [
            torch.autograd.grad(y, x, out[:, : y.shape[1]])[0] for y in (layer, group, product)
        ]
    x = x.detach()
    found = [
        inside.layer_norm_backward(
            out, x, [3], layer_mean, layer_scale, None, None, [True, False, False]
        )[0],
        inside.group_norm_backward(
            out, x, group_mean, group_scale, None, 1, 4, 3, 2, [True, False, False]
        )[0],
        inside.convolution_backward(
            out[:, :2], x, w.detach(), None, [1], [0], [1], False, [0], 1, [True, False, False]
        )[0],
    ]
    return all(torch.allclose(a, b) for a, b in zip(expected, found, strict=True))


def _checkpointing() -> bool:
    def sine(x: Tensor, reentrant: bool) -> Tensor:
        out: Tensor = checkpoint(torch.sin, x, use_reentrant=reentrant)
        return out.sum()

    x = torch.ones(2, 1, requires_grad=True)
    with inside.checkpointing_served(), torch.enable_grad():
        (found,) = torch.autograd.grad(sine(x, True), x)
        rows = torch.func.vmap(torch.func.grad(sine), (0, None))(x.detach(), False)
    return torch.equal(found, x.cos()) and torch.equal(rows, x.cos())


FEATURES = (
    Feature("per-sample gradients (the end of a backward pass is not seen)", _backward_passes),
    Feature("the watch on roundings under a mean", _graphs),
    Feature("the watch on torch.autocast", _autocast),
    Feature("the watch on weights and buffers (writes are not counted)", _versions),
    Feature("the watch on hooks of modules and parameters", _hooks),
    Feature("the gate ahead of other hooks on an optimizer", _step_hooks),
    Feature("value clipping's watch on checkpointing", _saved_tensors),
    Feature("the choice of matrix products under torch.func", _functorch),
    Feature("nested records", _trees),
    Feature("measuring memory", _dispatch),
    Feature("trials of models that draw noise", _draws),
    Feature("activation checkpointing", _checkpointing),
    Feature("normalisation and convolution layers", _backward_operations),
)
