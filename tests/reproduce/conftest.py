from collections.abc import Callable
from types import ModuleType

import pytest

from committed import BENCHMARKS


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A benchmark, as a module."""
    from importlib import import_module

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module
