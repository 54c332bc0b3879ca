"""Work of compiled functions in parts: each part once, with room of its own, to the same bits."""

from collections.abc import Iterator

import pytest
import torch

from dpoptim.gradients.arithmetic import row_products
from dpoptim.runtime import compiled_work

pytestmark = pytest.mark.skipif(
    not row_products.serve(), reason="no compiled products of rows for this processor"
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("region", ["OpenMP's", "none"])
def test_work_is_the_same_in_any_number_of_parts(
    region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch's OpenMP can be asked for threads, and where a pool has to do."""
    torch.manual_seed(0)
    x, w = torch.randn(61, 40), torch.randn(70, 40)
    torch.set_num_threads(1)
    alone = row_products.Panels(w).multiply(x)
    monkeypatch.setattr(compiled_work, "WORTH_A_THREAD", 1)
    if region == "none":
        monkeypatch.setattr(compiled_work, "region_address", lambda: None)
    elif compiled_work.region_address() is None:
        pytest.skip("this PyTorch has no threads of OpenMP")
    for number in (2, 3, 7):
        torch.set_num_threads(number)
        for _ in range(20):
            assert torch.equal(row_products.Panels(w).multiply(x), alone)
        assert torch.get_num_threads() == number


def test_little_work_is_left_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise AssertionError("threads were woken")

    monkeypatch.setattr(compiled_work, "region_address", refuse)
    torch.set_num_threads(2)
    row_products.Panels(torch.ones(4, 4)).multiply(torch.ones(4, 4))
    many = torch.ones(600, 600)
    with pytest.raises(AssertionError, match="woken"):
        row_products.Panels(many)
