"""Calibrations of the tests are cached in a folder of their own; property tests repeat, unless asked to explore."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)  # pytest --hypothesis-profile=explore
settings.load_profile("repeatable")


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
