"""Every name of PyTorch that is not public, in one place, with a test of what it must do.

PyTorch has no public name for these. A new version may take one away or change what it means;
`require` finds that out at the first training, and says which feature is lost, before a record is
touched.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as any_global_hook
from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNormalised
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_step_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import default_collate_fn_map as collated_types
from torch.utils.hooks import RemovableHandle

from dpoptim.errors import PrivacyError

__all__ = [
    "OUTSIDE_BACKWARD",
    "DisableTorchFunctionSubclass",
    "SpectralNormalised",
    "TorchDispatchMode",
    "after_backward",
    "any_global_hook",
    "applied",
    "collate_by_type",
    "collated_types",
    "convolution_backward",
    "delays_gradients",
    "global_step_hooks",
    "gradient_hook_ids",
    "gradient_hooks",
    "graph_task",
    "group_norm_backward",
    "has_onednn",
    "hooks_on_all_modules",
    "is_functorch_tensor",
    "layer_norm_backward",
    "local_part",
    "module_hooks",
    "never_compiled",
    "onednn_linear",
    "pre_forward_hooks",
    "put_first",
    "pytree",
    "require",
    "running_wrapper",
    "saved_tensors_hooks_are_set",
    "version_of",
]

Function = TypeVar("Function", bound=Callable[..., Any])
OUTSIDE_BACKWARD = -1  # what `graph_task` is there
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""A number for the backward pass that this thread is in; later passes have larger ones."""
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""A `with` in which operations on a subclass of Tensor are those on tensors; its own documentation
names it so.
"""
convolution_backward = torch.ops.aten.convolution_backward
layer_norm_backward = torch.ops.aten.native_layer_norm_backward
group_norm_backward = torch.ops.aten.native_group_norm_backward


def never_compiled(function: Function, *, alone: bool = False) -> Function:
    """`torch.compiler.disable` without importing the compiler, which takes over a second."""
    # alone: of calls by themselves; as a part of what is compiled it is compiled as well
    inside: Any = torch._C._dynamo.eval_frame
    skip = inside._FrameAction.SKIP
    called = inside._FrameAction.DEFAULT if alone else skip
    inside.set_code_exec_strategy(function.__code__, inside._FrameExecStrategy(skip, called))
    function._torchdynamo_disable = not alone  # type: ignore[attr-defined]
    return function


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`Function.apply` without its search for what ended calls under torch.func have left."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def after_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward pass that this thread is in has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been written in place; not through ``.data``."""
    return tensor._version


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that is spread over several; of others, all."""
    own: Tensor = getattr(tensor, "_local_tensor", tensor)
    return own


def is_functorch_tensor(x: Tensor) -> bool:
    """Whether torch.func follows this tensor through a function."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def saved_tensors_hooks_are_set() -> bool:
    """Whether somebody packs what operations save for backward passes, as checkpointing does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def has_onednn() -> bool:
    """Whether this PyTorch multiplies matrices by oneDNN on request."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ w.T + bias`` by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")


def gradient_hooks(p: Tensor) -> list[Any]:
    """Hooks on the gradient of a parameter."""
    return [*(p._backward_hooks or {}).values(), *(p._post_accumulate_grad_hooks or {}).values()]


def module_hooks(m: nn.Module) -> list[int]:
    """Ids of the hooks around a module's forward and backward pass."""
    return [*m._forward_hooks, *m._forward_pre_hooks, *m._backward_hooks, *m._backward_pre_hooks]


def gradient_hook_ids(p: Tensor) -> list[int]:
    """Ids of the hooks on the gradient of a parameter."""
    return [*(p._backward_hooks or {}), *(p._post_accumulate_grad_hooks or {})]


def hooks_on_all_modules() -> list[int]:
    """Ids of the hooks around every module's forward and backward pass."""
    everywhere = nn.modules.module
    return [key for kind in HOOKS for key in getattr(everywhere, f"_global{kind}")]


def pre_forward_hooks(module: nn.Module) -> Iterable[Any]:
    """Hooks that run before a module."""
    return module._forward_pre_hooks.values()


def put_first(optimizer: torch.optim.Optimizer, handle: RemovableHandle) -> None:
    """Let a hook before ``optimizer.step()`` run ahead of all others."""
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


