"""Each committed table names the command that makes it again, and a cheap slice of each is made
again here: figures where they are cheap and seeded, else the rows and columns that the command
would write (times belong to the machine that they were taken on).
"""

import csv
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.data import FASHION_MNIST_DIRECTORY
from dpoptim.methods import DPSGD, DiceSGD
from dpoptim.methods.low_quantile import private_low_quantile
from dpoptim.reproduce import (
    das_baselines,
    das_networks,
    das_tables,
    dice_ablations,
    dice_bias,
    dice_cases,
    dice_gpt,
    dice_table,
    dice_texts,
    dice_vit,
    fang,
    fang_budgets,
    fang_synthetic,
    kl_rates,
    kl_real,
    one_pass,
    srgd_rates,
)
from dpoptim.reproduce.real_cases import fashion as fashion_case
from dpoptim.reproduce.text_scores import SCORES
from dpoptim.runs.models import build_model
from dpoptim.solvers.lipschitz import lipschitz_constants

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
Rows = list[dict[str, str]]

fashion = pytest.mark.skipif(
    not Path(FASHION_MNIST_DIRECTORY).is_dir(), reason="Fashion-MNIST is not there"
)


def rows_of(name: str) -> Rows:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A benchmark, as a module."""
    from importlib import import_module

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


def columns(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


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


def test_correlated_errors(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench("correlated_errors")
    known = {(row["passes"], row["strategy"]): row for row in rows_of("correlated_errors.csv")}
    monkeypatch.setattr(made, "PASSES", (16,))
    for row in made.against_the_optimum(256):
        ours = known[str(row["passes"]), str(row["strategy"])]
        assert row["over the optimum"] == pytest.approx(float(ours["over the optimum"]), abs=2e-3)
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
    monkeypatch.setattr(made, "CELLS", [(10, 2.0)])
    monkeypatch.setattr(made, "BANDS", (1, 8))
    (row,) = made.against_dp_sgd()
    (ours,) = (
        each
        for each in rows_of("amplified_errors.csv")
        if (each["epochs"], each["epsilon"]) == ("10", "2.0")
    )
    assert {key: float(value) for key, value in ours.items()} == pytest.approx(row, rel=1e-3)


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


ACCURACIES = [
    path.stem.removeprefix("accuracy_") for path in sorted(RESULTS.glob("accuracy_*.csv"))
]


@pytest.mark.parametrize("name", ACCURACIES)
def test_runs_of_accuracies_are_whole(bench: Callable[[str], ModuleType], name: str) -> None:
    """Each line is a run that trained, under settings that a command can ask for again."""
    table = bench("accuracy").Table(RESULTS / f"accuracy_{name}.csv")
    assert table.rows
    for row in table.rows:
        assert row.learning_rate > 0
        assert all(math.isfinite(score) for score in (row.last, row.fifth, row.half))
        assert row.part == "choice" or row.seed > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCURACIES)
def test_a_run_of_accuracies(bench: Callable[[str], ModuleType], name: str, tmp_path: Path) -> None:
    """The first on digits."""
    made, tasks = bench("accuracy"), bench("accuracy_tasks")
    known = next(
        row
        for row in made.Table(RESULTS / f"accuracy_{name}.csv").rows
        if row.task.startswith("digits")
    )
    model = known.task.removeprefix("digits, ")
    if model == "scattering":
        data = made.load_digits(0, made.WHITENED, tmp_path)
        task = tasks.by_recipe(data, "softmax", "scattering")
    elif model == "cnn, scattering":
        data = made.load_digits(0, made.SCATTERED, tmp_path)
        task = tasks.by_recipe(data, "cnn", "scattering")
    else:
        task = tasks.digits(model)
    assert task.name == known.task
    found = made.run(made.settings(known), task, known.part, known.seed)
    for tail in made.TAILS:
        assert getattr(found, tail) == pytest.approx(getattr(known, tail), abs=1.0)


CNN_SHAPES = {"pixels": (1, 28, 28), "J=1": (9, 14, 14), "J=2": (81, 7, 7)}


def test_what_the_cnn_was_chosen_from(bench: Callable[[str], ModuleType]) -> None:
    made = bench("choose_cnn")
    rows = rows_of("choose_cnn.csv")
    names = columns(made.Trial)
    known = [{name: value for name, value in row.items() if name in names} for row in rows]
    asked = [{name: str(getattr(trial, name)) for name in names} for trial in made.TRIALS]
    assert known == asked
    for trial, row in zip(made.TRIALS, rows, strict=True):
        model = made.build(trial, CNN_SHAPES[trial.features])
        assert sum(parameter.numel() for parameter in model.parameters()) == int(row["weights"])
        assert all(50 < float(row[tail]) < 100 for tail in ("last", "fifth", "half"))


@pytest.mark.parametrize(
    ("features", "network"), [("pixels", "two convolutions"), ("J=2", "1 x 1")]
)
def test_the_cnn_is_as_chosen(
    bench: Callable[[str], ModuleType], features: str, network: str
) -> None:
    made = bench("choose_cnn")
    trial = replace(made.GARMENTS, features=features, network=network, activation="ReLU")
    torch.manual_seed(0)
    chosen = made.build(trial, CNN_SHAPES[features])
    torch.manual_seed(0)
    model = build_model("cnn", CNN_SHAPES[features], 10)
    x = torch.randn(3, *CNN_SHAPES[features])
    torch.testing.assert_close(model[:-1](x), chosen[:-1](x))
    assert repr(model) == repr(chosen)


def test_the_cnn_of_colour_images_is_as_chosen(bench: Callable[[str], ModuleType]) -> None:
    made = bench("choose_scattering")
    assert repr(build_model("cnn", (243, 8, 8), 10)) == repr(made.build(64, (243, 8, 8)))


def test_colour_images_are_made_of_pictures(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    made = bench("colour_images")
    rng = np.random.default_rng(0)
    with pytest.raises(FileNotFoundError, match="give ten or more"):
        made.photographs(tmp_path)
    for i in range(10):
        picture = rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)
        Image.fromarray(picture).save(tmp_path / f"{i}.jpg")
    x, y = made.textures(tmp_path, 30, 0, held_out=False)
    assert x.shape == (30, 3, 32, 32)
    assert set(y) <= set(range(10))
    again, labels = made.textures(tmp_path, 30, 0, held_out=False)
    assert np.array_equal(x, again)
    assert np.array_equal(y, labels)
    assert not np.array_equal(made.textures(tmp_path, 30, 0, held_out=True)[0], x)


@fashion
@pytest.mark.slow
def test_a_run_that_the_cnn_was_chosen_by(bench: Callable[[str], ModuleType]) -> None:
    made = bench("choose_cnn")
    trial = replace(made.GARMENTS, activation="ReLU")
    known = rows_of("choose_cnn.csv")[made.TRIALS.index(trial)]
    found = made.run(trial, Path(FASHION_MNIST_DIRECTORY))
    for tail in ("last", "fifth", "half"):
        assert found[tail] == pytest.approx(float(known[tail]), abs=1.0)


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
    made = bench("step_time")
    assert {row["variant"] for row in rows_of("step_time.csv")} == set(made.COLUMNS)
    assert {row["workload"] for row in rows_of("step_time.csv")} == set(made.WORKLOADS)
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


def test_constants_of_defaults_are_those_that_were_chosen() -> None:
    """Of each estimator the best row is what the library does."""
    from dpoptim.estimators import linear_fit, network_fit, networks, solving

    best: dict[str, dict[str, float]] = {}
    for row in rows_of("choose_defaults.csv"):
        words = dict(word.split("=") for word in row["setting"].split())
        best.setdefault(row["estimator"], {name: float(value) for name, value in words.items()})
    step = solving.MOMENTUM_STEP
    assert best == {
        "DPLogisticRegression": {
            "clipped_share": linear_fit.CLIPPED_SHARE,
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
            "clip_norm": networks.DPSGDClassifier().clip_norm,
            "epochs": networks.DPSGDClassifier().epochs,
        },
        "DPSGDRegressor": {
            "rate": networks.DPSGDRegressor._rate,
            "clip_norm": networks.DPSGDRegressor().clip_norm,
            "epochs": networks.DPSGDRegressor().epochs,
        },
    }


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


def test_das_tables_quote_the_paper_and_hold_every_cell() -> None:
    for name, key in (
        ("fashion_mnist", "Fashion-MNIST"),
        ("emotion", "emotion"),
        ("emoji", "emoji"),
    ):
        rows = rows_of(f"das_{name}.csv")
        assert columns(das_tables.Row) == set(rows[0])
        for row in rows:
            printed = das_tables.PUBLISHED[key].get(row["clipped_at"], (math.nan,) * 3)
            index = das_tables.EPSILONS.index(float(row["epsilon"]))
            assert float(row["paper"]) == pytest.approx(printed[index], nan_ok=True)
            assert row["data"] == key
    rows = rows_of("das_baselines.csv")
    assert columns(das_baselines.Row) == set(rows[0])
    assert {row["data"]: float(row["paper"]) for row in rows}.items() <= (
        das_baselines.PUBLISHED.items()
    )
    rows = rows_of("das_networks.csv")
    assert columns(das_networks.Row) == set(rows[0])
    assert [(float(row["clip_norm"]), float(row["epsilon"])) for row in rows] == [
        (norm, epsilon) for epsilon in das_networks.EPSILONS for norm in das_networks.CLIP_NORMS
    ] + [(math.inf, math.inf)]


@pytest.mark.parametrize("panel", list(dice_ablations.PANELS))
def test_dice_ablations_hold_every_cell_of_their_panel(panel: str) -> None:
    rows = rows_of(f"dice_{panel}.csv")
    first, firsts, second, seconds = dice_ablations.PANELS[panel]
    assert [(float(row[first]), float(row[second])) for row in rows] == [
        (a, b) for a in firsts for b in seconds
    ]
    assert columns(dice_ablations.Cell) == set(rows[0])


def test_where_clipping_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started where the table says that it ends, it stays, but for the swing of a pass."""
    for row in rows_of("dice_bias.csv")[:4]:
        monkeypatch.setattr(dice_bias, "START", float(row["x"]))
        method = dice_bias.methods(0.5)[row["method"]]
        path = dice_bias.descend(method, 2, passes=15)
        assert path[-1] == pytest.approx(float(row["x"]), abs=0.05)


