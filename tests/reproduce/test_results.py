"""Each committed table names the command that makes it again, and a cheap slice of each is made
again here: figures where they are cheap and seeded, else the rows and columns that the command
would write (times belong to the machine that they were taken on). Those of the papers and of
accuracies are beside this file.
"""

from collections.abc import Callable
from itertools import product
from types import ModuleType

import numpy as np
import pytest
import torch

from committed import BENCHMARKS, RESULTS, rows_of
from dpoptim.reproduce import (
    fang,
)


def test_every_table_has_a_command_that_is_there(bench: Callable[[str], ModuleType]) -> None:
    from dpoptim.reproduce.experiments import EXPERIMENTS

    commands = bench("remake").COMMANDS
    assert set(commands) == {path.name for path in RESULTS.glob("*.csv")}
    for command in commands.values():
        words = command.split()
        if words[0] == "dpoptim":
            assert words[2] in EXPERIMENTS
        else:
            assert (BENCHMARKS.parent / words[1]).is_file()
        assert "{out}" in command


@pytest.mark.figures
def test_correlated_errors(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench("correlated_errors")
    known = {(row["passes"], row["strategy"]): row for row in rows_of("correlated_errors.csv")}
    monkeypatch.setattr(made, "PASSES", (16,))
    for row in made.against_the_optimum(256):
        ours = known[str(row["passes"]), str(row["strategy"])]
        assert row["over the optimum"] == pytest.approx(float(ours["over the optimum"]), abs=2e-3)
    monkeypatch.setattr(made, "CELLS", [(10, 2.0)])
    monkeypatch.setattr(made, "BANDS", (1, 8))
    (row,) = made.against_dp_sgd()
    (ours,) = (
        each
        for each in rows_of("amplified_errors.csv")
        if (each["epochs"], each["epsilon"]) == ("10", "2.0")
    )
    assert {key: float(value) for key, value in ours.items()} == pytest.approx(row, rel=1e-3)


def test_rows_of_errors_under_decays(bench: Callable[[str], ModuleType]) -> None:
    made, rows = bench("correlated_errors"), rows_of("decay_errors.csv")
    assert [(float(row["momentum"]), row["decay"], int(row["passes"])) for row in rows] == list(
        product(made.MOMENTA, made.DECAYS, made.PASSES)
    )
    fitted = ("fitted to the decay", "fitted to it, four vectors", "fitted to constant rates")
    for row in rows:
        assert 1 <= float(row[fitted[0]]) <= min(float(row[name]) for name in fitted[1:])


@pytest.mark.figures
def test_errors_under_decays(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench("correlated_errors")
    monkeypatch.setattr(made, "PASSES", (16,))
    monkeypatch.setattr(made, "DECAYS", {"warm-up, cosine": made.WARM_UP})
    monkeypatch.setattr(made, "MOMENTA", (0.9,))
    (row,) = made.with_decay(256)
    (ours,) = (
        each
        for each in rows_of("decay_errors.csv")
        if (each["decay"], each["momentum"], each["passes"]) == ("warm-up, cosine", "0.9", "16")
    )
    for name in ("fitted to the decay", "fitted to it, four vectors", "fitted to constant rates"):
        assert float(ours[name]) == pytest.approx(row[name], abs=2e-3)


def test_rows_of_batches_apart(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell is there, in the columns that a small run has."""
    made, rows = bench("min_separation"), rows_of("min_separation.csv")
    assert [(int(row["epochs"]), float(row["epsilon"])) for row in rows] == list(made.CELLS)
    monkeypatch.setattr(made, "N", 240)
    monkeypatch.setattr(made, "BATCH", 60)
    again = made.compared(1, 4.0)
    assert list(again) == list(rows[0])
    for row in (again, *rows):
        assert float(row["b-min-sep"]) > 0
        assert float(row["error over cyclic Poisson"]) > 0


@pytest.mark.figures
def test_errors_on_batches_apart(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bands alone that are best by turns, at the budget of most noise."""
    made = bench("min_separation")
    monkeypatch.setattr(made, "FACTORS", (1,))
    row = made.compared(10, 1.0)
    ours = rows_of("min_separation.csv")[0]
    for name in ("epochs", "epsilon", "bands", "cyclic Poisson"):
        assert float(ours[name]) == pytest.approx(row[name], rel=1e-3)
    for name in ("b-min-sep", "error over cyclic Poisson"):
        assert float(ours[name]) == pytest.approx(row[name], rel=1.5e-2)


def test_the_audit_of_a_peer(bench: Callable[[str], ModuleType]) -> None:
    made = bench("audit_peers")
    torch.manual_seed(0)
    model = made.Plain()
    x = torch.randn(made.RECORDS, 4)
    y = model(x).argmin(1)
    whole, less = (made.dpoptim_sum(model, *part) for part in ((x, y), (x[:-1], y[:-1])))
    (ours,) = (
        row
        for row in rows_of("audit_peers.csv")
        if (row["library"], row["use"]) == ("dpoptim", "plain")
    )
    assert float((whole - less).norm()) == pytest.approx(
        float(ours["moved_in_clip_norms"]), abs=2e-4
    )


def test_steps_of_several_rows(bench: Callable[[str], ModuleType]) -> None:
    """A round of every line of one model."""
    made = bench("several_rows")
    known = [(row["model"], int(row["rows a record"])) for row in rows_of("several_rows.csv")]
    assert known == [(model, rows) for model in made.BATCHES for rows in made.ROWS]
    again = list(made.compared("mlp", 8, 1))
    assert [each["rows a record"] for each in again] == list(made.ROWS)
    assert all(each["ms"] > 0 for each in again)


@pytest.mark.figures
def test_what_planning_takes(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is worked through once, on smaller tables."""
    made = bench("planning")
    monkeypatch.setattr(made, "seconds", lambda work, repeats=1: work(0) or 1.0)
    found, known = list(made.rows(records=2_000, many=3_000)), rows_of("planning.csv")
    assert len(found) == len(known)
    for again, row in zip(found, known, strict=True):
        what = str(again["what"]).replace("2,000 x", f"{made.RECORDS:,} x")
        assert row["what"] == what.replace("3,000 x", f"{made.MANY_RECORDS:,} x")
        assert float(row["seconds"]) > 0


def test_rows_of_what_is_timed(bench: Callable[[str], ModuleType]) -> None:
    """Nothing that a benchmark measures is missing from its table, and nothing else is in it."""

    def named(table: str, *keys: str) -> set[tuple[str, ...]]:
        return {tuple(row[key] for key in keys) for row in rows_of(table)}

    made = bench("convolutions")
    assert named("convolutions.csv", "layer") == {(name,) for name in made.LAYERS}
    made = bench("multiplication")
    assert named("multiplication.csv", "product", "rows", "inner", "columns") == {
        (name, *map(str, shape)) for name, shape in (made.SHAPES | made.RECORDS).items()
    }
    made = bench("error_feedback")
    assert named("error_feedback.csv", "work") == {(name,) for name in made.NAMES}
    assert named("phases.csv", "work") <= {(name,) for name in bench("workloads").WORKLOADS}
    made = bench("growth")
    sizes = {
        axis: [first * 2**i for i in range(made.DOUBLINGS)] for axis, first in made.BASE.items()
    }
    sizes["rows of a table"] = list(made.TABLE_ROWS)
    assert named("growth.csv", "axis", "size") == {
        (axis, str(size)) for axis, each in sizes.items() for size in each
    }
    assert named("mixed_precision.csv", "workload", "variant") == {
        (name, variant)
        for name in ("GPT", "ViT", "ResNet, GroupNorm")
        for variant in ("plain", "ours", "ours, noise")
    }
    made = bench("mixed_precision")
    assert named("mixed_precision_cuda.csv", "workload", "records") == {
        (name, str(records)) for name, (_, batches) in made.LARGE.items() for records in batches
    }
    assert named("mixed_precision_cuda.csv", "variant") <= {(name,) for name in made.VARIANTS}
    made = bench("step_time")
    assert {row["variant"] for row in rows_of("step_time.csv")} == set(made.COLUMNS)
    assert {row["workload"] for row in rows_of("step_time.csv")} == set(made.ROWS)
    assert {row["workers"] for row in rows_of("loader_speed.csv")} == {"0", "2"}
    made = bench("sparse_rows")
    assert named("sparse_rows.csv", "variant") >= {(name,) for name in made.METHODS}
    assert named("sparse_clicks.csv", "method", "epsilon") == {
        (trial.method, str(trial.epsilon or "")) for trial in made.trials()
    }
    assert {(row["model"], row["method"]) for row in rows_of("fang_table2.csv")} >= {
        (model, method) for model in fang.MODELS for method in fang.methods(1.0)
    }


def test_steps_of_many_ranks(bench: Callable[[str], ModuleType]) -> None:
    """Computed from the table of two, which holds every workload."""
    two = rows_of("distributed.csv")
    assert {row["workload"] for row in two} == set(bench("distributed").CHOSEN)
    made = bench("distributed_model")
    again = [line for row in two for line in made.modelled(row)]
    ours = rows_of("distributed_model.csv")
    assert [{name: str(value) for name, value in line.items()} for line in again] == ours


ADAPTIVE = ("adam", "adam_bc")


def test_constants_of_defaults_are_those_that_were_chosen() -> None:
    """Of each estimator the best row is what the library does."""
    from dpoptim.estimators import linear_fit, network_fit, networks, solving

    best: dict[str, dict[str, float]] = {}
    feedback: dict[str, dict[float, float]] = {}  # of networks of no hidden layer and of one
    for row in rows_of("choose_defaults.csv"):
        words = dict(word.split("=") for word in row["setting"].split())
        if "dice-sgd" in row["estimator"]:
            kind, clip_norm = row["estimator"].partition(",")[0], float(words["clip_norm"])
            regrets = feedback.setdefault(kind, {})
            regrets[clip_norm] = regrets.get(clip_norm, 0.0) + float(row["mean_regret"])
            continue
        best.setdefault(row["estimator"], {name: float(value) for name, value in words.items()})
    step = solving.MOMENTUM_STEP
    assert best == {
        "DPLogisticRegression": {
            "clipped_share": linear_fit.MOMENTUM_SHARE,
            "largest_step": step["logistic"],
            "tolerance": solving.TOLERANCE,
        },
        "DPLinearRegression, gradients": {
            "clipped_share": linear_fit.SQUARED_SHARE,
            "largest_step": step["squared"],
            "rate": solving.SQUARED_RATE,
            "steps": solving.SQUARED_STEPS,
        },
        "DPLinearRegression, auto": {"sharp": solving.SHARP},
        "DPSGDClassifier": {
            "rate": network_fit.NetworkFit._rate,
            "clip": network_fit.CLIP,
            "epochs": networks.DPSGDClassifier().epochs,
        },
        "DPSGDRegressor": {
            "rate": networks.DPSGDRegressor._rate,
            "clip_norm": networks.REGRESSION_CLIP,
            "epochs": networks.DPSGDRegressor().epochs,
        },
        **{f"DPSGDClassifier, {name}": {"rate": network_fit.NetworkFit._rate} for name in ADAPTIVE},
        **{f"DPSGDRegressor, {name}": {"rate": networks.DPSGDRegressor._rate} for name in ADAPTIVE},
    }
    assert {kind: min(each, key=lambda c: each[c]) for kind, each in feedback.items()} == {
        "DPSGDClassifier": network_fit.FEEDBACK_CLIP,
        "DPSGDRegressor": networks.REGRESSION_FEEDBACK_CLIP,
    }


def test_lengths_of_weights_are_those_that_were_chosen() -> None:
    from dpoptim.estimators import linear_fit

    best = rows_of("choose_length.csv")[0]
    assert float(best["share"]) == linear_fit.LENGTH_SHARE
    assert float(best["power"]) == linear_fit.LENGTH_POWER


@pytest.mark.figures
def test_rates_of_optimizers(bench: Callable[[str], ModuleType]) -> None:
    """Two runs of the tables that default rates were chosen by, and of the scores with them."""
    chosen = bench("choose_rates")
    again = chosen.run(next(chosen.made_up(True)), "adam", 1.0, 4.0, 0)
    row = next(
        row
        for row in rows_of("choose_rates.csv")
        if all(row[name] == str(again[name]) for name in ("task", "optimizer", "epsilon", "seed"))
        and row["over the rule"] == "1.0"
    )
    assert again["rate"] == row["rate"]
    assert float(again["score"]) == pytest.approx(float(row["score"]), abs=1)
    made = bench("by_optimizer")
    task, estimator, table, _ = next(made.tasks())
    rate, score = made.by_estimator(
        estimator.set_params(epsilon=8.0, method="dice-sgd", optimizer="adam"), table, 0
    )
    (row,) = (
        row
        for row in rows_of("by_optimizer.csv")
        if (row["task"], row["method"], row["optimizer"]) == (task, "dice-sgd", "adam")
        and (row["epsilon"], row["seed"]) == ("8.0", "0")
    )
    assert str(rate) == row["learning_rate"]
    assert 100 * score == pytest.approx(float(row["score"]), abs=2)


def test_plan_ranks(bench: Callable[[str], ModuleType]) -> None:
    """The predictions of one table, without the runs."""
    made = bench("plan_ranks")
    data, kind = next(made.cases())
    target = made.EpsilonAtMost(4.0, min(1e-5, len(data.x) ** -1.1))
    found = [
        (each.run.batch_size, each.run.steps, each.error) for each in made.grid(data, kind, target)
    ]
    ours = [
        (int(row["batch_size"]), int(row["steps"]), float(row["predicted_error"]))
        for row in rows_of("plan_ranks.csv")
        if (row["table"], row["epsilon"]) == ("wine", "4.0")
    ]
    np.testing.assert_allclose(found, ours, rtol=1e-3)


def test_the_small_tables(bench: Callable[[str], ModuleType]) -> None:
    made = bench("tables")
    wine = next(made.tables())
    name, settings = next(made.ours(wine, 4.0))
    score, *_ = made.measured(wine, settings, 3)
    (ours,) = (
        row
        for row in rows_of("tables.csv")
        if (row["table"], row["epsilon"], row["method"]) == ("wine", "4.0", name)
    )
    assert score == pytest.approx(float(ours["score"]), abs=0.1)


def test_search_shares(bench: Callable[[str], ModuleType]) -> None:
    """Nothing is drawn: one line of the table, to its last digit but one."""
    row = next(each for each in rows_of("search_shares.csv") if each["mean_trials"] == "10.0")
    again = bench("search_shares").shares(*(float(row[name]) for name in list(row)[:3]))
    for name, known in row.items():
        assert again[name] == pytest.approx(float(known), abs=2e-4)


def test_evaluation_intervals(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 40 hold-outs of 400, of one line."""
    made = bench("evaluation_intervals")
    monkeypatch.setattr(made, "REPETITIONS", 40)
    monkeypatch.setattr(made, "POPULATION", 500_000)
    rows = rows_of("evaluation_intervals.csv")
    assert min(float(row[name]) for row in rows for name in ("error_held", "r2_held")) > 0.95
    again = made.measured(300, 8.0, 0.02)
    row = next(
        row for row in rows if (row["n"], row["epsilon"], row["far_off"]) == ("300", "8.0", "0.02")
    )
    assert again["r2_held"] > 0.85
    assert again["r2_length"] == pytest.approx(float(row["r2_length"]), rel=0.15)
    assert again["plain_r2_length"] == pytest.approx(float(row["plain_r2_length"]), rel=0.15)


def test_intervals_of_the_auc(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 30 hold-outs of 200, of one line."""
    made = bench("auc_intervals")
    monkeypatch.setattr(made, "REPETITIONS", 30)
    monkeypatch.setattr(made, "POPULATION", 200_000)
    rows = rows_of("auc_intervals.csv")
    assert min(float(row["held"]) for row in rows) > 0.92
    again = made.measured(1_000, 1.0, "1/2")
    row = next(
        row for row in rows if (row["n"], row["epsilon"], row["outcome"]) == ("1000", "1.0", "1/2")
    )
    assert again["held"] > 0.85
    assert again["length"] == pytest.approx(float(row["length"]), rel=0.2)
    assert again["plain_length"] == pytest.approx(float(row["plain_length"]), rel=0.1)


@pytest.mark.figures
def test_a_private_clip_norm_is_scored_again(bench: Callable[[str], ModuleType]) -> None:
    made = bench("private_clip")
    _, x, y = next(made.tables(made.NETWORK_SHAPES, classes=True))
    found = made.of_table(x, y, 4.0, 0.5, made.FOLLOWS)
    (ours,) = (
        float(row["accuracy"])
        for row in rows_of("private_clip.csv")
        if row["data"] == "600 x 12, few" and row["quantile"] == "0.5"
        if row["learning_rate"] == made.FOLLOWS
    )
    assert np.mean(found) == pytest.approx(ours, abs=1.0)


def test_private_searches_have_the_committed_rows(bench: Callable[[str], ModuleType]) -> None:
    made, rows = bench("private_search"), rows_of("private_search.csv")
    tables = [name for name, _, _ in made.tables(made.SHAPES, classes=True)]
    assert [(row["data"], float(row["epsilon"])) for row in rows] == list(
        product(tables, made.EPSILONS)
    )
    for row in rows:
        event = made.search_event(float(row["epsilon"]), made.DELTA, "zero-out", made.TRIALS).event
        assert float(row["mu_of_a_trial"]) == pytest.approx(1 / event.noise_multiplier, abs=1e-3)
