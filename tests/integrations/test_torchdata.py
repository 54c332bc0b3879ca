"""torchdata's nodes are streams of records; its loaders are loaders."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, SequentialSampler

import dpoptim

nodes = pytest.importorskip("torchdata.nodes")
stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

N = 120
GENERATOR = torch.Generator().manual_seed(0)
RECORDS = [(torch.randn(3, generator=GENERATOR), i % 2) for i in range(N)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(RECORDS)


class ReadAhead(IterableDataset[Any]):
    """By a worker inside the stream."""

    def __iter__(self) -> Iterator[Any]:
        loader = stateful_dataloader.StatefulDataLoader(Stream(), batch_size=None, num_workers=1)
        yield from loader


def trained(source: Any) -> Tensor:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = dpoptim.DPFTRL(clip_norm=1.0, order="given").plan(
        n=N, batch_size=30, epochs=1, epsilon=4.0, delta=1e-4, neighboring="zero-out"
    )
    with dpoptim.attach(plan, model, optimizer, source, noise_seed=3) as private:
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach().clone()


SOURCES: dict[str, Callable[[], Any]] = {
    "node": lambda: nodes.IterableWrapper(RECORDS),
    "loader of a node": lambda: nodes.Loader(nodes.IterableWrapper(RECORDS)),
    "mapped and prefetched": lambda: nodes.Prefetcher(
        nodes.ParallelMapper(
            nodes.IterableWrapper(RECORDS), tuple, num_workers=2, method="thread", in_order=True
        ),
        prefetch_factor=4,
    ),
    "map-style": lambda: nodes.MapStyleWrapper(
        map_dataset=RECORDS, sampler=SequentialSampler(RECORDS)
    ),
    "StatefulDataLoader": ReadAhead,
}


@pytest.mark.filterwarnings("ignore")  # torchdata's own
@pytest.mark.parametrize("source", SOURCES)
def test_a_stream_by_torchdata_trains_as_any_stream(source: str) -> None:
    assert torch.equal(trained(SOURCES[source]()), trained(Stream()))


@pytest.mark.filterwarnings("ignore")
def test_loaders_and_batches_are_refused_with_the_fix() -> None:
    with pytest.raises(TypeError, match="got a DataLoader.*Fix: pass loader.dataset"):
        trained(stateful_dataloader.StatefulDataLoader(RECORDS, batch_size=30))
    with pytest.raises(ValueError, match="Fix: .*of records, not of batches"):
        trained(nodes.Batcher(nodes.IterableWrapper(RECORDS), 10))
