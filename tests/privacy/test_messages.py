"""No message says anything of the records: the rule of `dpoptim.errors`, over every message of the
package.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.errors import quoted as quoted_text
from dpoptim.estimators import DPLinearRegression, DPLogisticRegression, DPSGDClassifier
from dpoptim.methods.low_quantile import private_low_quantile

SOURCE = Path(dpoptim.__file__).parent
# Public by what they are: reproductions and audits run on made-up or public data, theory and the
# command line on settings; a file's reader speaks to its owner, before anything is released.
PUBLIC = ("reproduce/", "audit/", "theory/", "cli.py", "data/", "accounting/", "noise/")
SIZES = {"shape", "item", "tolist", "size", "numel", "sum", "mean", "unique"}
FUNCTIONS = {"len", "int", "float", "max", "min", "sum"}
# What looks like a figure computed from records, and is none, with the reason.
ALLOWED = {
    ("estimators/table.py", "len(found)"): "of classes, which are public or said to be taken as "
    "public",
    ("gradients/layers/fallback.py", "len(tensors)"): "inputs of a module",
    ("runs/interrupted.py", "error.strerror"): "of the operating system, about the disk",
    ("methods/low_quantile.py", "len(numbers)"): "n is public under the relations that it takes",
    ("opacus_words.py", "error"): "of names of arguments, by Python",
    ("plan/plan.py", "error"): "of a plan's text",
    ("plan/plan.py", "min(1e-05, 10.0 ** (-math.ceil(math.log10(n) + 1)))"): "n of the plan",
    ("registry.py", "error"): "of an entry point",
    ("runs/command.py", "error"): "of a public hold-out or of the settings",
    ("runs/predict.py", "error"): "of new records, by whoever has them",
    ("runs/saved_model.py", "error"): "of the file system",
    ("runs/verify.py", "error"): "of the text of a plan or certificate, which are public",
    ("solvers/objective.py", "[len(part) for part in data]"): "n is public under the relations "
    "that it takes",
    ("solvers/releases.py", "tuple(w0.shape)"): "a starting point",
    (
        "solvers/accelerated_srgd.py",
        "[len(part) for part in data]",
    ): "n is public under the relations that it takes",
    ("training/trials/check.py", "len(records)"): "of the batch that the caller made up",
    (
        "training/trials/loss_refusals.py",
        "tuple(losses.shape)",
    ): "of the batch that the caller made up",
    ("training/trials/alone.py", "error"): "our own words on made-up records",
    ("training/trials/comparison.py", "error"): "our own words on the model",
    (
        "training/trials/loss_trials.py",
        "error",
    ): "our own words on where records meet, of made-up and of a public number of records",
    (
        "training/prepared.py",
        "error",
    ): "our own words on where records meet",
    ("training/refusals.py", "len(missing) - 1"): "of parameters",
}


def is_figure(expression: ast.expr) -> bool:
    if re.fullmatch(r"type\(\w+\)\.__name__", ast.unparse(expression)):
        return False
    for node in ast.walk(expression):
        if isinstance(node, ast.Attribute) and node.attr in SIZES:
            return True
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in FUNCTIONS
        ):
            return True
        if isinstance(node, ast.Name) and node.id in ("error", "exc", "rows"):
            return not quoted(expression)
    return False


def quoted(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Call) and ast.unparse(expression.func) == "quoted"


def figures(text: str) -> Iterator[str]:
    """What the messages of a file compute and print: in errors that are raised or made, and in
    warnings.
    """
    for node in ast.walk(ast.parse(text)):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Raise) or called.endswith(("Error", "Warning", "warn", "refusal")):
            for part in ast.walk(node):
                if isinstance(part, ast.FormattedValue) and is_figure(part.value):
                    yield ast.unparse(part.value)


def test_no_message_prints_a_figure_that_was_computed_from_records() -> None:
    found = {
        (name, figure)
        for path in SOURCE.rglob("*.py")
        if not (name := str(path.relative_to(SOURCE))).startswith(PUBLIC)
        for figure in figures(path.read_text())
    }
    surplus = sorted(found - ALLOWED.keys())
    assert not surplus, f"messages may not print these, or ALLOWED must say why they may: {surplus}"


def test_the_search_finds_what_it_looks_for() -> None:
    lines = [
        'raise ValueError(f"{len(unknown)} labels are wrong")',
        'raise PrivacyError(f"got shape {tuple(losses.shape)}")',
        'raise PrivacyError(f"it failed: {error}") from error',
        'warnings.warn(f"a batch of {rows} rows")',
    ]
    assert all(list(figures(line)) for line in lines)
    assert not list(figures('raise PrivacyError(f"it failed: {quoted(error)}") from None'))


def attached(model: nn.Module, rows: int, feed: Callable[[Any], Any], method: Any = None) -> None:
    """One step of a private run on ``rows`` records, all of them in the batch."""
    plan = (method or dpoptim.DPSGD(1.0)).plan(
        n=100, batch_size=100, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(rows, 4), torch.zeros(rows))
    with dpoptim.attach(
        plan, model, optimizer, data, loss_reduction="sum", noise_seed=0
    ) as private:
        for x, _ in private.batches():
            feed((private, model, x))
            optimizer.step()


def few_losses(parts: Any) -> None:
    private, model, x = parts
    private.backward(model(x).square().expand(-1, 2))  # not one number for each record


def flat(parts: Any) -> None:
    _, model, x = parts
    model(x.flatten()[:4]).sum().backward()


def table_of(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 4)), rng.integers(0, 3, rows)


FAILURES: dict[str, Callable[[int], Any]] = {
    "losses of the wrong shape": lambda rows: attached(
        nn.Sequential(nn.Linear(4, 1)), rows, few_losses, dpoptim.ValueClippedSGD(1.0)
    ),
    "an input without a record axis": lambda rows: attached(
        nn.Sequential(nn.Linear(4, 1)), rows, flat
    ),
    "rows that were not delivered": lambda rows: attached(
        nn.Sequential(nn.Linear(4, 1)),
        rows,
        lambda p: p[1](torch.cat([p[2], p[2]])).sum().backward(),
    ),
    "labels outside the classes": lambda rows: DPLogisticRegression(classes=[0, 1]).fit(
        *table_of(rows)
    ),
    "labels outside the classes of a network": lambda rows: DPSGDClassifier(
        classes=[0, 1], n=100, neighboring="add-or-remove-one"
    ).fit(*table_of(rows)),
    "unequal lengths": lambda rows: DPLinearRegression(target_bound=1.0).fit(
        table_of(rows)[0], table_of(rows)[1][1:]
    ),
    "a quantile of two columns": lambda rows: private_low_quantile(
        np.ones((rows, 2)), 0.5, epsilon=1.0, low=0.1, high=10
    ),
    "token losses of one axis": lambda rows: dpoptim.losses.per_sample_mean(torch.ones(rows), None),
    "a mask of another shape": lambda rows: dpoptim.losses.per_sample_mean(
        torch.ones(rows, 3), torch.ones(rows, 2)
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_messages_are_the_same_on_other_records(failure: str) -> None:
    """Replay of the errors that private values reach: the same text whatever the number of records
    is.
    """
    said = []
    for rows in (61, 79):
        with pytest.raises((ValueError, dpoptim.PrivacyError, RuntimeError)) as caught:
            FAILURES[failure](rows)
        said.append(str(caught.value))
        assert not re.search(rf"\b{rows}\b|\b{2 * rows}\b", said[-1])
        assert caught.value.__cause__ is None
    assert said[0] == said[1]


def test_errors_of_others_are_quoted_without_their_numbers() -> None:
    error = RuntimeError("The size of tensor a (61) must match 0.25 of b\nat line 7")
    assert quoted_text(error) == "The size of tensor a (#) must match # of b"
    assert quoted_text(RuntimeError()) == ""
