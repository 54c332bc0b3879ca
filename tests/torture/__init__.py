"""Trials that try to break files, processes and memory: ``make torture`` (minutes), a slice of it
in the tests.

Each trial prints its seed and counts what happened: clear errors, tracebacks, hangs, and meanings
that changed without a word. `mutations.TARGETS` is where a further kind of file is registered.
"""
