"""No function of the library takes more than 14 decisions, and no file more than a head holds."""

import ast
from collections.abc import Iterator
from pathlib import Path

import dpoptim

SOURCE = Path(dpoptim.__file__).parent
MOST_DECISIONS, MOST_LINES = 14, 350
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Assert, ast.comprehension)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def decisions(function: Function) -> int:
    """McCabe's number as radon counts it: one more than the places where the flow may fork. What
    is defined inside counts by itself.
    """
    return 1 + sum(forks(node) for node in own_nodes(function))


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function):
            yield child
            yield from own_nodes(child)


def forks(node: ast.AST) -> int:
    if isinstance(node, BRANCHES):
        loop_else = isinstance(node, ast.For | ast.While) and bool(node.orelse)
        return 1 + len(getattr(node, "ifs", [])) + loop_else
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.Match):
        return sum(not is_wildcard(case) for case in node.cases)
    return 0


def is_wildcard(case: ast.match_case) -> bool:
    return isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def test_no_function_is_a_maze() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {function.name}": decisions(function)
        for path in SOURCE.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, Function)
    }
    assert max(found.values()) > 10  # the count counts
    assert {name: count for name, count in found.items() if count > MOST_DECISIONS} == {}


def test_no_file_is_longer_than_a_head_holds() -> None:
    lengths = {
        str(path.relative_to(SOURCE)): len(path.read_text().splitlines())
        for path in SOURCE.rglob("*.py")
    }
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}
