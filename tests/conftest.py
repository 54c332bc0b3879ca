"""Calibrations of the tests are cached in a folder of their own; property tests repeat, unless asked to explore."""

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)  # pytest --hypothesis-profile=explore
settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="session")
def _own_calibration_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPOPTIM_CACHE_DIR", str(tmp_path_factory.mktemp("calibration")))
        yield