@pytest.mark.parametrize("row", rows_of("dice_table.csv")[:10:3], ids=lambda row: row["method"])
def test_the_dice_table_promises_what_it_says(row: dict[str, str]) -> None:
    clip, feedback = float(row["clip_norm"]), float(row["feedback_clip"])
    if row["method"] == "DP-FTRL" or row["method"] == dice_table.PUBLISHED:
        pytest.skip("its strategy, or its false theorem, is audited elsewhere")
    method = (
        DPSGD(clip)
        if row["method"] == "DP-SGD"
        else DiceSGD(clip, feedback or None, float(row["residual_clip"]))
    )
    plan = method.plan(
        n=50_000,
        batch_size=int(row["batch_size"]),
        epochs=int(row["epochs"]),
        epsilon=float(row["epsilon"]),
        delta=one_pass.DELTA,
        neighboring="zero-out",
    )
    assert compute_epsilon(plan.event, plan.delta, "zero-out").epsilon == pytest.approx(
        float(row["proven_epsilon"]), rel=0.01
    )
    assert plan.query.standard_deviation / plan.batch_size == pytest.approx(
        float(row["noise"]), rel=0.01
    )


def test_kl_slopes_are_those_of_the_runs() -> None:
    runs = rows_of("kl_rates.csv")
    for row in rows_of("kl_slopes.csv"):
        mine = [
            r for r in runs if (r["experiment"], r["kappa"]) == (row["experiment"], row["kappa"])
        ]
        logs = np.log([[float(r["x"]), float(r["measured"])] for r in mine])
        assert np.polyfit(*logs.T, 1)[0] == pytest.approx(float(row["slope"]), abs=1e-9)
    listed = [(row["experiment"], row["kappa"]) for row in rows_of("kl_slopes.csv")]
    assert listed == [(e.name, str(e.kappa)) for e in kl_rates.experiments()]


