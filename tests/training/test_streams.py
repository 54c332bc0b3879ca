"""Streams: one pass over disjoint batches in the given order, the same as from a data set in
memory.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import dpoptim

N, BATCH = 46, 10


def plan(n: int = N, **method: Any) -> dpoptim.Plan:
    return dpoptim.DPFTRL(clip_norm=1.0, **{"order": "given", **method}).plan(
        n=n, batch_size=BATCH, epochs=1, noise_multiplier=0.5, delta=1e-4, neighboring="zero-out"
    )


def table() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(N, 4, generator=generator), torch.randint(0, 2, (N,), generator=generator)
    )


class Stream(IterableDataset[Any]):
    """Counts how often each record is read."""

    def __init__(self, records: Dataset[Any], longer: int = 0) -> None:
        self.records, self.longer, self.reads = records, longer, 0

    def __iter__(self) -> Iterator[Any]:
        for i in range(N + self.longer):
            self.reads += 1
            yield self.records[i % N]


def train(train_set: Any, chosen: dpoptim.Plan, *, leave: bool = False, **options: Any) -> Tensor:
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(chosen, model, optimizer, train_set, noise_seed=3) as private:
        if leave:
            next(private.batches())
        for x, y in private.batches(**options):
            private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach()


@pytest.mark.parametrize("options", [{}, {"physical_batch_size": 3}, {"leave": True}])
def test_a_stream_trains_as_its_records_do(options: dict[str, Any]) -> None:
    stream = Stream(table(), longer=5)
    torch.testing.assert_close(
        train(stream, plan(), **options), train(table(), plan(), **options), rtol=0, atol=0
    )
    assert stream.reads == N  # every record once, and nothing behind the plan's n


def test_what_is_iterated_over_is_a_stream() -> None:
    loader = DataLoader(table(), batch_size=None)
    torch.testing.assert_close(train(iter(loader), plan()), train(table(), plan()), rtol=0, atol=0)


def test_few_records_are_kept() -> None:
    from dpoptim.training.batches.streams import StreamRecords

    records = StreamRecords(iter(range(1000)), 1000, keep=20, whose="of them")
    assert [records[i] for i in (0, 7, 3, 500, 490)] == [0, 7, 3, 500, 490]
    assert len(records._kept) <= 21
    with pytest.raises(ValueError, match="long ago"):
        records[400]


def test_streams_are_refused_where_records_are_drawn() -> None:
    sampled = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=BATCH, epochs=1, noise_multiplier=1.0, delta=1e-4
    )
    twice = dpoptim.DPFTRL(clip_norm=1.0, order="given").plan(
        n=N, batch_size=BATCH, epochs=2, noise_multiplier=1.0, delta=1e-4, neighboring="zero-out"
    )
    for chosen in (sampled, twice, plan(order="shuffled")):
        with pytest.raises(dpoptim.PrivacyError, match='order="given"'):
            train(Stream(table()), chosen)


def test_workers_may_not_read_a_stream_each() -> None:
    with pytest.raises(dpoptim.PrivacyError, match="take part twice"):
        train(Stream(table()), plan(), num_workers=1)


def test_a_stream_that_ends_early_says_so() -> None:
    with pytest.raises(ValueError, match="ended before the plan's n=66"):
        train(Stream(table()), plan(n=N + 20))
