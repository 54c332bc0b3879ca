"""What tensors hold, read by compiled functions and without them: the same words."""

import pytest
import torch
from torch import Tensor

from dpoptim.gradients.watch import values
from dpoptim.gradients.watch.values import COPIED, LANES, Values

READERS = [
    "numpy",
    pytest.param(
        "compiled",
        marks=pytest.mark.skipif(
            values.compiled_reader() is None, reason="built without compiled functions"
        ),
    ),
]


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(values, "compiled_reader", lambda: None)
    return str(request.param)


def tensors() -> list[tuple[str, Tensor]]:
    """Of odd lengths and beginnings, in several dtypes; some of so many words that they are summed
    (of which a row more than a multiple of four, and some words after the last row).
    """
    torch.manual_seed(0)
    large = 2 * (9 * LANES + 5) + 1
    assert large // 2 > COPIED
    return [
        ("large", torch.randn(large)),
        ("begins in the middle of a word", torch.randn(large + 1)[1:]),
        ("bytes", torch.randint(0, 256, (11,)).to(torch.uint8)),
        ("scalar", torch.randn(())),
        ("odd", torch.randn(7)),
        ("by columns", torch.randn(5, 3).T),
        ("empty", torch.zeros(0)),
        ("narrow", torch.randn(13).bfloat16()),
    ]


def test_every_entry_is_watched(reader: str) -> None:
    found = tensors()
    watch = Values(found)
    assert watch.changed() is None
    for name, tensor in found:
        flat = tensor.T.reshape(-1).data if tensor.dim() == 2 else tensor.reshape(-1).data
        entries = len(flat)
        for place in {*range(min(entries, 20)), *range(max(0, entries - 20), entries)}:
            kept = flat[place].clone()
            flat[place] = kept + 1 if tensor.dtype == torch.uint8 else kept * 2 + 1
            assert watch.changed() == name, place
            flat[place] = kept
    assert watch.changed() is None


@pytest.mark.skipif(values.compiled_reader() is None, reason="built without compiled functions")
def test_compiled_functions_read_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tensors()
    compiled = Values(found)
    monkeypatch.setattr(values, "compiled_reader", lambda: None)
    plain = Values(found)
    assert plain._noted.keys() == compiled._noted.keys()
    assert all(
        torch.equal(plain._noted[device], compiled._noted[device]) for device in plain._noted
    )
