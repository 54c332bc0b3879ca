"""Every test draws the same numbers in every run, whichever tests ran before it.

A bound that holds with probability 0.9999 is kept or broken by chance where keys come from the
operating system; so do thousands of such bounds, and one run in some would fail. With
`--hypothesis-profile=explore` keys are the system's and the numbers new.
"""

import hashlib
import itertools
import os
import random
from typing import Any

import numpy as np
import pytest
import torch

from dpoptim.noise import stream


class RepeatableSystem:
    """In the place of the module `os` that key streams take their keys from."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.start_again()

    def start_again(self) -> None:
        self._calls = itertools.count()

    def urandom(self, size: int) -> bytes:
        # a forked child gets keys of its own, which do not repeat
        child = "" if os.getpid() == self._process else f" of process {os.getpid()}"
        words = f"key {next(self._calls)}{child}".encode()
        return hashlib.shake_256(words).digest(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-profile", None) != "explore":
        stream.os = RepeatableSystem()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if isinstance(stream.os, RepeatableSystem):
        stream.os.start_again()
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
