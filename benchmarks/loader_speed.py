"""Records a second through the loader of private batches, as a multiple of PyTorch's DataLoader on
the same data set with the same workers.

Measured is loading alone: a batch is drawn, dealt into groups, read and collated, and forgotten.
PyTorch's batches are shuffled and of fixed size, ours are Poisson samples of that expected size.
Each has a process of its own, as in use: what one keeps (PyTorch a list of all indices) costs the
other nothing, and Python's garbage collector runs as always. The two take turns, and turns in going
first, each for a number of batches after four that are not counted, since workers have read them
meanwhile; what either does before its first batch (PyTorch shuffles the whole data set) is spread
over an epoch, which it serves. ``ms`` is what as many records as a batch is expected to have take,
the median of all rounds: processor time without workers, which other programs disturb less, and
time with two. ``ratio`` is the median of the rounds' ratios, of records a second.

Run: ``python benchmarks/loader_speed.py [--records 10000000] [--out benchmarks/results]``.
"""

import argparse
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpoptim.gradients.accumulation.summation_groups import number_of_groups
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import PoissonSampling
from dpoptim.training.batches.loading import LoaderOptions, load_microbatches
from dpoptim.training.batches.microbatches import BatchQueue, MicrobatchSampler
from saving import save_csv

FEATURES, SKIPPED = 32, 4
Reader = Callable[[Dataset[Any], int, int], Iterator[Any]]


class Records(Dataset[Any]):
    """Items one by one, as most data sets give them."""

    def __init__(self, x: np.ndarray, item: Callable[[np.ndarray, int], Any]) -> None:
        self.x, self._item = x, item

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self._item(self.x, index)


class ManyRecords(Records):
    """The same, and many at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return list(torch.from_numpy(self.x[indices]))


def as_dict(x: np.ndarray, index: int) -> dict[str, Tensor]:
    return {"features": torch.from_numpy(x[index]), "label": torch.tensor(index % 2)}


def as_tensor(x: np.ndarray, index: int) -> Tensor:
    return torch.from_numpy(np.array(x[index]))


def ours(data: Dataset[Any], batch: int, workers: int) -> Iterator[Any]:
    records = len(data)  # type: ignore[arg-type]
    queue = BatchQueue(PoissonSampling(batch / records), KeyStream(), records, 10**9)
    coins = KeyStream()
    sampler = MicrobatchSampler(queue, number_of_groups(batch, None), lambda _: coins, None)
    for loaded, _ in load_microbatches(data, sampler, LoaderOptions(num_workers=workers)):
        queue.released()
        yield loaded


def theirs(data: Dataset[Any], batch: int, workers: int) -> Iterator[Any]:
    while True:
        yield from DataLoader(data, batch_size=batch, shuffle=True, num_workers=workers)


def seconds(batches: Iterator[Any], count: int, clock: Callable[[], float]) -> float:
    """What a record takes."""
    for _ in itertools.islice(batches, SKIPPED):
        pass
    start = clock()
    records = sum(map(records_in, itertools.islice(batches, count)))
    return (clock() - start) / records


def records_in(batch: Any) -> int:
    leaf = batch
    while not isinstance(leaf, Tensor):
        leaf = next(iter(leaf.values())) if isinstance(leaf, dict) else leaf[0]
    return len(leaf)


def data_sets(folder: Path, large: int) -> dict[str, tuple[Dataset[Any], int]]:
    """Each with the batch it is read in."""
    small = np.random.default_rng(0).standard_normal((100_000, FEATURES), np.float32)
    on_disk = np.lib.format.open_memmap(
        folder / "records.npy", mode="w+", dtype=np.float32, shape=(large, FEATURES)
    )
    for start in range(0, large, len(small)):
        on_disk[start : start + len(small)] = small[: large - start]
    on_disk.flush()
    mapped = np.load(folder / "records.npy", mmap_mode="r+")
    tensors = TensorDataset(torch.from_numpy(small), torch.zeros(len(small)))
    return {
        "tensors": (tensors, 512),
        "dicts": (Records(small, as_dict), 512),
        f"memmap of {large:,}, tensors": (TensorDataset(torch.from_numpy(mapped)), 4096),
        f"memmap of {large:,}, one by one": (Records(mapped, as_tensor), 4096),
        f"memmap of {large:,}, many at once": (ManyRecords(mapped, as_tensor), 4096),
    }


def serve(pipe: Connection, read: Reader, data: Dataset[Any], batch: int, workers: int) -> None:
    """One side in its own process: the time of a record, as often as it is asked for."""
    torch.set_num_threads(1)  # a fork of who has used several would wait for them for ever
    clock = time.perf_counter if workers else time.process_time
    if isinstance(data, Records):
        data.x.sum()  # every page is mapped before the first round
    elif isinstance(data, TensorDataset):
        data.tensors[0].sum()
    batches, start = read(data, batch, workers), clock()
    next(batches)
    first = (clock() - start) / len(data)  # type: ignore[arg-type]  # once in an epoch
    while count := pipe.recv():
        pipe.send(first + seconds(batches, count, clock))
    batches.close()  # type: ignore[attr-defined]


def compare(
    data: Dataset[Any], batch: int, workers: int, rounds: int, count: int
) -> dict[str, float]:
    context, sides = multiprocessing.get_context("fork"), []
    for read in (ours, theirs):
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, read, data, batch, workers))
        process.start()
        there.close()  # so that a side that dies is an error here
        sides.append((here, process, list[float]()))
    for turn in range(rounds):
        for pipe, _, found in sides if turn % 2 else reversed(sides):
            pipe.send(count)
            found.append(pipe.recv())
    for pipe, process, _ in sides:
        pipe.send(0)
        process.join()
    times = [found for *_, found in sides]
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    mine, other = (1000 * batch * statistics.median(found) for found in times)
    return {"ours, ms": round(mine, 2), "PyTorch, ms": round(other, 2), "ratio": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000_000, help="in the memory map")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=128)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (data, batch) in data_sets(Path(folder), options.records).items():
            for workers in (0, 2):
                found = compare(data, batch, workers, options.rounds, options.batches)
                rows.append({"data": name, "batch": batch, "workers": workers, **found})
                if options.out is not None:  # as far as it is known
                    save_csv(rows, options.out / "loader_speed.csv")
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
