"""Slices of the tables of Das et al. 2023 and Fang et al. 2023, made again."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from committed import columns, fashion, rows_of
from dpoptim.data import FASHION_MNIST_DIRECTORY
from dpoptim.methods import DPSGD
from dpoptim.methods.low_quantile import private_low_quantile
from dpoptim.reproduce import (
    das_baselines,
    das_networks,
    das_published,
    das_tables,
    fang,
    fang_budgets,
    fang_synthetic,
    one_pass,
)
from dpoptim.reproduce.real_cases import fashion as fashion_case
from dpoptim.reproduce.real_cases import lipschitz_constants


def test_das_tables_quote_the_paper_and_hold_every_cell() -> None:
    for name, key in (
        ("fashion_mnist", "Fashion-MNIST"),
        ("emotion", "emotion"),
        ("emoji", "emoji"),
    ):
        rows = rows_of(f"das_{name}.csv")
        assert columns(das_tables.Row) == set(rows[0])
        for row in rows:
            printed = das_published.SOFTMAX[key].get(row["clipped_at"], (math.nan,) * 3)
            index = das_published.EPSILONS.index(float(row["epsilon"]))
            assert float(row["paper"]) == pytest.approx(printed[index], nan_ok=True)
            assert row["data"] == key
    rows = rows_of("das_baselines.csv")
    assert columns(das_baselines.Row) == set(rows[0])
    assert {row["data"]: float(row["paper"]) for row in rows}.items() <= (
        das_published.SOFTMAX_WITHOUT_PRIVACY.items()
    )
    rows = rows_of("das_networks.csv")
    assert columns(das_networks.Row) == set(rows[0])
    assert [(float(row["clip_norm"]), float(row["epsilon"])) for row in rows] == [
        (norm, epsilon) for epsilon in das_published.EPSILONS for norm in das_networks.CLIP_NORMS
    ] + [(math.inf, math.inf)]


@fashion
@pytest.mark.figures
def test_clip_norms_of_das_table_6_and_a_cell_of_it() -> None:
    """The percentiles, the private choice, and one seed of three at the smallest constant."""
    case = replace(fashion_case(Path(FASHION_MNIST_DIRECTORY)), l2=0.0)
    constants = lipschitz_constants(case.model, case.x)
    known = {row["clipped_at"]: row for row in rows_of("das_fashion_mnist.csv")[:9]}
    for percent in das_tables.PERCENTILES:
        norm = float(torch.quantile(constants, percent / 100))
        assert norm == pytest.approx(float(known[f"{percent} %"]["clip_norm"]), rel=1e-4)
    found, _ = private_low_quantile(
        *(constants, das_tables.SEARCH_QUANTILE),
        epsilon=das_tables.SEARCH_EPSILON,
        low=0.1,
        high=100.0,
        noise_seed=1,
    )
    assert found == pytest.approx(float(known[das_published.PRIVATE]["clip_norm"]))
    row = known["0 %"]
    norm, rate, epsilon = (float(row[k]) for k in ("clip_norm", "learning_rate", "epsilon"))
    recipe = das_tables.Recipe((norm * rate,), das_tables.smooth_pixels(28, cutoff=16.0))
    made, _ = das_tables.measured(case, recipe, "0 %", norm, epsilon, epsilon, 1)
    assert made.accuracy == pytest.approx(float(row["accuracy"]), abs=0.8)


@fashion
@pytest.mark.figures
def test_a_seed_without_privacy() -> None:
    case = replace(fashion_case(Path(FASHION_MNIST_DIRECTORY)), l2=0.0)
    (row,) = (row for row in rows_of("das_baselines.csv") if row["data"] == case.name)
    accuracy = case.accuracy(das_baselines.trained(case, 1, float(row["learning_rate"])))
    assert accuracy == pytest.approx(float(row["accuracy"]), abs=0.3)


@fashion
@pytest.mark.figures
def test_a_network_at_one_clip_norm() -> None:
    """One seed of three of the cell at epsilon 4 and clip norm 3."""
    scaled = [(x * one_pass.SCALE, y) for x, y in one_pass.load_split(FASHION_MNIST_DIRECTORY)]
    training, _, test = scaled
    (row,) = (
        row
        for row in rows_of("das_networks.csv")
        if (row["clip_norm"], row["epsilon"]) == ("3.0", "4.0")
    )
    plan = das_networks.plan_of(3.0, 4.0, len(training[0]))
    found = das_networks.train(plan, training, float(row["learning_rate"]), 1, test)
    assert found == pytest.approx(float(row["accuracy"]), abs=0.01)


@fashion
@pytest.mark.slow
def test_an_epoch_of_the_share_that_is_clipped() -> None:
    """The first epoch of the first line, without noise."""
    training, _, _ = one_pass.load_split(FASHION_MNIST_DIRECTORY)
    method = DPSGD(fang.PrivateQuantile.monitor(0.3))
    plan = method.plan(
        n=len(training[0]), batch_size=fang.BATCH, epochs=1, noise_multiplier=0.0, delta=1e-5
    )
    clipped = 1 - np.mean(fang.monitored(plan, training, "linear", 0.3))
    assert clipped == pytest.approx(float(rows_of("fang_fig1.csv")[0]["clipped"]), abs=0.01)


def test_an_epoch_on_made_up_data() -> None:
    """The first of the second clip norm, by both methods; one seed of three."""
    centres = fang_synthetic.made_up(fang_synthetic.RECORDS, fang_synthetic.FEATURES)
    steps = round(fang_synthetic.RECORDS / fang_synthetic.BATCH)
    rows = rows_of("fang_fig4.csv")
    assert columns(fang_synthetic.Evolution) == set(rows[0])
    assert len(rows) == 2 * len(fang_synthetic.CLIP_NORMS) * fang_synthetic.EPOCHS
    for row in rows:
        if (row["clip_norm"], row["epoch"]) != ("17.0", "1"):
            continue
        plan = fang_synthetic.METHODS[row["method"]](17.0).plan(
            n=len(centres),
            batch_size=fang_synthetic.BATCH,
            steps=steps,
            noise_multiplier=fang_synthetic.NOISE,
            delta=1e-5,
        )
        excess, (clipped,) = fang_synthetic.descend(
            plan, centres, fang_synthetic.RATE, 1, every=steps
        )
        assert excess[-1] == pytest.approx(float(row["excess"]), rel=0.05)
        assert clipped == pytest.approx(float(row["clipped"]), abs=0.02)


def test_the_settings_of_fangs_theorem() -> None:
    """The fewest steps; one seed of three."""
    rows = rows_of("fang_theorem.csv")
    assert columns(fang_synthetic.Bound) == set(rows[0])
    found = fang_synthetic.bound(0.05, None, 1)
    known = rows[0]
    for name in ("steps", "clip_norm", "learning_rate", "clipped", "order"):
        assert getattr(found, name) == pytest.approx(float(known[name]), rel=1e-3)
    assert found.excess == pytest.approx(float(known["excess"]), rel=0.3)


def test_other_budgets_hold_every_cell() -> None:
    rows = rows_of("fang_fig5.csv")
    assert columns(fang_budgets.Score) == set(rows[0])
    assert [(float(row["epsilon"]), float(row["delta"]), row["method"]) for row in rows] == [
        (*pair, method) for pair in fang_budgets.BUDGETS for method in fang_budgets.METHODS
    ]


@fashion
@pytest.mark.figures
def test_other_budgets() -> None:
    """One seed of three of the first line."""
    (x, y), _, test = one_pass.load_split(FASHION_MNIST_DIRECTORY)
    row = rows_of("fang_fig5.csv")[0]
    plan = fang.methods(1.0)[row["method"]].plan(
        n=fang_budgets.RECORDS,
        batch_size=fang_budgets.BATCH,
        epochs=fang_budgets.EPOCHS,
        epsilon=float(row["epsilon"]),
        delta=float(row["delta"]),
    )
    training = x[: fang_budgets.RECORDS], y[: fang_budgets.RECORDS]
    score = fang.run(plan, "linear", training, float(row["learning_rate"]), 1, test)
    assert score == pytest.approx(float(row["accuracy"]), abs=0.03)


def test_a_line_for_each_model_and_method_of_value_clipping() -> None:
    rows = rows_of("fang_fig2.csv")
    assert columns(fang.Score) == set(rows[0])
    assert [(row["model"], row["method"]) for row in rows] == [
        (model, method) for model in fang.MODELS for method in fang.methods(1.0)
    ]


@fashion
@pytest.mark.figures
def test_value_clipping_on_a_linear_model() -> None:
    """One seed of three, and a tenth of the steps, on the first line that has value clipping."""
    training, _, test = one_pass.load_split(FASHION_MNIST_DIRECTORY)
    row = rows_of("fang_fig2.csv")[1]
    method = fang.methods(float(row["clip_norm"]))[row["method"]]
    whole = {"n": len(training[0]), "batch_size": 4 * fang.BATCH, "delta": fang.DELTA}
    noise = method.plan(**whole, epochs=fang.EPOCHS, epsilon=fang.EPSILON).noise_multiplier
    plan = method.plan(**whole, steps=50, noise_multiplier=noise)
    step = float(row["learning_rate"]) * float(row["clip_norm"])
    score = fang.run(plan, row["model"], training, step, 1, test)
    assert score == pytest.approx(float(row["accuracy"]), abs=0.08)
