"""Vectors that travel stretch by stretch are those that travel whole."""

from itertools import pairwise

import pytest
import torch

import distributed_work as work
from dpoptim.distributed.exchange import stretches
from dpoptim.distributed.fully_sharded import FullySharded
from dpoptim.distributed.process_group import ProcessGroup
from dpoptim.distributed.ranks import Ranks
from dpoptim.distributed.wrapping import Wrapping
from dpoptim.gradients.placement import Placement
from ranks import run_ranks


@pytest.mark.parametrize("stretch", [1, 3, 100])
@pytest.mark.parametrize("sizes", [[5, 7], [0, 11], [4, 0, 9], [2, 2, 1]])
def test_a_sum_is_the_same_in_stretches_of_any_length(sizes: list[int], stretch: int) -> None:
    entries, ranks = sum(sizes), len(sizes)
    expected = torch.arange(entries, dtype=torch.float64) * sum(range(1, ranks + 1))
    for total, into, exchanges in run_ranks(ranks, work.exchanged, sizes, stretch):
        assert torch.equal(total, expected)
        assert torch.equal(torch.cat(into), expected.float() / 2)
        assert exchanges == -(-max(sizes) // stretch)


def test_what_travels_at_a_time_stays_small_however_large_the_model() -> None:
    for ranks in (2, 8, 512):
        cuts = stretches(10**9, ranks)
        assert cuts[0].start == 0
        assert cuts[-1].stop == 10**9
        assert all(a.stop == b.start for a, b in pairwise(cuts))
        assert max(cut.stop - cut.start for cut in cuts) == max((1 << 21) // ranks, 1 << 17)


def test_several_processes_do_nothing_as_one_alone_would() -> None:
    """A method that is left out would act as if this rank were the only one, or had all."""

    def said(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert said(Ranks) - {"rank", "size"} <= said(ProcessGroup)
    assert said(Placement) | said(Wrapping) <= said(FullySharded) | {"hooks"}
