"""Calibrations of the tests are cached in a folder of their own."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_calibration_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPOPTIM_CACHE_DIR", str(tmp_path_factory.mktemp("calibration")))
        yield
