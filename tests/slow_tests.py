"""Which tests are slow: all but the cheapest that take half a minute together, in processor time.

``pytest -n auto --list-slow`` measures every test and writes ``slow_tests.txt``; tests named there
have the mark ``slow``, beside those that have it in their own file, and those that ``make test``
leaves out.
"""

import os
import sys
from collections.abc import Iterator
from itertools import compress
from operator import getitem
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("slow_tests.txt")
LEFT_OUT = ("figures", "variants")  # of `make test`, so of `make check`
QUICK_SECONDS = 25.0
_costs: dict[str, float] = {}
_started = pytest.StashKey[float]()


def processor_seconds() -> float:
    """Of this process, of the children that it has waited for, and of ranks."""
    used = os.times()
    own = used.user + used.system + used.children_user + used.children_system
    return own + (sys.modules["ranks"].spent[0] if "ranks" in sys.modules else 0.0)


def name_of(nodeid: str) -> str:
    """The test function, whatever its parameters."""
    return nodeid.split("[", maxsplit=1)[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--list-slow", action="store_true", help=f"measure, and write {LIST.name}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = set(LIST.read_text().split()) if LIST.exists() else set()
    functions: dict[str, list[pytest.Item]] = {}
    whole = not any("::" in given for given in config.args)
    for item in items:
        if any(map(item.get_closest_marker, FEWER)):
            functions.setdefault(name_of(item.nodeid), []).append(item)
    for function, cases in functions.items():
        for mark, fewer in FEWER.items():
            if cases[0].get_closest_marker(mark):
                fewer(function, cases, whole=whole)
    for item in items:
        if name_of(item.nodeid) in slow or any(map(item.get_closest_marker, LEFT_OUT)):
            item.add_marker("slow")


def thin(function: str, cases: list[pytest.Item], *, whole: bool) -> None:
    """Mark as ``variants`` all but one in so many of a ``thinned`` function's combinations.

    Each value of each of its parameters stays in some, which is an error where it cannot be.
    """
    ids = [case.callspec._idlist for case in cases]  # type: ignore[attr-defined]
    numbers = [
        {value: i for i, value in enumerate(dict.fromkeys(each))} for each in zip(*ids, strict=True)
    ]
    every = cases[0].get_closest_marker("thinned").args[0]
    kept = [sum(map(getitem, numbers, each)) % every == 0 for each in ids]
    for case, stays in zip(cases, kept, strict=True):
        if not stays:
            case.add_marker("variants")
    left = [{*compress(each, kept)} for each in zip(*ids, strict=True)]
    if whole and left != [each.keys() for each in numbers]:
        raise pytest.UsageError(f"{function}: thinned leaves out a parameter's value")


def keep_some(function: str, cases: list[pytest.Item], *, whole: bool) -> None:
    """Mark as ``variants`` all but one in so many cases, those from the ``first`` on."""
    mark = cases[0].get_closest_marker("one_in")
    every, first = mark.args[0], mark.kwargs.get("first", 0)
    for number, case in enumerate(cases):
        if number % every != first % every:
            case.add_marker("variants")


def set_aside(function: str, cases: list[pytest.Item], *, whole: bool) -> None:
    """Mark as ``variants`` the cases of these ids, which is an error where there is none."""
    names = set(cases[0].get_closest_marker("set_aside").args)
    for case in cases:
        if case.callspec.id in names:  # type: ignore[attr-defined]
            case.add_marker("variants")
    unknown = names - {case.callspec.id for case in cases}  # type: ignore[attr-defined]
    if whole and unknown:
        raise pytest.UsageError(f"{function}: set_aside names no case: {', '.join(unknown)}")


FEWER = {"thinned": thin, "one_in": keep_some, "set_aside": set_aside}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_started] = processor_seconds()
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    cost = processor_seconds() - item.stash[_started]
    item.user_properties.append(("processor seconds", cost))
    yield


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        cost = dict(report.user_properties).get("processor seconds", 0.0)
        name = name_of(report.nodeid)
        _costs[name] = _costs.get(name, 0.0) + float(str(cost))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--list-slow") or hasattr(session.config, "workerinput"):
        return
    total, slow = 0.0, []
    for name, cost in sorted(_costs.items(), key=lambda pair: pair[1]):
        total += cost
        if total > QUICK_SECONDS:
            slow.append(name)
    LIST.write_text("\n".join(sorted(slow)) + "\n")
