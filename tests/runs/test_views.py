"""`dpoptim train --views K`: views of an image are moved one by one, and clipped as one record."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dpoptim
from command_work import run
from dpoptim.data import load_digits
from dpoptim.data.views import moved_images, repeat_records
from dpoptim.optimizers import optimizer
from dpoptim.recipes import recipe
from dpoptim.runs import train
from dpoptim.runs.command import refuse_views
from dpoptim.runs.inputs import LEAST_SIDE, warnings_for_owner
from dpoptim.runs.models import build_model
from dpoptim.runs.options import TrainRequest


def test_each_image_is_moved_by_itself_and_filled_up_with_its_lowest_value() -> None:
    images = torch.randn(40, 2, 5, 4)
    seen = moved_images(images, 2, torch.Generator().manual_seed(0))
    ways = set()
    for image, view in zip(images, seen, strict=True):
        wide = torch.full((2, 9, 8), float(image.min()))
        wide[:, 2:7, 2:6] = image
        found = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if torch.equal(wide[:, i : i + 5, j : j + 4], view)
        ]
        assert len(found) == 1
        ways.update(found)
    assert len(ways) > 12
    assert torch.equal(moved_images(images, 0), images)


def test_a_moved_row_depends_on_no_other() -> None:
    images = torch.randn(6, 1, 4, 4)
    others = images.clone()
    others[3] = 1e6
    a, b = (moved_images(x, 1, torch.Generator().manual_seed(3)) for x in (images, others))
    kept = [0, 1, 2, 4, 5]
    assert torch.equal(a[kept], b[kept])


def test_repeated_records_take_no_memory() -> None:
    x = torch.randn(5, 3)
    assert repeat_records(x, 1) is x
    assert repeat_records(x, 4).shape == (5, 4, 3)
    assert repeat_records(x, 4).data_ptr() == x.data_ptr()


def train_digits(
    monkeypatch: pytest.MonkeyPatch, views: int, change: Any = None
) -> tuple[torch.Tensor, list[int]]:
    """The update of one full step without noise, and the rows of each pass."""
    data = load_digits(0)
    if change is not None:
        change(data)
    n, rows = len(data.x), list[int]()
    torch.manual_seed(0)
    model = build_model("cnn", data.x.shape[1:], data.outputs)
    start = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    losses = train.batch_losses

    def seen(model: torch.nn.Module, batch: Any, **given: Any) -> torch.Tensor:
        rows.append(len(batch[0]))
        return losses(model, batch, **given)

    monkeypatch.setattr(train, "batch_losses", seen)
    plan = dpoptim.DPSGD(clip_norm=0.01).plan(
        n=n, batch_size=n, steps=1, noise_multiplier=0, delta=1e-5, neighboring="zero-out"
    )
    train.train_privately(
        data,
        model,
        plan,
        train.Optimization(optimizer("sgd", momentum=0.0), 1.0, 0.0, views=views),
        ledger=dpoptim.Ledger(),
        label="test",
        noise_seed=0,
        on_step=lambda step: None,
    )
    monkeypatch.undo()
    end = torch.cat([p.detach().flatten() for p in model.parameters()])
    return (start - end) * n, rows


def test_an_image_counts_once_however_many_views_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """All gradients are clipped here: a record moves the sum by the clip norm, not by K of them."""

    def last_is_zero(data: Any) -> None:
        data.x[-1] = 0.0
        data.y[-1] = 1 - data.y[-1] % 2

    whole, rows = train_digits(monkeypatch, 3)
    other, _ = train_digits(monkeypatch, 3, last_is_zero)
    assert max(rows) >= 3 * 400, "rows of three views"
    moved_by = float((whole - other).norm())
    assert 0.003 < moved_by <= 2 * 0.01


def test_what_is_said_of_views(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--data", "digits", "--model", "cnn", "--epsilon", "4", "--no-compare")
    short = ("--epochs", "1", "--noise-seed", "1", "--out", str(out))
    run("train", *options, *short, "--views", "4")
    assert "4 of each image, moved by up to a pixel" in (out / "certificate.json").read_text()
    run("verify", str(out))
    plain, seen = recipe("cnn", 60_000), recipe("cnn", 60_000, views=4)
    assert seen.epochs / seen.batch_size > plain.epochs / plain.batch_size


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data", "digits", "--features", "scattering"], "--views are of pixels"),
        (["--data", "digits", "--method", "noisy-gd"], "leave out --views"),
        (["--data", "TABLE", "--target", "y", "--data-is-public"], "--views are of pixels"),
    ],
)
def test_what_has_no_views(options: list[str], said: str, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,y\n" + "\n".join(f"{i},{i % 2}" for i in range(50)))
    options = [str(table) if option == "TABLE" else option for option in options]
    text = run("train", *options, "--views", "2", "--out", str(tmp_path / "run"), code=2)
    assert said in " ".join(text.split())
    assert not (tmp_path / "run").exists()


def test_persons_rows_are_no_views() -> None:
    data = load_digits(0)
    data = replace(data, persons=np.arange(len(data.x)))
    with pytest.raises(ValueError, match="leave out --views, or --person-column"):
        refuse_views(TrainRequest(views=2), data)


def test_views_of_tiny_images_are_advised_against() -> None:
    """By the images' shape alone, which is public."""
    data = load_digits(0)
    (said,) = warnings_for_owner(data, TrainRequest(views=4))
    assert "much of a side of 8" in said
    assert list(warnings_for_owner(data, TrainRequest())) == []
    large = replace(data, x=np.zeros((2, 1, LEAST_SIDE, 28), dtype=np.float32))
    assert list(warnings_for_owner(large, TrainRequest(views=4))) == []
    small = replace(data, x=np.zeros((2, 1, 28, LEAST_SIDE - 1), dtype=np.float32))
    assert len(list(warnings_for_owner(small, TrainRequest(views=4)))) == 1