def test_kl_rates() -> None:
    (experiment,) = (
        e for e in kl_rates.experiments() if (e.name, e.kappa) == ("KL-Spider, |w|^tau", 2)
    )
    run = next(experiment.runs(points=1, seeds=1))
    ours = next(row for row in rows_of("kl_rates.csv") if row["kappa"] == "2.0")
    assert run.measured == pytest.approx(float(ours["measured"]), rel=0.3)


@pytest.mark.parametrize("name", list(kl_real.METHODS))
def test_kl_real(name: str) -> None:
    """Every method on the smallest data, all seeds."""
    case = kl_real.breast_cancer()
    (ours,) = (
        row
        for row in rows_of("kl_real.csv")
        if (row["data"], row["method"], row["epsilon"]) == (case.name, name, "1.0")
    )
    settings = {
        key: float(value) for key, value in (p.split("=") for p in ours["settings"].split())
    }
    method, choices = kl_real.METHODS[name]
    assert settings in choices
    risks = [case.excess_risk(method(case, 1.0, seed, settings)) for seed in range(1, 4)]
    assert np.mean(risks) == pytest.approx(float(ours["excess_risk"]), rel=0.05)


def test_srgd_exponents_are_those_of_the_rates() -> None:
    kinds = (str, int, int, float, str, int, float, float, float, float)
    cells = [
        srgd_rates.Cell(*(kind(value) for kind, value in zip(kinds, row.values(), strict=True)))
        for row in rows_of("srgd_rates.csv")
    ]
    found = [
        srgd_rates.exponents(
            [c for c in cells if (c.loss, c.method) == (row["loss"], row["method"])]
        )
        for row in rows_of("srgd_exponents.csv")
    ]
    ours = [(float(row["alpha"]), float(row["gamma"])) for row in rows_of("srgd_exponents.csv")]
    np.testing.assert_allclose(found, ours, atol=2e-3)


