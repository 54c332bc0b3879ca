"""Calibrations of the tests are cached in a folder of their own; property tests repeat, unless
asked to explore.
"""

import gc
import os
from collections.abc import Iterator

import pytest

# Read when PyTorch is loaded. Workers share the cores: threads that wait for each other by
# spinning take their time from those that they wait for (eight times, seen with two threads).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from hypothesis import settings

from dpoptim.gradients import multiplication, native, row_products
from dpoptim.gradients.layers import kernels

pytest_plugins = ["light_seeds", "repeatable", "slow_tests"]
os.environ.pop("COLUMNS", None)  # consoles keep the width that they find when they are made

settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)  # pytest --hypothesis-profile=explore
settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="module")
def _what_is_loaded_stays() -> None:
    """The collector of garbage need not look through all of PyTorch again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _own_calibration_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPOPTIM_CACHE_DIR", str(tmp_path_factory.mktemp("calibration")))
        yield


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """As many threads as the parameter says (`indirect=True`)."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    """All float32 products by "MKL", or all by "oneDNN", whatever the processor and the sizes; or
    "compiled": those of convolutions by the compiled functions, others by MKL; or "rows": as
    "oneDNN", but those of rows with a matrix by the compiled functions (`indirect=True`).
    """
    if request.param == "oneDNN" and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no products by oneDNN")
    if request.param == "compiled" and native.library() is None:
        pytest.skip("this package was built without compiled functions")
    if request.param == "rows" and not row_products.serve():
        pytest.skip("no compiled products of rows for this processor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "LEAST_FILLED", 0)
        if request.param not in ("compiled", "rows"):
            patch.setattr(native, "library", lambda: None)
        by_onednn = request.param in ("oneDNN", "rows")
        patch.setattr(multiplication, "onednn_is_faster", lambda: by_onednn)
        patch.setattr(multiplication, "compiles_thin_rows", lambda: False)
        patch.setattr(multiplication, "whole_vectors", lambda: True)
        patch.setattr(multiplication, "compiles_rows", lambda: request.param == "rows")
        patch.setattr(multiplication, "LEAST_ENTRIES", 0)
        yield str(request.param)
