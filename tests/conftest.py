"""Calibrations of the tests are cached in a folder of their own; property tests repeat, unless
asked to explore.
"""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

# Read when PyTorch is loaded. Workers share the cores: threads that wait for each other by
# spinning take their time from those that they wait for (eight times, seen with two threads).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from hypothesis import HealthCheck, settings

from support import missing, using

pytest_plugins = ["light_seeds", "repeatable", "slow_tests"]
os.environ.pop("COLUMNS", None)  # consoles keep the width that they find when they are made

# no test depends on a clock
NO_CLOCK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", NO_CLOCK, derandomize=True)
settings.register_profile("explore", NO_CLOCK)  # pytest --hypothesis-profile=explore
settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="module")
def _what_is_loaded_stays() -> None:
    """The collector of garbage need not look through all of PyTorch again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _own_calibration_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One for all workers, whose folders lie in one."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPOPTIM_CACHE_DIR", str(folder / "calibration"))
        yield


@pytest.fixture
def tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is attached again, to a model of the same layers, is not tried again."""
    remember_checks(monkeypatch, {})


@pytest.fixture(scope="module")
def checks_of_losses() -> dict[object, Any]:
    return {}


@pytest.fixture
def tried_once_a_file(monkeypatch: pytest.MonkeyPatch, checks_of_losses: dict[object, Any]) -> None:
    """As `tried_once`, also where another test of the file attached it."""
    remember_checks(monkeypatch, checks_of_losses)


def remember_checks(monkeypatch: pytest.MonkeyPatch, found: dict[object, Any]) -> None:
    from dpoptim.training import prepared

    honest = prepared.check_loss

    def remembered(model: Any, loss: Any, *rest: Any, **options: Any) -> Any:
        collate, declared, isolation = rest[2], rest[3], rest[5]
        key = loss, collate, declared, isolation, str(model), *sorted(options.items())
        if key not in found:
            found[key] = honest(model, loss, *rest, **options)
        return found[key]

    monkeypatch.setattr(prepared, "check_loss", remembered)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """As many threads as the parameter says (`indirect=True`)."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    """See `support.using` (`indirect=True`)."""
    if missing(request.param):
        pytest.skip(missing(request.param))
    with using(request.param):
        yield str(request.param)