@fashion
@pytest.mark.slow
def test_an_epoch_of_the_share_that_is_clipped() -> None:
    """The first epoch of the first line, without noise."""
    training, _, _ = one_pass.load(FASHION_MNIST_DIRECTORY)
    method = DPSGD(fang.PrivateQuantile.monitor(0.3))
    plan = method.plan(
        n=len(training[0]), batch_size=fang.BATCH, epochs=1, noise_multiplier=0.0, delta=1e-5
    )
    clipped = 1 - np.mean(fang.monitored(plan, training, "linear", 0.3))
    assert clipped == pytest.approx(float(rows_of("fang_fig1.csv")[0]["clipped"]), abs=0.01)


@fashion
@pytest.mark.slow
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
    assert found == pytest.approx(float(known[das_tables.PRIVATE]["clip_norm"]))
    row = known["0 %"]
    norm, rate, epsilon = (float(row[k]) for k in ("clip_norm", "learning_rate", "epsilon"))
    recipe = das_tables.Recipe((norm * rate,), das_tables.smooth_pixels(28, cutoff=16.0))
    made, _ = das_tables.measured(case, recipe, "0 %", norm, epsilon, epsilon, 1)
    assert made.accuracy == pytest.approx(float(row["accuracy"]), abs=0.8)


@fashion
@pytest.mark.slow
def test_a_seed_without_privacy() -> None:
    case = replace(fashion_case(Path(FASHION_MNIST_DIRECTORY)), l2=0.0)
    (row,) = (row for row in rows_of("das_baselines.csv") if row["data"] == case.name)
    accuracy = case.accuracy(das_baselines.trained(case, 1, float(row["learning_rate"])))
    assert accuracy == pytest.approx(float(row["accuracy"]), abs=0.3)


@fashion
@pytest.mark.slow
def test_a_network_at_one_clip_norm() -> None:
    """One seed of three of the cell at epsilon 4 and clip norm 3."""
    scaled = [(x * one_pass.SCALE, y) for x, y in one_pass.load(FASHION_MNIST_DIRECTORY)]
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
@pytest.mark.parametrize("panel", list(dice_ablations.PANELS))
def test_a_cell_of_the_dice_ablations(panel: str) -> None:
    """One seed of three."""
    settings = ("clip_norm", "feedback", "residual", "step")
    row = rows_of(f"dice_{panel}.csv")[0]
    case = dice_cases.fashion_softmax(Path(FASHION_MNIST_DIRECTORY))
    score = dice_ablations.run(case, seed=1, **{name: float(row[name]) for name in settings})
    assert score == pytest.approx(float(row["score"]), abs=0.01)


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


def test_language_models_by_settings() -> None:
    """The data of this table is in no package; test_dice.py runs it on a made-up text."""
    rows = rows_of("dice_fig5.csv")
    assert columns(dice_gpt.Cell) == set(rows[0])
    assert [(float(row["clip_norm"]), float(row["learning_rate"])) for row in rows] == [
        (norm, rate) for norm in dice_gpt.CLIP_NORMS for rate in dice_gpt.RATES
    ]


