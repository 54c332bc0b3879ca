"""Tests draw the same keys and numbers in every run."""

import os

import numpy as np
import pytest
import torch

from dpoptim.noise import stream
from repeatable import RepeatableSystem


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    if not isinstance(stream.os, RepeatableSystem):
        pytest.skip("asked to explore")


def drawn() -> list[int]:
    words = np.empty(2, dtype=np.uint64)
    stream.KeyStream().words(words)
    return words.tolist()


def test_a_test_begins_with_the_same_keys_and_numbers() -> None:
    first, second, numbers = drawn(), drawn(), torch.rand(3)
    assert first != second
    stream.os.start_again()
    assert [drawn(), drawn()] == [first, second]
    assert torch.equal(numbers, torch.rand(3, generator=torch.Generator().manual_seed(0)))


def test_a_forked_child_draws_keys_of_its_own() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, stream.fresh_secret())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, stream.SECRET_BYTES) != stream.fresh_secret()
