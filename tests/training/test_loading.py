"""What is read as a whole is what DataLoader collates item by item."""

from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import PoissonSampling
from dpoptim.training.loading import LoaderOptions, load_microbatches
from dpoptim.training.microbatches import BatchQueue, MicrobatchSampler

STEPS = 5


class Items(Dataset[Any]):
    """The same items, one by one."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def loaded(dataset: Dataset[Any], stacked: int, **options: Any) -> list[tuple[Any, Any]]:
    coins = KeyStream.from_seed(1, "coins"), KeyStream.from_seed(2, "groups")
    queue = BatchQueue(PoissonSampling(0.3), coins[0], 40, STEPS)
    sampler = MicrobatchSampler(queue, 2, coins[1], 9)
    return list(load_microbatches(dataset, sampler, LoaderOptions(**options), stacked))


def test_tensors_are_read_alike_item_by_item_as_a_whole_and_by_workers() -> None:
    for stacked in (1, 2):
        data = TensorDataset(torch.randn(40, stacked, 3), torch.arange(40))
        expected = loaded(Items(data), stacked)
        assert sum(microbatch.last for _, microbatch in expected) == STEPS < len(expected)
        for workers in (0, 1):
            found = loaded(data, stacked, num_workers=workers)
            assert [microbatch for _, microbatch in found] == [
                microbatch for _, microbatch in expected
            ]
            for (ours, _), (theirs, _) in zip(found, expected, strict=True):
                assert isinstance(ours, list)
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
