"""Slices of the tables of Zhang et al. 2024, made again."""

from pathlib import Path

import pytest

from committed import columns, fashion, rows_of
from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.data import FASHION_MNIST_DIRECTORY
from dpoptim.methods import DPSGD, DiceSGD
from dpoptim.reproduce import (
    dice_ablations,
    dice_bias,
    dice_cases,
    dice_gpt,
    dice_table,
    dice_texts,
    dice_vit,
    one_pass,
)
from dpoptim.reproduce.text_scores import SCORES


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


@fashion
@pytest.mark.figures
@pytest.mark.parametrize("panel", list(dice_ablations.PANELS))
def test_a_cell_of_the_dice_ablations(panel: str) -> None:
    """One seed of three."""
    settings = ("clip_norm", "feedback", "residual", "step")
    row = rows_of(f"dice_{panel}.csv")[0]
    case = dice_cases.fashion_softmax(Path(FASHION_MNIST_DIRECTORY))
    score = dice_ablations.run(case, seed=1, **{name: float(row[name]) for name in settings})
    assert score == pytest.approx(float(row["score"]), abs=0.01)


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


def test_vision_transformers_hold_every_cell() -> None:
    rows = rows_of("dice_vit.csv")
    assert columns(dice_table.Row) == set(rows[0])
    assert [(float(row["clip_norm"]), row["method"]) for row in rows] == [
        (dice_table.UNCLIPPED if method == dice_table.OPEN else norm, method)
        for norm in dice_vit.CLIP_NORMS
        for method in dice_vit.METHODS
    ]


@fashion
@pytest.mark.figures
def test_a_fine_tuned_vision_transformer() -> None:
    """One seed of the first line."""
    row, case = rows_of("dice_vit.csv")[0], dice_vit.vit_case(FASHION_MNIST_DIRECTORY)
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
