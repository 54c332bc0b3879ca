"""Runs `on_a_second_device.py` in processes of their own: a device that is registered stays, for
all tests that follow.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from devices import pretend
from devices.pretend import SOURCE, build


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
    run(str(built(compiler, pytestconfig, tmp_path)), pytestconfig.getoption("-m"))


def built(compiler: str, config: pytest.Config, folder: Path) -> Path:
    """The device, which is kept for later runs: it takes as long to compile as its tests do."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    made_of = [SOURCE.read_bytes(), Path(pretend.__file__).read_bytes(), version]
    digest = hashlib.sha256(b"\0".join([*made_of, torch.__version__.encode()])).hexdigest()
    kept = config.cache.mkdir("pretended-device") / f"{digest[:32]}.so" if config.cache else None
    if kept is not None and kept.exists():
        return kept
    library = folder / "pretend.so"
    build(compiler, library)
    if kept is None:
        return library
    beside = kept.with_suffix(f".{os.getpid()}")
    shutil.copyfile(library, beside)
    return beside.replace(kept)  # whole, whoever else builds it


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_everything_works_on_a_gpu(pytestconfig: pytest.Config) -> None:
    run("cuda", pytestconfig.getoption("-m"))
