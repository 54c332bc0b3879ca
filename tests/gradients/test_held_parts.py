"""Frozen weights that are tensors of tensors, as quantised ones of torchao and quanto are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.gradients.watch.values import Values, digest
from dpoptim.runtime.torch_internals import parts_held

RECORDS = 20


class Quantised(Tensor):
    """Whole numbers and a scale for each row; what other libraries do not implement raises."""

    def __new__(cls, whole: Tensor, scale: Tensor) -> "Quantised":
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *rest: Any) -> "Quantised":
        return Quantised(inner["whole"], inner["scale"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> "Quantised":
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale)
        raise NotImplementedError(func)


class QuantisedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        held = Quantised(torch.randint(-127, 128, (8, 8), dtype=torch.int8), torch.rand(8, 1) / 99)
        self.weight = nn.Parameter(held, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        held: Any = self.weight
        return nn.functional.linear(x, held.whole * held.scale)


def train(layer: QuantisedLayer, *, write: bool = False) -> Tensor:
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=1.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=RECORDS, steps=1, noise_multiplier=0.0, delta=1e-4
    )
    data = TensorDataset(torch.randn(RECORDS, 8))
    with dpoptim.attach(plan, model, optimizer, data) as private:
        for (x,) in private.batches():
            if write:
                layer.weight.whole[0, 0] ^= 1  # type: ignore[index]
            private.backward(model(x).squeeze(1))
            optimizer.step()
    return model[2].weight.detach()  # type: ignore[return-value, operator]


def test_models_with_them_train() -> None:
    torch.manual_seed(0)
    layer = QuantisedLayer()
    before = [part.clone() for part in parts_held(layer.weight)]
    assert train(layer).isfinite().all()
    assert all(map(torch.equal, before, parts_held(layer.weight)))


def test_what_is_written_into_them_is_seen() -> None:
    torch.manual_seed(0)
    with pytest.raises(dpoptim.PrivacyError, match=r"frozen parameter '0.weight' was changed"):
        train(QuantisedLayer(), write=True)


def test_values_and_digests_are_of_what_they_hold() -> None:
    layer = QuantisedLayer()
    values, digested = Values([("w", layer.weight)]), digest(layer.weight)
    assert values.changed() is None
    assert digest(layer.weight) == digested
    layer.weight.scale.data[0] += 1  # type: ignore[operator, union-attr]
    assert values.changed() == "w"
    assert digest(layer.weight) != digested
