"""The table of the papers has no empty cell, and names nothing that is not there."""

from importlib import import_module

import pytest

from dpoptim.registry import BUILT_IN
from dpoptim.reproduce.experiments import EXPERIMENTS
from dpoptim.reproduce.papers import ITEMS, Item, table


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"{item.paper}, {item.name}, {item.about}")
def test_every_cell_says_something(item: Item) -> None:
    assert all(cell.strip() and "|" not in cell for cell in item.row())


@pytest.mark.parametrize("name", sorted({item.theory for item in ITEMS if item.theory}))
def test_a_function_that_computes_a_theorem_is_there(name: str) -> None:
    module, _, function = f"dpoptim.{name}".rpartition(".")
    assert callable(getattr(import_module(module), function))


def test_every_experiment_and_method_belongs_to_a_paper_or_to_none() -> None:
    extra = {"dice-residual"}  # ours, about the paper's R
    assert {item.experiment for item in ITEMS if item.experiment} == set(EXPERIMENTS) - extra
    ours = {"dp-ftrl", "momentum-gd", "sparse-sgd", "sufficient-statistics"}  # of other papers
    assert {item.method for item in ITEMS if item.method} == set(BUILT_IN) - ours


@pytest.mark.parametrize(
    "item", [item for item in ITEMS if item.experiment in ("kl-rates", "kl-real")]
)
def test_an_experiment_runs_what_it_is_named_for(item: Item) -> None:
    name = item.method or str(item.theory).rpartition(".")[2]
    module = import_module(f"dpoptim.reproduce.{item.experiment.replace('-', '_')}")
    assert hasattr(module, name.replace("-", "_"))


def test_what_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="experiment="):
        Item("", "Table 1", "", experiment="no-such").row()
    with pytest.raises(ValueError, match="method="):
        Item("", "Algorithm 1", "", method="no-such").row()


def test_the_table_is_a_table() -> None:
    lines = table().splitlines()
    assert len(lines) == len(ITEMS) + 2
    assert len({line.count("|") for line in lines}) == 1