def test_fine_tuned_language_models() -> None:
    """The data of these tables is in no package; test_dice_texts.py runs them on made-up texts."""
    rows = rows_of("dice_fig4.csv")
    assert columns(dice_texts.Epoch) == set(rows[0])
    assert [(row["method"], int(row["epoch"])) for row in rows] == [
        (method, epoch)
        for method in dice_texts.METHODS
        for epoch in range(1, dice_texts.EPOCHS + 1)
    ]
    rows = rows_of("dice_table3.csv")
    assert columns(dice_texts.Score) == set(rows[0])
    assert [(row["method"], row["measure"]) for row in rows] == [
        (method, measure) for method in dice_texts.METHODS for measure in SCORES
    ]


@fashion
@pytest.mark.slow
def test_a_fine_tuned_vision_transformer() -> None:
    """One seed of the first line; and every cell is there."""
    rows = rows_of("dice_vit.csv")
    assert columns(dice_table.Row) == set(rows[0])
    assert [(float(row["clip_norm"]), row["method"]) for row in rows] == [
        (dice_table.UNCLIPPED if method == dice_table.OPEN else norm, method)
        for norm in dice_vit.CLIP_NORMS
        for method in dice_vit.METHODS
    ]
    row, case = rows[0], dice_vit.vit_case(FASHION_MNIST_DIRECTORY)
    plans = dict(
        dice_table.candidates(
            dice_vit.TRAINING,
            dice_vit.EPSILON,
            case.epochs,
            case.batches,
            case.clip_norms,
            dice_vit.METHODS,
        )
    )
    found = dice_table.train(plans["DP-SGD"], case, float(row["learning_rate"]), 1, case.test)
    assert abs(found - float(row["score"])) < 5 * float(row["standard_deviation"])


@fashion
@pytest.mark.slow
def test_other_budgets() -> None:
    """One seed of three of the first line; and every cell is there."""
    rows = rows_of("fang_fig5.csv")
    assert columns(fang_budgets.Score) == set(rows[0])
    assert [(float(row["epsilon"]), float(row["delta"]), row["method"]) for row in rows] == [
        (*pair, method) for pair in fang_budgets.BUDGETS for method in fang_budgets.METHODS
    ]
    (x, y), _, test = one_pass.load(FASHION_MNIST_DIRECTORY)
    row = rows[0]
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


@fashion
@pytest.mark.slow
def test_value_clipping_on_a_linear_model() -> None:
    """One seed of three, and a tenth of the steps, on the first line that has value clipping."""
    training, _, test = one_pass.load(FASHION_MNIST_DIRECTORY)
    row = rows_of("fang_fig2.csv")[1]
    method = fang.methods(float(row["clip_norm"]))[row["method"]]
    whole = {"n": len(training[0]), "batch_size": 4 * fang.BATCH, "delta": fang.DELTA}
    noise = method.plan(**whole, epochs=fang.EPOCHS, epsilon=fang.EPSILON).noise_multiplier
    plan = method.plan(**whole, steps=50, noise_multiplier=noise)
    step = float(row["learning_rate"]) * float(row["clip_norm"])
    score = fang.run(plan, row["model"], training, step, 1, test)
    assert score == pytest.approx(float(row["accuracy"]), abs=0.08)


@fashion
@pytest.mark.slow
def test_one_pass() -> None:
    """One seed of three, of the largest batches."""
    row = rows_of("one_pass.csv")[-5]
    training, _, test = one_pass.load(FASHION_MNIST_DIRECTORY)
    settings = srgd_rates.settings_for(
        srgd_rates.METHODS[row["method"]],
        int(row["steps"]),
        int(row["batch_size"]),
        float(row["clip_norm"]),
        float(row["beta"]),
    )
    found = one_pass.train(settings, training, float(row["epsilon"]), 1)
    accuracy = one_pass.accuracy(found[row["averaged"] == "True"], test)
    assert accuracy == pytest.approx(float(row["accuracy"]), abs=0.03)


def test_srgd_rates() -> None:
    """The first problem of the table; the mean of three repetitions of ten."""
    row = rows_of("srgd_rates.csv")[1]
    task = srgd_rates.Task(row["loss"], int(row["p"]))
    n, epsilon = int(row["n"]), float(row["epsilon"])
    settings = srgd_rates.settings_for(
        srgd_rates.METHODS[row["method"]],
        int(row["steps"]),
        n // int(row["steps"]),
        float(row["clip_norm"]),
        float(row["beta"]),
    )
    found = [
        srgd_rates.excess_of(task, task.sample(n, seed), settings, epsilon, seed)
        for seed in (1, 2, 3)
    ]
    assert np.mean(found) == pytest.approx(float(row["excess"]), rel=0.5)


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
