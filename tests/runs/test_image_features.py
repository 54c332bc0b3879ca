"""Scattering features from the command line: trained on, kept, and made again of new images."""

import re
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from dpoptim.cli import app
from dpoptim.recipes import recipe


def run(*args: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "400", "TERM": "dumb"}).invoke(app, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return re.sub(r"\s+", " ", result.output)


def test_scattering_from_images_to_predictions(tmp_path: Path) -> None:
    text = run(
        *(
            "train",
            "--data",
            "digits",
            "--features",
            "scattering",
            "--epsilon",
            "8",
            "--epochs",
            "10",
            "--no-compare",
        ),
        *("--cache", str(tmp_path / "cache"), "--noise-seed", "1", "--out", str(tmp_path / "run")),
    )
    assert float(re.search(r"accuracy, private ([\d.]+)%", text).group(1)) > 80  # type: ignore[union-attr]
    assert "scattering, J=2, L=8" in (tmp_path / "run" / "certificate.json").read_text()
    assert len(list((tmp_path / "cache").iterdir())) == 1
    images, labels = load_digits(return_X_y=True)
    np.savez(tmp_path / "new.npz", x=images[:200].reshape(-1, 8, 8))
    run(
        "predict",
        str(tmp_path / "run"),
        str(tmp_path / "new.npz"),
        "--out",
        str(tmp_path / "p.csv"),
    )
    predicted = [line.split(",")[0] for line in (tmp_path / "p.csv").read_text().splitlines()[1:]]
    assert np.mean([a == str(b) for a, b in zip(predicted, labels, strict=False)]) > 0.8


def test_tables_have_no_scattering(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n1,0\n2,1\n")
    text = run(
        *(
            "train",
            "--data",
            str(tmp_path / "t.csv"),
            "--target",
            "y",
            "--data-is-public",
            "--features",
            "scattering",
        ),
        code=2,
    )
    assert "is for images" in text


def test_the_recipe_knows_the_features() -> None:
    assert recipe("softmax", 60_000, "scattering") != recipe("softmax", 60_000)
    assert recipe("cnn", 60_000, "scattering") == recipe("cnn", 60_000)
