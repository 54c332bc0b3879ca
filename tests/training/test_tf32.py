"""TF32 is off while gradients are compared and formed, by PyTorch's newer and older switches."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.gradients.arithmetic.precision import MAY_ROUND, backend_of, exact_arithmetic, no_tf32


def older() -> tuple[bool, bool, str]:
    """PyTorch's older switches; it raises where they differ from the newer ones."""
    return (
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


def newer() -> list[str]:
    return [backend_of(name).fp32_precision for name in MAY_ROUND]


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    precision, before = torch.get_float32_matmul_precision(), newer()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = True
    for name, each in zip(MAY_ROUND, before, strict=True):
        backend_of(name).fp32_precision = each


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("convolutions", [True, False])
def test_all_switches_agree_and_are_put_back(precision: str, convolutions: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = convolutions
    before = older(), newer()
    with no_tf32():
        assert older() == (False, False, "highest")
        assert {*newer()} <= {"ieee", "none"}
    assert (older(), newer()) == before
    with exact_arithmetic():
        assert older() == (convolutions, False, "highest")
    assert (older(), newer()) == before


def test_newer_switches_alone_are_put_back() -> None:
    """Which PyTorch's older ones differ from, so that they cannot be read."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    before = newer()
    for context in (no_tf32, exact_arithmetic):
        with context():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert newer() == before


class WithoutCudnn(nn.Module):
    """As a recurrent layer under a gradient penalty runs."""

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__()
        self.steps, self.end, self.look = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1), look

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        with torch.backends.cudnn.flags(enabled=False):
            states, _ = self.steps(x)
        out: Tensor = self.end(states[:, -1])[:, 0]
        return out


@pytest.mark.one_in(2)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_models_may_read_and_set_the_older_switches(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    model, data = WithoutCudnn(older), TensorDataset(torch.randn(40, 5, 3), torch.randn(40))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square()

    plan = dpoptim.DPSGD(1.0).plan(n=40, batch_size=10, steps=2, noise_multiplier=1.0, delta=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dpoptim.attach(plan, model, optimizer, data, loss=loss, noise_seed=0) as private:
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
    assert older()[2] == precision


def test_switches_are_set_beside_pytorchs_own_test_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose module, as soon as it is imported, has assignments to torch.backends raise."""
    before = older(), newer()
    forbidden = torch.backends.disable_global_flags.__globals__
    monkeypatch.setitem(forbidden, "__allow_nonbracketed_mutation_flag", False)
    assert torch.backends.flags_frozen()
    with no_tf32():
        assert older() == (False, False, "highest")
    assert (older(), newer()) == before
