"""The command line: ``dpoptim``, and as a module ``python -m dpoptim``."""

import sys

from dpoptim.version import __version__


def main() -> None:
    """Run a command; the version is told without loading what commands need."""
    if sys.argv[1:] == ["--version"]:
        print(f"dpoptim {__version__}")
        return
    from dpoptim.cli import app
    from dpoptim.runtime.freed_memory import keep_freed_memory

    keep_freed_memory()
    app()


if __name__ == "__main__":
    main()
