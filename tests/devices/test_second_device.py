"""Runs `on_a_second_device.py` in processes of their own: a device that is registered stays, for
all tests that follow.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from devices.pretend import build


def run(device: str, marked: str) -> None:
    """``marked``: as of `pytest -m`, like that of these tests."""
    tests = Path(__file__).with_name("on_a_second_device.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-m",
        marked,
        str(tests),
    ]
    run = subprocess.run(
        command,
        env=os.environ | {"SECOND_DEVICE": device},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


def test_everything_works_on_a_pretended_device(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C++ compiler, g++ or clang++, to make a second device")
    library = tmp_path / "pretend.so"
    build(compiler, library)
    run(str(library), pytestconfig.getoption("-m"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_everything_works_on_a_gpu(pytestconfig: pytest.Config) -> None:
    run("cuda", pytestconfig.getoption("-m"))
