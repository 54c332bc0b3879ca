"""`make test` runs some combinations of a ``thinned`` test's parameters, with each value; what is
listed as slow is there.
"""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slow_tests import LIST, keep_some, set_aside, thin


class Case:
    def __init__(self, ids: tuple[str, ...], *arguments: Any, **named: Any) -> None:
        self.callspec = SimpleNamespace(_idlist=ids, id="-".join(ids))
        self.mark, self.marks = SimpleNamespace(args=arguments, kwargs=named), list[str]()

    def get_closest_marker(self, name: str) -> Any:
        return self.mark

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


def cases(*sizes: int, every: int) -> list[Any]:
    return [Case(ids, every) for ids in product(*(map(str, range(size)) for size in sizes))]


def kept(cases: list[Any]) -> list[str]:
    assert all(case.marks in ([], ["variants"]) for case in cases)
    return [case.callspec.id for case in cases if not case.marks]


@pytest.mark.parametrize(("sizes", "every"), [((3, 4), 2), ((5, 2), 2), ((3, 3, 4), 3)])
def test_each_value_stays_in_some(sizes: tuple[int, ...], every: int) -> None:
    given = cases(*sizes, every=every)
    thin("test_it", given, whole=True)
    stays = [name.split("-") for name in kept(given)]
    assert len(stays) <= len(given) / every + 1
    assert [len({*values}) for values in zip(*stays, strict=True)] == [*sizes]


def test_where_a_value_would_be_left_out_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="test_it: thinned leaves out"):
        thin("test_it", cases(4, every=2), whole=True)
    thin("test_it", cases(1, every=2), whole=False)  # one that was asked for by its name


@pytest.mark.parametrize(("first", "names"), [(0, ["0", "3"]), (1, ["1", "4"]), (5, ["2"])])
def test_one_in_so_many_stays(first: int, names: list[str]) -> None:
    given = [Case((str(number),), 3, first=first) for number in range(5)]
    keep_some("test_it", given, whole=True)
    assert kept(given) == names


def test_cases_are_set_aside_by_their_names() -> None:
    given = [Case((name,), "b", "c") for name in "abc"]
    set_aside("test_it", given, whole=True)
    assert kept(given) == ["a"]
    with pytest.raises(pytest.UsageError, match="test_it: set_aside names no case: d"):
        set_aside("test_it", [Case((name,), "b", "d") for name in "abc"], whole=True)
    set_aside("test_it", [Case(("a",), "b")], whole=False)  # one that was asked for by its name


def test_the_list_of_slow_tests_names_tests() -> None:
    names = [name.split("::") for name in LIST.read_text().split()]
    root = Path(__file__).parents[1]
    files = {file: (root / file).read_text() for file in {file for file, *_ in names}}
    assert [test for file, *_, test in names if f"def {test}(" not in files[file]] == []
