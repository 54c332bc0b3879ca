"""The table of the papers has no empty cell, and names nothing that is not there."""

import math
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import dpoptim
from dpoptim.cli import app
from dpoptim.estimators import DPLogisticRegression, DPSGDClassifier
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


def test_the_tables_are_tables() -> None:
    _, methods, _, others = table().split("\n\n")
    assert len(methods.splitlines() + others.splitlines()) == len(ITEMS) + 4
    for each in (methods, others):
        assert len({line.count("|") for line in each.splitlines()}) == 1


CELLS = sorted({tuple(item.row()[2:5]) for item in ITEMS if item.method and not item.elsewhere})
SOME = {"epsilon": 50.0, "delta": 1e-5}


def code(cell: str) -> str:
    return cell.partition("`")[2].partition("`")[0]


@pytest.mark.set_aside(
    "--method proximal-point", "--method accelerated-srgd", "--method adaptive-gd"
)
@pytest.mark.parametrize("cells", CELLS, ids=lambda cells: code(cells[2]))
@pytest.mark.filterwarnings("ignore:DiceSGD.accounting='paper'")
def test_methods_are_reached_as_the_table_says(cells: tuple[str, str, str], tmp_path: Path) -> None:
    """Written as its cells are: the method, an estimator that fits, a run by the same method."""
    attached, trained, line = map(code, cells)
    names = {name: getattr(dpoptim, name) for name in dpoptim.__all__} | {"dpoptim": dpoptim}
    made = eval(attached, names)
    x = np.random.default_rng(0).uniform(-1, 1, (2_000, 2))
    estimators = {each.__name__: each for each in (DPLogisticRegression, DPSGDClassifier)}
    model = eval(trained, names | estimators)
    if "batch_size" in model.get_params():
        model.set_params(batch_size=400, epochs=2)
    fitted = model.set_params(**SOME, classes=[False, True], noise_seed=0).fit(x, x[:, 0] > 0)
    assert fitted.privacy_.epsilon <= SOME["epsilon"]
    options = ["--data", "digits", "--neighboring", "zero-out", "--epsilon", "50", "--no-compare"]
    if isinstance(made, dpoptim.methods.TrainingMethod):
        options += ["--epochs", "1", "--batch-size", "200"]
    done = CliRunner().invoke(app, ["train", *line.split(), *options, "--out", str(tmp_path / "a")])
    assert done.exit_code == 0, done.output
    if isinstance(made, dpoptim.methods.TrainingMethod):
        (said,) = [row for row in done.output.splitlines() if row.startswith(type(made).__name__)]
        assert eval(said, names | {"inf": math.inf}) == made
