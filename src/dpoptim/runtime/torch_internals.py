"""Every name of PyTorch that is not public, in one place.

PyTorch has no public name for these. A new version may take one away or change what it means;
`torch_features` finds that out at the first training.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as any_global_hook
from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNormalised
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_step_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import default_collate_fn_map as collated_types
from torch.utils.hooks import RemovableHandle

__all__ = [
    "OUTSIDE_BACKWARD",
    "DisableTorchFunctionSubclass",
    "DispatchMode",
    "SpectralNormalised",
    "after_backward",
    "any_global_hook",
    "applied",
    "autocast_is_on",
    "checkpointing_served",
    "collate_by_type",
    "collated_types",
    "convolution_backward",
    "delays_gradients",
    "divide_all",
    "global_step_hooks",
    "gradient_forms",
    "gradient_hook_ids",
    "gradient_hooks",
    "gradients_of",
    "graph_task",
    "group_norm_backward",
    "has_hooks",
    "has_onednn",
    "hooks_on_all_modules",
    "is_functorch_tensor",
    "layer_norm_backward",
    "local_part",
    "matmul_precision",
    "module_hooks",
    "never_compiled",
    "node_name",
    "onednn_is_enabled",
    "onednn_linear",
    "pre_forward_hooks",
    "put_first",
    "pytree",
    "run_backward",
    "running_wrapper",
    "saved_tensors_hooks_are_set",
    "set_cudnn_tf32",
    "version_of",
    "warn_of_vmap_loops",
    "wrappers_of",
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
is_functorch_tensor: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether torch.func follows this tensor through a function."""
onednn_is_enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled
"""``torch.backends.mkldnn.enabled``."""
set_cudnn_tf32: Callable[[bool], None] = torch._C._set_cudnn_allow_tf32
"""``torch.backends.cudnn.allow_tf32 = ...``, which PyTorch's own test cases forbid to assign."""
# without it there are warnings, and nothing else
warn_of_vmap_loops: Callable[[bool], None] = getattr(
    torch._C._functorch, "_set_vmap_fallback_warning_enabled", lambda enabled: None
)
"""Whether `torch.func.vmap` warns of operations that it runs for one after the other."""
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


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` whose dispatch is never compiled.

    PyTorch keeps the compiler out by a wrapper that takes more time than most operators.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        never_compiled(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def autocast_is_on() -> bool:
    """Whether torch.autocast is on for any kind of device."""
    return bool(torch._C._is_any_autocast_enabled())


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`Function.apply` without its search for what ended calls under torch.func have left."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def run_backward(losses: Tensor) -> None:
    """``torch.autograd.backward`` for ones, without its search for other kinds of tensors."""
    ones = torch.ones_like(losses)
    if type(losses) is not Tensor:
        torch.autograd.backward(losses, ones)
    else:
        torch.autograd.graph._engine_run_backward(
            *((losses,), (ones,), False, False, ()), allow_unreachable=True, accumulate_grad=True
        )


def gradients_of(loss: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad``, None where a loss does not reach, with function modes left on.

    It leaves them while it runs, so that what hooks on gradients do would not be seen.
    """
    if type(loss) is not Tensor:
        return torch.autograd.grad(loss, tensors, allow_unused=True)
    return torch.autograd.graph._engine_run_backward(
        *((loss,), (torch.ones_like(loss),), False, False, tuple(tensors)),
        allow_unreachable=True,
        accumulate_grad=False,
    )


def after_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward pass that this thread is in has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def divide_all(tensors: list[Tensor], divisor: float) -> None:
    """Divide all in place, in few calls, as PyTorch's optimizers do."""
    torch._foreach_div_(tensors, divisor)


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been written in place; not through ``.data``."""
    return tensor._version


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that is spread over several; of others, all."""
    own: Tensor = getattr(tensor, "_local_tensor", tensor)
    return own


def parts_held(tensor: Tensor) -> list[Tensor]:
    """Plain tensors in which this process holds a tensor's values, such as integers and scales.

    Of a subclass that wraps others (DTensor, quantised weights of torchao and quanto) those inside.
    """
    whole: Any = tensor
    if not is_traceable_wrapper_subclass(whole):
        return [tensor]
    names, _ = whole.__tensor_flatten__()
    inside = (getattr(whole, name) for name in names)  # DTensor's has its mesh, too
    return [part for each in inside if isinstance(each, Tensor) for part in parts_held(each)]


def saved_tensors_hooks_are_set() -> bool:
    """Whether somebody packs what operations save for backward passes, as checkpointing does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def matmul_precision(backend: str) -> str:
    """``fp32_precision`` of the matrix products of "cuda" or "mkldnn"."""
    return torch._C._get_fp32_precision_getter(backend, "matmul")


def has_onednn() -> bool:
    """Whether this PyTorch multiplies matrices by oneDNN on request."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ w.T + bias`` by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")


def gradient_forms(node: Any) -> list[Any]:
    """Dtype and shape of each gradient that a node of a graph gets."""
    return list(node._input_metadata)


def node_name(node: Any) -> str:
    """Name of a node, also where a Function keeps something of its own as ``ctx.name``."""
    return str(type(node).name(node))


def gradient_hooks(p: Tensor) -> list[Any]:
    """Hooks on the gradient of a parameter."""
    return [*(p._backward_hooks or {}).values(), *(p._post_accumulate_grad_hooks or {}).values()]


def has_hooks(m: nn.Module) -> bool:
    """Whether there are hooks around a module's forward or backward pass."""
    return bool(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    )


def module_hooks(m: nn.Module) -> list[int]:
    """Ids of the hooks around a module's forward and backward pass."""
    return [*m._forward_hooks, *m._forward_pre_hooks, *m._backward_hooks, *m._backward_pre_hooks]


def gradient_hook_ids(p: Tensor) -> list[int]:
    """Ids of the hooks on the gradient of a parameter."""
    return [*(p._backward_hooks or {}), *(p._post_accumulate_grad_hooks or {})]


ON_ALL_MODULES = [getattr(nn.modules.module, f"_global{kind}") for kind in HOOKS]


def hooks_on_all_modules() -> list[int]:
    """Ids of the hooks around every module's forward and backward pass."""
    return [key for hooks in ON_ALL_MODULES for key in hooks]


def pre_forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Hooks that run before a module, in their order, by their ids."""
    return module._forward_pre_hooks


def put_first(optimizer: torch.optim.Optimizer, handle: RemovableHandle) -> None:
    """Let a hook before ``optimizer.step()`` run ahead of all others."""
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


def running_wrapper() -> Any:
    """The wrapper whose forward pass runs; None also where PyTorch does not tell."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def delays_gradients(wrapper: nn.Module) -> bool:
    """Whether such a wrapper sends some gradients whatever it is told."""
    return bool(getattr(wrapper, "_delay_all_reduce_params", None))


def wrappers_of(module: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    """The wrappers around a module that there are in this process."""
    kinds: list[type] = [nn.parallel.DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # asking each of hundreds of thousands of objects what it is would take most of attach
    known = set(map(id, kinds))
    return [each for each in gc.get_objects() if id(type(each)) in known and each.module is module]


BEGIN = "_checkpoint_without_reentrant_generator"
if hasattr(checkpointing, f"{BEGIN}_impl"):  # which the other one calls from PyTorch 2.14 on
    BEGIN = f"{BEGIN}_impl"


class _Checkpointing:
    """Stand-ins for what activation checkpointing calls."""

    reentrant = checkpointing.CheckpointFunction
    begin = staticmethod(getattr(checkpointing, BEGIN))
    entered = 0

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return checkpointing.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve
        )

    @staticmethod
    def outside_of_transforms(*args: Any, **kwargs: Any) -> Iterator[None]:
        if torch._C._are_functorch_transforms_active():
            yield
        else:
            yield from _Checkpointing.begin(*args, **kwargs)


@contextmanager
def checkpointing_served() -> Iterator[None]:
    """Let activation checkpointing be of kinds that work here, whoever calls for it; may overlap.

    Reentrant checkpointing becomes the kind that is not. The gradients are the same, of one
    backward pass and not of one inside of another. Where no input has a gradient, what is
    checkpointed is trained, too, which reentrant checkpointing drops.

    Inside of vectorised modules activations are kept: when they would be computed again, the rows
    of parameters are no longer there.
    """
    _Checkpointing.entered += 1
    patched: Any = checkpointing
    patched.CheckpointFunction = _Checkpointing
    setattr(patched, BEGIN, _Checkpointing.outside_of_transforms)
    try:
        yield
    finally:
        _Checkpointing.entered -= 1
        if not _Checkpointing.entered:
            patched.CheckpointFunction = _Checkpointing.reentrant
            setattr(patched, BEGIN, _Checkpointing.begin)
