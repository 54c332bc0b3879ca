"""Large blocks of memory in huge pages."""

from pathlib import Path
from threading import Event

import pytest
import torch

from dpoptim.gradients import memory
from dpoptim.runtime import freed_memory
from dpoptim.training.trials.memory import LiveTensors

needed = pytest.mark.skipif(
    not memory.huge_pages_are_there(), reason="the system gives no huge pages"
)
LARGE = memory.MAPPED // 4 + 1  # numbers


@needed
def test_what_is_freed_goes_back_and_is_counted_meanwhile() -> None:
    def resident() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) << 10

    before = resident()
    with LiveTensors() as live:
        block = memory.empty_vector(LARGE)
        assert memory.in_huge_pages(block)
        assert not block._is_view()
        assert block.untyped_storage().nbytes() == block.nbytes
        block.fill_(1.0)
        assert resident() - before > 3 * LARGE
        del block
    assert live.peak >= 4 * LARGE
    assert resident() - before < LARGE


@pytest.mark.parametrize("why", ["small", "none", "refused", "kept"])
def test_other_memory_is_taken_elsewhere(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError

    monkeypatch.setattr(memory, "huge_pages_are_there", lambda: why != "none")
    if why == "refused":
        monkeypatch.setattr(memory.mmap, "mmap", refuse)
    monkeypatch.setattr(freed_memory, "KEPT", Event())
    if why == "kept":
        freed_memory.KEPT.set()
    block = memory.empty_vector(LARGE - (why == "small"))
    assert block.shape == (LARGE - (why == "small"),)
    assert not memory.in_huge_pages(block)


@needed
def test_memory_is_given_back_once_before_the_loss_of_huge_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = list[None]()
    monkeypatch.setattr(freed_memory, "give_back", lambda: given.append(None))
    rows = memory.MAPPED // 4096 + 1
    small, large = memory.empty_result(4, 1024, 8), memory.empty_result(rows, 1024, 8)
    assert large.shape == (rows, 1024)
    assert large.is_contiguous()
    assert not large._is_view()
    memory.give_back_before_loss({"a": large})  # nobody differentiates it
    memory.give_back_before_loss(torch.ones(rows, 1024, requires_grad=True))
    memory.give_back_before_loss(small.requires_grad_())
    assert not given
    memory.give_back_before_loss([small, large.requires_grad_(), large])
    assert len(given) == 1
