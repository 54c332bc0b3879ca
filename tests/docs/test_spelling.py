"""Common misspellings, in whatever people read: documents, examples, docstrings and messages."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
READ = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs", "examples", "src")
NAMES = "bu,fpr"  # an author; false positive rate


def test_words_are_spelled_right() -> None:
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words-list", NAMES]
    found = subprocess.run(
        [*command, "--skip", "*.svg,*.png,*.pyc", *READ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
