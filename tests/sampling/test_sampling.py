"""What is sampled is what is accounted: independent coins, private sizes, microbatches that add up
to the batch.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from dpoptim.gradients.accumulation.summation_groups import into_groups, number_of_groups
from dpoptim.gradients.arithmetic.products import GROUP_ROWS
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import FixedBatches, PoissonSampling
from dpoptim.training.batches.loading import LoaderOptions, load_microbatches
from dpoptim.training.batches.microbatches import BatchQueue, MicrobatchSampler


def test_batch_sizes_have_the_variance_of_independent_coins() -> None:
    """A shuffled loader would have variance zero. Deterministic: seeded coins."""
    n, q, draws = 2000, 0.1, 4000
    coins = KeyStream.from_seed(1, "coins")
    sizes = np.array([len(PoissonSampling(q).draw(coins, n)) for _ in range(draws)])
    variance = n * q * (1 - q)
    assert abs(sizes.mean() - n * q) < 5 * math.sqrt(variance / draws)
    assert abs(sizes.var() / variance - 1) < 5 * math.sqrt(2 / draws)


def test_records_join_independently_of_each_other_and_of_the_past() -> None:
    n, q, draws = 8, 0.3, 20_000
    coins = KeyStream.from_seed(2, "coins")
    joined = np.zeros((draws, n))
    for row in joined:
        row[PoissonSampling(q).draw(coins, n)] = 1
    bound = 5 / math.sqrt(draws)
    correlation = np.corrcoef(joined.T) - np.eye(n)
    assert np.abs(correlation).max() < bound
    assert abs(np.corrcoef(joined[:-1, 0], joined[1:, 0])[0, 1]) < bound
    assert np.abs(joined.mean(0) - q).max() < bound


def test_rate_one_takes_every_record() -> None:
    assert PoissonSampling(1.0).draw(KeyStream(), 7).tolist() == list(range(7))


@pytest.mark.parametrize("rate", [0, -0.1, 1.1, math.nan])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="sample_rate must be in"):
        PoissonSampling(rate)


def test_capacity_is_passed_with_negligible_probability() -> None:
    from scipy.stats import binom

    for n, q in ((60_000, 0.01), (1000, 0.5), (10**7, 1e-6), (50, 0.02)):
        capacity = PoissonSampling(q).capacity(n)
        assert capacity == n or binom.sf(capacity, n, q) < 1e-15


@pytest.mark.parametrize("size", [None, 1, 7, 1000])
@pytest.mark.parametrize("dealt", [True, False])
def test_microbatches_add_up_to_the_drawn_batch(size: int | None, dealt: bool) -> None:
    n, q, steps = 200, 0.2, 30
    sampler = PoissonSampling(q)
    queue = BatchQueue(sampler, KeyStream.from_seed(3, "coins"), n, steps)
    dealer = MicrobatchSampler(
        queue, number_of_groups(n * q, size) if dealt else 1, lambda step: KeyStream(), size
    )
    data = TensorDataset(torch.arange(n))
    batches: list[list[int]] = [[]]
    for (rows,), microbatch in load_microbatches(data, dealer, LoaderOptions()):
        assert len(rows) == microbatch.records <= (size or n)
        batches[-1] += rows.tolist()
        if microbatch.last:
            batches.append([])
    coins = KeyStream.from_seed(3, "coins")
    assert [sorted(batch) for batch in batches[:-1]] == [
        sampler.draw(coins, n).tolist() for _ in range(steps)
    ]


def test_empty_batches_become_null_microbatches() -> None:
    sampler = MicrobatchSampler(
        BatchQueue(PoissonSampling(1e-12), KeyStream(), 5, 10), 1, lambda step: KeyStream(), None
    )
    delivered = list(load_microbatches(TensorDataset(torch.arange(5)), sampler, LoaderOptions()))
    assert len(delivered) == 10
    assert all(
        microbatch.null and microbatch.last and microbatch.records == 1
        for _, microbatch in delivered
    )


def test_a_records_group_does_not_depend_on_the_others() -> None:
    """With coupled coins, removing one record leaves every other one in its group, in its
    order.
    """
    indices = np.arange(500)
    words = np.random.default_rng(0).integers(0, 2**63, 500).astype(np.uint64)

    class Coins(KeyStream):
        def __init__(self, words: np.ndarray) -> None:
            super().__init__()
            self.given = words

        def words(self, out: np.ndarray) -> None:
            out[:] = self.given

    whole = into_groups(Coins(words), indices, 5)
    for removed in (0, 250, 499):
        without = into_groups(Coins(np.delete(words, removed)), np.delete(indices, removed), 5)
        for group, other in zip(whole, without, strict=True):
            assert [i for i in group if i != removed] == list(other)
    assert sorted(np.concatenate(whole)) == list(indices)


def test_groups_seldom_outgrow_what_one_product_may_sum() -> None:
    coins, sizes = KeyStream.from_seed(1, "groups"), []
    for expected in (50, 112, 500, 4096):
        groups = number_of_groups(expected, None)
        for _ in range(40):
            sizes += [len(group) for group in into_groups(coins, np.arange(expected), groups)]
    assert max(sizes) <= GROUP_ROWS
    assert number_of_groups(64, 16) == 8  # small microbatches get small groups


def test_a_drawn_batch_is_delivered_until_it_is_released() -> None:
    """Whoever could look at a batch and ask for another would choose who takes part."""
    queue = BatchQueue(PoissonSampling(0.3), KeyStream(), 50, 4)
    first = next(queue.ahead())
    for _ in range(5):
        assert np.array_equal(next(queue.ahead()), first)
    ahead = queue.ahead()
    drawn = [next(ahead) for _ in range(3)]  # as data-loader workers do
    queue.released()
    assert np.array_equal(next(queue.ahead()), drawn[1])
    assert np.array_equal(next(ahead), list(queue.ahead())[2])  # step 3, drawn once
    assert len(list(queue.ahead())) == 3


@pytest.mark.parametrize("order", ["reshuffled", "shuffled", "given"])
@pytest.mark.parametrize(
    ("n", "batch_size", "passes"), [(10, 3, 4), (12, 4, 3), (5, 5, 2), (7, 1, 1)]
)
def test_fixed_batches_partition_every_pass(
    order: Any, n: int, batch_size: int, passes: int
) -> None:
    sampler = FixedBatches(n, batch_size, order)
    a_pass = -(-n // batch_size)
    assert sampler.steps(passes) == passes * a_pass
    assert sampler.participations(passes * a_pass) == passes
    batches = list(itertools.islice(sampler.batches(KeyStream(), n), passes * a_pass))
    last: dict[int, int] = {}
    for step, batch in enumerate(batches):
        assert len(batch) <= batch_size == sampler.capacity(n)
        for record in batch.tolist():
            assert step - last.get(record, -n) >= sampler.separation
            last[record] = step
    for start in range(0, len(batches), a_pass):
        assert sorted(np.concatenate(batches[start : start + a_pass]).tolist()) == list(range(n))


def test_orders_of_fixed_batches() -> None:
    n = 200

    def batches(order: Any) -> list[list[int]]:
        return [
            batch.tolist()
            for batch in itertools.islice(FixedBatches(n, 20, order).batches(KeyStream(), n), 20)
        ]

    given, shuffled, reshuffled = batches("given"), batches("shuffled"), batches("reshuffled")
    assert given == 2 * [list(range(i, i + 20)) for i in range(0, n, 20)]
    assert shuffled[:10] == shuffled[10:] != given[:10]
    assert reshuffled[:10] != reshuffled[10:]


def test_the_order_is_a_fair_shuffle() -> None:
    """Which of 4 batches record 0 is in: chi-square with 3 degrees of freedom, false alarm below
    1e-6.
    """
    coins, counts = KeyStream.from_seed(1, "order"), np.zeros(4)
    for _ in range(2000):
        counts[next(i for i, b in enumerate(FixedBatches(8, 2).batches(coins, 8)) if 0 in b)] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 31


def test_fixed_batches_of_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match="11 records, but .* n=10"):
        next(FixedBatches(10, 3).batches(KeyStream(), 11))
    with pytest.raises(ValueError, match="order must be one of"):
        FixedBatches(10, 3, "sorted")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole number of passes"):
        FixedBatches(10, 3).steps(1.5)


def test_a_sampler_of_others_does_not_inherit_that_places_do_not_matter() -> None:
    """It may draw by places; only what it says itself counts, and only for itself."""

    class Drawn(PoissonSampling):
        pass

    class SaysSo(PoissonSampling):
        def goes_by_places(self, *, sharded: bool) -> bool:
            return False

    class Later(SaysSo):
        pass

    assert Drawn(0.5).by_places(sharded=False)
    assert not SaysSo(0.5).by_places(sharded=False)
    assert Later(0.5).by_places(sharded=False)
    assert not PoissonSampling(0.5).by_places(sharded=True)
    assert not FixedBatches(4, 2).by_places(sharded=False)
    assert FixedBatches(4, 2).by_places(sharded=True)
