"""What starts quickly imports little."""

import subprocess
import sys

import pytest

import dpoptim

HEAVY = ("torch", "numpy", "scipy", "sklearn", "dp_accounting", "matplotlib")


@pytest.mark.parametrize(
    "code",
    [
        "import dpoptim",
        "import dpoptim.cli",
        "import dpoptim.registry; dpoptim.registry.method_names()",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    check = f"{code}\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_the_version_is_told_without_the_commands() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "dpoptim", "--version"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.startswith("dpoptim ")
    assert "typer" not in told.stderr
    assert "rich" not in told.stderr


def test_names_that_are_shown_are_public() -> None:
    """A notebook's completion offered ast, sys and Any."""
    shown = {name for name in dir(dpoptim) if not name.startswith("__")}
    assert shown == set(dpoptim.__all__) - {"__version__"}
