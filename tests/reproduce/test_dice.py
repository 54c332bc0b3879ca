"""The paper's example of the bias of clipping, and the comparison's parts."""

import csv
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.reproduce import dice_ablations, dice_gpt, dice_table, dice_vit
from dpoptim.reproduce.dice_bias import START, bias_of_clipping
from dpoptim.reproduce.dice_cases import Case, restaurant_gpt
from dpoptim.runs.train import accuracy


@pytest.mark.figures
def test_bias_is_written_down_and_drawn(tmp_path: Path) -> None:
    """test_results_of_dice.py looks at where runs of full length end."""
    endings = bias_of_clipping(tmp_path, clip_norms=(0.5, 2.0), passes=10)
    assert all(ending.x < START for ending in endings)
    with (tmp_path / "dice_bias.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(endings) == 8
    assert (tmp_path / "dice_bias.png").stat().st_size > 1000


@pytest.mark.figures
def test_clipping_is_biased_and_error_feedback_is_not(tmp_path: Path) -> None:
    endings = {
        ending.method: ending
        for ending in bias_of_clipping(tmp_path, clip_norms=(0.5,), passes=400)
    }
    assert endings["clipped"].x == pytest.approx(-0.75, abs=0.01)
    for name in ("DiceSGD, R infinite", "DiceSGD, R finite"):
        assert endings[name].x == pytest.approx(0, abs=0.01)
    assert -0.75 < endings["DiceSGD, with resets"].x < -0.1  # part of the bias stays


def made_up_case() -> Case:
    """Two classes told apart by the sign of one feature."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 4, generator=generator)
    y = (x[:, 0] > 0).long()
    parts = [(x[a:b], y[a:b]) for a, b in ((0, 1000), (1000, 1100), (1100, 1200))]
    return Case(
        *("made up", "accuracy", *parts, lambda: nn.Linear(4, 2), F.cross_entropy, accuracy, "SGD"),
        batches=(100,),
        epochs=(2,),
        clip_norms=(1.0,),
        steps=(1e-9, 1.0),
    )


@pytest.mark.variants
def test_the_comparison_promises_what_its_rows_say(tmp_path: Path) -> None:
    rows = dice_table.dice_table(tmp_path, [made_up_case()], seeds=2, epsilons=(8.0,))
    with (tmp_path / "dice_table.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows) == 5
    for row in rows:
        # the other stays where it is
        assert row.learning_rate == 1.0 or row.method == dice_table.PUBLISHED
        assert row.noise > 0
        assert not math.isnan(row.standard_deviation)
        if row.method == dice_table.PUBLISHED:
            assert row.proven_epsilon > 3 * row.epsilon
        else:
            assert row.score > 0.6
            assert 0.98 * row.epsilon <= row.proven_epsilon <= row.epsilon
    for _, plan in dice_table.candidates(5000, 2.0, (1, 2), (100,), (1.0,)):
        assert plan.neighboring == "zero-out"


def test_the_ablations_hold_what_is_not_varied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        dice_ablations.PANELS, "fig2", ("clip_norm", (0.3, 1.0), "feedback", (0.0, 1.0))
    )
    cells = dice_ablations.dice_ablations(tmp_path, made_up_case(), seeds=1, panels=("fig2",))
    assert [(cell.clip_norm, cell.feedback) for cell in cells] == [
        (0.3, 0.0),
        (0.3, 1.0),
        (1.0, 0.0),
        (1.0, 1.0),
    ]
    assert {cell.residual for cell in cells} == {2.0}
    assert (tmp_path / "dice_fig2.png").stat().st_size > 1000


def write_texts(folder: Path, records: int) -> None:
    for name in ("devset.csv", "testset_w_refs.csv"):
        line = '"name[Blue Spice], area[riverside]",Blue Spice is by the river.\n'
        (folder / name).write_text("mr,ref\n" + line * records)


@pytest.mark.figures
def test_a_language_model_learns_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger rate further than a tiny one; epsilon is that of the page."""
    write_texts(tmp_path, 200)
    monkeypatch.setattr(dice_gpt, "BATCH", 50)
    case = dice_gpt.small_case(tmp_path)
    slow, fast = dice_gpt.loss_by_settings(tmp_path, case, clip_norms=(1.0,), rates=(1e-6, 0.02))
    assert fast.loss < slow.loss
    with (tmp_path / "dice_fig5.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2
    plan = dice_gpt.plan_of(1.0, case)
    assert compute_epsilon(plan.event, 8e-6, "zero-out").epsilon == pytest.approx(8, rel=0.02)


def test_texts_for_the_small_gpt(tmp_path: Path) -> None:
    write_texts(tmp_path, 4)
    case = restaurant_gpt(tmp_path)
    x, following = case.training
    assert x.shape == following.shape == (4, 47)
    assert torch.equal(x[:, 1:], following[:, :-1])
    # chance is -log(1024)
    assert -9 < case.score(case.model_and_optimizer(1e-3, 1.0)[0], *case.test) < -5
    with pytest.raises(FileNotFoundError, match="E2E"):
        restaurant_gpt(tmp_path / "nowhere")


@pytest.mark.figures
def test_a_transformer_fine_tuned_on_squares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its images are cut and its classes told apart as they should; each clip norm has all rows."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 10, (600,), generator=generator)
    x = torch.rand(600, 784, generator=generator) / 50
    x[torch.arange(600), y * 70] = 1.0  # a bright pixel tells the class
    squares, labels = dice_vit.of_classes((x, y), odd=False)
    assert labels.max() == 4
    first = x[y % 2 == 0][0].view(28, 28)
    torch.testing.assert_close(squares[0, 5].view(7, 7), 5 * first[7:14, 7:14])
    parts = [(x[a:b], y[a:b]) for a, b in ((0, 400), (400, 500), (500, 600))]
    monkeypatch.setattr(dice_vit, "load_split", lambda directory: parts)
    monkeypatch.setattr(dice_vit, "BATCH", 40)
    monkeypatch.setattr(dice_vit, "RATES", (0.01,))
    monkeypatch.setattr(dice_vit, "EPOCHS", 1)
    before = torch.get_rng_state()
    case = dice_vit.vit_case(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    rows = dice_vit.dice_vit(tmp_path, case, seeds=1)
    assert [(row.clip_norm, row.method) for row in rows if row.method != dice_table.OPEN] == [
        (norm, method) for norm in (1.0, 0.1) for method in dice_vit.METHODS[:3]
    ]
    for row in rows:
        if row.method == dice_table.OPEN:
            assert row.proven_epsilon == math.inf
            assert row.noise == 0
        else:
            assert 1.95 < row.proven_epsilon <= 2
    with (tmp_path / "dice_vit.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 8
