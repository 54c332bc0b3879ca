"""Freed memory, given back to the system or kept for the next step."""

import platform
import subprocess
import sys
from threading import Event

import pytest

from dpoptim.runtime import freed_memory

STEPS = """
import resource
import numpy as np
from dpoptim.runtime.freed_memory import keep_freed_memory
{first}
def step():
    "Take 64 MiB in one block and 64 in many, and free them."
    blocks = [np.ones(1 << 23), *(np.ones(1 << 17) for _ in range(64))]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def fresh_pages(first: str) -> int:
    """That five steps ask for after the first one, in a process of their own."""
    command = [sys.executable, "-c", STEPS.format(first=first)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator's")
def test_what_is_kept_is_used_again() -> None:
    a_step = (128 << 20) // 4096
    assert fresh_pages("") > a_step, "nothing is given back without it: this test sees nothing"
    assert fresh_pages("keep_freed_memory()") < a_step / 16


def test_other_systems_keep_what_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(freed_memory, "KEPT", Event())
    with freed_memory.freed_memory_given_back():
        pass
    freed_memory.keep_freed_memory()
