"""Products with rows of odd length, filled up with zeros."""

import pytest
import torch
import torch.nn.functional as F

from dpoptim.gradients.arithmetic import multiplication

ODD, EVEN = multiplication.LEAST_ODD + 1, multiplication.LEAST_ODD


@pytest.fixture(autouse=True)
def _as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        multiplication, "lacking", lambda x, length: -length % 8 if length > 16 else 0
    )


@pytest.mark.parametrize(("inputs", "outputs"), [(12, ODD), (ODD, 12), (ODD, ODD), (12, EVEN)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_products_are_those_of_the_rows(
    inputs: int, outputs: int, bias: bool, transposed: bool
) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, inputs), torch.randn(outputs, inputs)
    w = w.T.contiguous().T if transposed else w
    b = torch.randn(outputs) if bias else None
    found = multiplication.by_even_rows(x, w, b)
    assert found.is_contiguous()
    torch.testing.assert_close(found, F.linear(x, w, b), rtol=1e-4, atol=1e-4)


def test_short_rows_and_processors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = torch.zeros(1, dtype=torch.bfloat16)
    assert multiplication.lacking(x, ODD) == 0
    there = torch.zeros(1, dtype=torch.bfloat16, device="meta")
    assert [multiplication.lacking(there, n) for n in (ODD, EVEN, 17, EVEN + 7)] == [7, 0, 0, 1]
    assert multiplication.lacking(there.float(), ODD) == 0
