"""`make test` runs some combinations of a ``thinned`` test's parameters, with each value; what is
listed as slow is there.
"""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slow_tests import LIST, thin


class Case:
    def __init__(self, ids: tuple[str, ...], every: int) -> None:
        self.callspec, self.every, self.marks = SimpleNamespace(_idlist=ids), every, list[str]()

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(args=(self.every,))

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


def cases(*sizes: int, every: int) -> list[Any]:
    return [Case(ids, every) for ids in product(*(map(str, range(size)) for size in sizes))]


@pytest.mark.parametrize(("sizes", "every"), [((3, 4), 2), ((5, 2), 2), ((3, 3, 4), 3)])
def test_each_value_stays_in_some(sizes: tuple[int, ...], every: int) -> None:
    given = cases(*sizes, every=every)
    thin("test_it", given, whole=True)
    kept = [case.callspec._idlist for case in given if not case.marks]
    assert len(kept) <= len(given) / every + 1
    assert [len({*values}) for values in zip(*kept, strict=True)] == [*sizes]
    assert all(case.marks in ([], ["variants"]) for case in given)


def test_where_a_value_would_be_left_out_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="test_it: thinned leaves out"):
        thin("test_it", cases(4, every=2), whole=True)
    thin("test_it", cases(1, every=2), whole=False)  # one that was asked for by its name


def test_the_list_of_slow_tests_names_tests() -> None:
    names = [name.split("::") for name in LIST.read_text().split()]
    root = Path(__file__).parents[1]
    files = {file: (root / file).read_text() for file in {file for file, *_ in names}}
    assert [test for file, *_, test in names if f"def {test}(" not in files[file]] == []
