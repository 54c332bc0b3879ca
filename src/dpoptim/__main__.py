"""The command line as a module: ``python -m dpoptim``."""

from dpoptim.cli import app

app()