def running_wrapper() -> Any:
    """The wrapper whose forward pass runs; None also where PyTorch does not tell."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def delays_gradients(wrapper: nn.Module) -> bool:
    """Whether such a wrapper sends some gradients whatever it is told."""
    return bool(getattr(wrapper, "_delay_all_reduce_params", None))


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
            seen.append(graph_task())
            after_backward(lambda: seen.append(-2))
            return gradients[0]

    with torch.enable_grad():
        for _ in range(2):
            applied(Look, torch.ones(1, requires_grad=True)).sum().backward()
    first, called, second, again = seen
    return (
        OUTSIDE_BACKWARD < first < second
        and called == again == -2
        and graph_task() == OUTSIDE_BACKWARD
    )


def _versions() -> bool:
    tensor = torch.zeros(2)
    before = version_of(tensor)
    tensor.add_(1)
    return version_of(tensor) > before


def _hooks() -> bool:
    def hook(*_: Any) -> None:
        return None

    m = nn.Linear(1, 1)
    p = m.weight
    if module_hooks(m) or gradient_hooks(p) or list(pre_forward_hooks(m)):
        return False
    handles = [m.register_forward_hook(hook), m.register_forward_pre_hook(hook)]
    handles += [m.register_full_backward_hook(hook), m.register_full_backward_pre_hook(hook)]
    on_gradient = [p.register_hook(hook), p.register_post_accumulate_grad_hook(hook)]
    before = len(hooks_on_all_modules())
    everywhere = nn.modules.module.register_module_forward_hook(hook)
    seen, newest = hooks_on_all_modules(), everywhere.id
    everywhere.remove()
    found = module_hooks(m)
    return (
        len(seen) == before + 1
        and newest == max(seen)
        and max(found) < newest < RemovableHandle.next_id
        and gradient_hook_ids(p) == [handle.id for handle in on_gradient]
        and sorted(found) == sorted(handle.id for handle in handles)
        and len(gradient_hooks(p)) == 2
        and list(pre_forward_hooks(m)) == [hook]
    )


def _step_hooks() -> bool:
    order: list[str] = []
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: order.append("theirs"))
    put_first(optimizer, optimizer.register_step_pre_hook(lambda *_: order.append("ours")))
    optimizer.step()
    return order == ["ours", "theirs"] and hasattr(global_step_hooks, "values")


def _saved_tensors() -> bool:
    if saved_tensors_hooks_are_set():
        return True  # by the caller; nothing can be told
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return saved_tensors_hooks_are_set()


def _functorch() -> bool:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(is_functorch_tensor(x))
        return x

    torch.func.vmap(look)(torch.zeros(2, 1))
    return seen == [True] and not is_functorch_tensor(torch.zeros(1))


def _trees() -> bool:
    leaves, shape = pytree.tree_flatten({"a": (1, [2]), "b": 3})
    back = pytree.tree_unflatten(leaves, shape)
    collated = collate_by_type([{"a": 1}, {"a": 2}], collate_fn_map=collated_types)["a"].tolist()
    return (leaves, back, collated) == ([1, 2, 3], {"a": (1, [2]), "b": 3}, [1, 2])


def _dispatch() -> bool:
    names: list[str] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kw or {}))

    with Look():
        torch.zeros(2) + 1
    return any("add" in name for name in names)


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
        layer_norm_backward(out, x, [3], layer_mean, layer_scale, None, None, [True, False, False])[
            0
        ],
        group_norm_backward(
            out, x, group_mean, group_scale, None, 1, 4, 3, 2, [True, False, False]
        )[0],
        convolution_backward(
            out[:, :2], x, w.detach(), None, [1], [0], [1], False, [0], 1, [True, False, False]
        )[0],
    ]
    return all(torch.allclose(a, b) for a, b in zip(expected, found, strict=True))


FEATURES = (
    Feature("per-sample gradients (the end of a backward pass is not seen)", _backward_passes),
    Feature("the watch on weights and buffers (writes are not counted)", _versions),
    Feature("the watch on hooks of modules and parameters", _hooks),
    Feature("the gate ahead of other hooks on an optimizer", _step_hooks),
    Feature("value clipping's watch on checkpointing", _saved_tensors),
    Feature("the choice of matrix products under torch.func", _functorch),
    Feature("nested records", _trees),
    Feature("measuring memory, and models that draw noise", _dispatch),
    Feature("normalisation and convolution layers", _backward_operations),
)
