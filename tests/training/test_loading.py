"""What is read as a whole is what DataLoader collates item by item."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import dpoptim
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import PoissonSampling
from dpoptim.training.batches.loading import LoaderOptions, load_microbatches
from dpoptim.training.batches.microbatches import BatchQueue, MicrobatchSampler
from dpoptim.training.batches.worker_messages import SMALL, IndexMessage, written
from dpoptim.training.refusals import refuse_data

STEPS = 5


class Items(Dataset[Any]):
    """The same items, one by one."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def lazily_loaded(dataset: Dataset[Any], stacked: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    queue = BatchQueue(PoissonSampling(0.3), KeyStream.from_seed(1, "coins"), 40, STEPS)
    sampler = MicrobatchSampler(queue, 2, lambda step: KeyStream.from_seed(2, f"step {step}"), 9)
    return load_microbatches(dataset, sampler, LoaderOptions(**options), stacked)


def loaded(dataset: Dataset[Any], stacked: int, **options: Any) -> list[tuple[Any, Any]]:
    return list(lazily_loaded(dataset, stacked, **options))


def test_tensors_are_read_alike_item_by_item_as_a_whole_and_by_workers() -> None:
    for stacked in (1, 2):
        data = TensorDataset(torch.randn(40, stacked, 3), torch.arange(40))
        expected = loaded(Items(data), stacked)
        assert sum(microbatch.last for _, microbatch in expected) == STEPS < len(expected)
        for source, workers in ((data, 0), (data, 1), (Items(data), 1)):
            found = loaded(source, stacked, num_workers=workers)
            assert [microbatch for _, microbatch in found] == [
                microbatch for _, microbatch in expected
            ]
            for (ours, _), (theirs, _) in zip(found, expected, strict=True):
                assert isinstance(ours, list)
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "small": lambda: torch.randn(3, 4),
    "large": lambda: torch.zeros(SMALL // 4 + 1),
    "a number": lambda: torch.tensor(3),
    "none": lambda: torch.zeros(0, 3),
    "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "cut out": lambda: torch.randn(5, 4)[:, ::2],
    "trained": lambda: torch.randn(3, requires_grad=True),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_what_a_worker_sends_arrives_as_it_was(kind: str) -> None:
    sent = TENSORS[kind]()
    found = pickle.loads(written({"x": sent, "again": sent}))
    assert found["x"] is found["again"]
    assert torch.equal(found["x"], sent)
    for what in (torch.Tensor.stride, lambda t: t.dtype, lambda t: t.requires_grad):
        assert what(found["x"]) == what(sent)


@pytest.mark.parametrize("indices", [[], [3, 2**40, 0], [[1, 2], [3, 4]]])
def test_indices_arrive_as_the_list_that_data_sets_expect(indices: list[Any]) -> None:
    found = pickle.loads(pickle.dumps(IndexMessage(np.array(indices, np.int64))))
    assert type(found) is list
    assert found == indices
    assert all(type(index) in (int, list) for index in found)


class OfPythonNumbers(Items):
    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_data_sets_are_asked_for_python_numbers(workers: int) -> None:
    data = OfPythonNumbers(TensorDataset(torch.randn(40, 3)))
    assert loaded(data, 1, num_workers=workers)


def test_a_batch_that_cannot_be_sent_is_an_error_and_no_endless_wait() -> None:
    data = Items(TensorDataset(torch.randn(40, 3)))
    with pytest.raises(Exception, match="lambda"):
        loaded(data, 1, num_workers=1, collate_fn=lambda items: lambda: items)


class Holed(Items):
    def __getitem__(self, index: int) -> Any:
        return None if index > 20 else self._dataset[index]


KILLED = """
import multiprocessing, time
import test_loading, torch
from torch.utils.data import TensorDataset
test_loading.STEPS = 50
data = test_loading.Items(TensorDataset(torch.randn(40, 1, 20_000)))
batches = test_loading.lazily_loaded(data, 1, num_workers=2)
next(batches)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_workers_of_a_killed_program_do_not_stay() -> None:
    """They hold records, and whoever waits for the program's output waits for theirs, too."""
    here = {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, env=os.environ | here
    ) as program:
        assert program.stdout is not None
        workers = [int(pid) for pid in program.stdout.readline().split()]
        assert len(workers) == 2
        time.sleep(1)  # until their pipe is full
        program.kill()
        end = time.monotonic() + 30
        while time.monotonic() < end and any(runs(pid) for pid in workers):
            time.sleep(0.2)
        left = [pid for pid in workers if runs(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left


def runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_record_that_is_none_is_named_before_the_charge_or_in_its_batch() -> None:
    data = Holed(TensorDataset(torch.randn(40, 3)))
    for options in ({}, {"num_workers": 1}, {"collate_fn": lambda items: [x for x in items if x]}):
        with pytest.raises(dpoptim.PrivacyError, match="a record of train_set is None. Fix"):
            loaded(data, 1, **options)
    with pytest.raises(dpoptim.PrivacyError, match="a record of train_set is None. Fix"):
        refuse_data([data[i] for i in range(40)])  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
@pytest.mark.parametrize("mixed", [False, True])
def test_records_that_make_no_batch_do_not_tell_how_long_they_are(
    options: dict[str, Any], mixed: bool
) -> None:
    """Nor, where one is of another kind, its place in the batch, as torch does."""
    lengths = [torch.zeros(length) for length in range(40)]
    data = [torch.zeros(3), 3.5] * 20 if mixed else lengths
    with pytest.raises(dpoptim.PrivacyError, match="collate_fn") as caught:
        for _ in lazily_loaded(data, 1, **options):  # type: ignore[arg-type]
            pass
    assert "[" not in str(caught.value).split("collate_fn")[-1]
    assert not re.search("equal size|element|numel", str(caught.value).split("PrivacyError")[-1])
