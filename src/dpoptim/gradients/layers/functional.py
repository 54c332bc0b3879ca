"""Layers as functions of bare parameters: ``F.linear(x, self.weight)`` in a layer of one's own.

Each finds the layer's rule and a stand-in for the layer, which holds the very same parameters.
"""

from typing import Any

from torch import Tensor, nn

from dpoptim.gradients.layers.convolution import ConvolutionRule
from dpoptim.gradients.layers.embedding import EmbeddingRule
from dpoptim.gradients.layers.linear import LinearRule
from dpoptim.gradients.layers.normalisation import LayerNormRule
from dpoptim.gradients.layers.rule import AnyRule
from dpoptim.gradients.layers.runner import holder
from dpoptim.runtime.torch_internals import DisableTorchFunctionSubclass

Found = tuple[AnyRule, nn.Module, Tensor] | None  # rule, stand-in, the layer's input


def linear(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None = None) -> Found:
    if weight.dim() != 2:
        return None
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return LinearRule(), layer, x


def matmul(x: Tensor, weight: nn.Parameter) -> Found:
    return (
        (LinearRule(transposed=True), holder({"weight": weight}), x)
        if isinstance(weight, Tensor) and weight.dim() == 2
        else None
    )


def embedding(
    x: Tensor,
    weight: nn.Parameter,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Found:
    options = {
        "max_norm": max_norm,
        "norm_type": norm_type,
        "scale_grad_by_freq": scale_grad_by_freq,
        "sparse": sparse,
    }
    layer = nn.Embedding(weight.shape[0], weight.shape[1], padding_idx, device="meta", **options)  # type: ignore[arg-type]
    layer.weight = weight
    return EmbeddingRule(), layer, x


def layer_norm(
    x: Tensor,
    normalized_shape: Any,
    weight: nn.Parameter | None = None,
    bias: nn.Parameter | None = None,
    eps: float = 1e-5,
) -> Found:
    if weight is None:
        return None
    layer = nn.LayerNorm(normalized_shape, eps, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return LayerNormRule(), layer, x


def convolution(
    x: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Found:
    if x.dim() != weight.dim():  # no record axis
        return None
    channels, kernel_size = weight.shape[1] * groups, tuple(weight.shape[2:])
    kind = CONVOLUTIONS[len(kernel_size)]
    layer = kind(
        channels, len(weight), kernel_size, stride, padding, dilation, groups, device="meta"
    )
    layer.weight, layer.bias = weight, bias
    return ConvolutionRule(), layer, x


CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
FUNCTIONS = {
    "linear": linear,
    "matmul": matmul,
    "__matmul__": matmul,
    "mm": matmul,
    "embedding": embedding,
    "layer_norm": layer_norm,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
}


def layer_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """The layer that a function call amounts to; None where there is no such layer.

    Args:
        args, kwargs: of the function, every bare parameter as the ``nn.Parameter`` itself.
    """
    function = FUNCTIONS.get(name)
    x = args[0] if args else kwargs.get("input")
    if function is None or not isinstance(x, Tensor) or isinstance(x, nn.Parameter):
        return None
    if not args:
        args, kwargs = (x,), {key: value for key, value in kwargs.items() if key != "input"}
    tensors = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, Tensor)]
    if not all(isinstance(t, nn.Parameter) for t in tensors):
        return None
    with DisableTorchFunctionSubclass():
        return function(*args, **kwargs)  # type: ignore[operator]
