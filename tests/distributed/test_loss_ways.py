"""A loss that does not suit the way found for its model, in several processes: all take the same
other way, and step as one process does.
"""

import pytest
import torch

import loss_ways_work as work
from ranks import run_ranks


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", work.CASES)
@pytest.mark.parametrize("way", ["bare", "DistributedDataParallel", "fully_shard"])
def test_all_ranks_take_the_way_of_one_process(case: str, way: str) -> None:
    tier, axis, parameters = work.trained(0, case, "bare")
    assert tier == case
    for found in run_ranks(2, work.trained, case, way):
        assert found[:2] == (tier, axis)
        torch.testing.assert_close(found[2], parameters, rtol=1e-9, atol=1e-12)
