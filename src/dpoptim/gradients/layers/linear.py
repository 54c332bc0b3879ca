"""nn.Linear with any number of axes between the records and the features."""

from collections.abc import Mapping

from torch import Tensor, nn

from dpoptim.errors import PrivacyError, axes_of
from dpoptim.gradients.multiplication import linear
from dpoptim.gradients.per_sample_grads import PerSampleGrad
from dpoptim.gradients.sequence_outer import positions


class LinearRule:
    narrow, at_once, widens = True, False, True

    def check(self, module: nn.Module, name: str) -> None:
        pass

    def prepare(self, module: nn.Module, name: str, x: Tensor, rows: int | None) -> Tensor:
        if x.dim() < 2:
            raise PrivacyError(
                f"layer {name!r} (Linear) got an input of {axes_of(x)} without a record axis. Fix: "
                "keep the batch axis first, e.g. x[None] for a single record."
            )
        return x

    def forward(self, module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert isinstance(module, nn.Linear)
        return linear(x, module.weight, module.bias), (x, module.weight)

    def input_gradient(self, module: nn.Module, saved: tuple[Tensor, ...], g: Tensor) -> Tensor:
        return linear(g, saved[1].T)

    def per_sample_grads(
        self, module: nn.Module, saved: tuple[Tensor, ...], g: Tensor
    ) -> Mapping[str, PerSampleGrad]:
        assert isinstance(module, nn.Linear)
        B = g.shape[0]
        # Axes with no entries (-1 would be ambiguous) give empty sums, which are right.
        T = g[0].numel() // module.out_features if B else 1
        left, right = (
            g.reshape(B, T, module.out_features),
            saved[0].reshape(B, T, module.in_features),
        )
        weight = positions(left, right, axis=g.dim() > 2)
        if module._parameters["bias"] is None:
            return {"weight": weight}
        return {"weight": weight, "bias": weight.bias()}
