"""nn.Linear with any number of axes between the records and the features."""

from torch import Tensor, nn

from dpoptim.gradients.arithmetic.multiplication import linear
from dpoptim.gradients.arithmetic.precision import like_input
from dpoptim.gradients.layers.rule import LayerRule, PerSampleGrads, Saved, refuse_unbatched
from dpoptim.gradients.memory.spare_room import OF_OUTPUTS
from dpoptim.gradients.per_sample.sequence_outer import positions


class LinearRule(LayerRule[nn.Linear]):
    narrow = True
    casts = True
    widens = True

    def prepare(self, module: nn.Linear, name: str, x: Tensor, rows: int | None) -> Tensor:
        refuse_unbatched(name, "Linear", x, 2)
        return x

    def forward(self, module: nn.Linear, x: Tensor) -> tuple[Tensor, Saved]:
        weight, bias = like_input(x, module.weight, module.bias)
        return linear(x, weight, bias, OF_OUTPUTS), (x, module.weight)

    def input_gradient(self, module: nn.Linear, saved: Saved, g: Tensor) -> Tensor:
        return linear(g, saved[1].T)

    def per_sample_grads(self, module: nn.Linear, saved: Saved, g: Tensor) -> PerSampleGrads:
        weight = positions(g, saved[0])
        if module._parameters["bias"] is None:
            return {"weight": weight}
        return {"weight": weight, "bias": weight.bias()}
