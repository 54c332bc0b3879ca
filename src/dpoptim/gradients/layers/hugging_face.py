"""Layers of Hugging Face transformers that have a rule, by name: nothing is imported.

Their RMSNorms need none: they scale normalised data by a bare parameter (see `shared`).
"""

from torch import Tensor, nn

from dpoptim.gradients.arithmetic.multiplication import linear
from dpoptim.gradients.arithmetic.precision import like_input
from dpoptim.gradients.layers.rule import LayerRule, PerSampleGrads, Saved, refuse_unbatched
from dpoptim.gradients.per_sample.over_positions import over_positions
from dpoptim.gradients.per_sample.sequence_outer import one_axis, positions


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether the module is GPT-2's linear layer, called Conv1D, its weight kept as (in, out)."""
    kind = type(module)
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


class TransposedLinearRule(LayerRule[nn.Module]):
    """``x @ weight + bias``."""

    narrow = True
    casts = True
    widens = True

    def prepare(self, module: nn.Module, name: str, x: Tensor, rows: int | None) -> Tensor:
        refuse_unbatched(name, "Conv1D", x, 2)
        return x

    def forward(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Saved]:
        held, own_bias = module.get_parameter("weight"), module._parameters.get("bias")
        weight, bias = like_input(x, held, own_bias)
        return linear(x, weight.T, bias), (x, held)

    def input_gradient(self, module: nn.Module, saved: Saved, g: Tensor) -> Tensor:
        return linear(g, saved[1])

    def per_sample_grads(self, module: nn.Module, saved: Saved, g: Tensor) -> PerSampleGrads:
        weight = positions(saved[0], g)
        if module._parameters.get("bias") is None:
            return {"weight": weight}
        return {"weight": weight, "bias": over_positions(one_axis(g))}
