"""Physical batches of a fixed shape in several processes: each places its part of the records in
slots of its own, and the sums are those of one process.
"""

from typing import Any

import pytest
import torch

import fixed_shape_work as work
from distributed_work import METHODS, plan_for, without_noise
from dpoptim.training.batches.slots import Slots
from ranks import run_ranks


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    found = without_noise(0, ["flat"], ["bare"])["flat", "bare"]["parameters"]
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.set_aside("DistributedDataParallel")
@pytest.mark.parametrize("way", ["bare", "DistributedDataParallel", "fully_shard"])
def test_every_rank_has_batches_of_a_public_shape_and_the_sums_of_one_process(
    way: str, alone: torch.Tensor
) -> None:
    plan = plan_for(METHODS["flat"]())
    rows = Slots.of(plan, None, 2).rows
    assert rows < Slots.of(plan, None).rows
    for found in run_ranks(2, work.trained, way):
        assert found["rows"] == [[rows]] * plan.steps
        torch.testing.assert_close(found["parameters"], alone, rtol=1e-12, atol=1e-12)
        assert "kernels are batch-invariant" not in found["rests on"]
        assert f"at most {work.N} records" in found["rests on"]


def in_ranks(way: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    return run_ranks(2, work.with_options, way, options)


def test_shards_have_slots_for_whole_batches() -> None:
    """How many records a shard holds may be private."""
    plan = plan_for(METHODS["flat"]())
    rows = Slots.of(plan, None, 2, sharded=True).rows
    for found in in_ranks("bare", {"sharded": True}):
        assert found["rows"] == [[rows]] * plan.steps


@pytest.mark.set_aside("bare")
@pytest.mark.parametrize("way", ["bare", "fully_shard"])
def test_batches_that_outgrow_their_slots_are_whole(way: str, alone: torch.Tensor) -> None:
    found = in_ranks(way, {"narrow": True})
    for each in found:
        torch.testing.assert_close(each["parameters"], alone, rtol=1e-12, atol=1e-12)
        assert {rows for step in each["rows"] for rows in step} == {3}
    if way == "fully_shard":
        assert found[0]["rows"] == found[1]["rows"]
