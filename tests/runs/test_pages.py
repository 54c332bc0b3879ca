"""Pages of ledgers and comparisons: sound, self-contained, and saying what they are made of."""

import itertools
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dpoptim
from dpoptim.cli import app
from dpoptim.runs.compare import WITHOUT_PRIVACY, Compared
from dpoptim.runs.compare_page import apart, compare_page
from dpoptim.runs.ledger_page import ledger_page

PLAN = dpoptim.DPSGD(clip_norm=1.0).plan(
    n=1000, batch_size=1000, steps=4, noise_multiplier=12.0, delta=1e-6, neighboring="zero-out"
)


def sound(text: str, pictures: int) -> None:
    assert text.count("<svg") == pictures
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert "default-src 'none'" in text


@pytest.mark.parametrize("budget", [{"epsilon": 2.0, "delta": 1e-6}, {}], ids=["budget", "none"])
def test_a_ledgers_page_shows_every_run(tmp_path: Path, budget: dict[str, float]) -> None:
    file, page = tmp_path / "l.sqlite", tmp_path / "l.html"
    with dpoptim.Ledger(file, dataset="<b>patients", neighboring="zero-out", **budget) as ledger:
        for number in range(3):
            ledger.reserve(PLAN.event, neighboring="zero-out", label=f"run <{number}>")
        if budget:
            assert ledger.shares() == pytest.approx([ledger.shares()[0]] * 3)
            used = sum(ledger.shares())
            assert used == pytest.approx(ledger.remaining().reserved / ledger.remaining().limit)
        else:
            with pytest.raises(ValueError, match="no budget"):
                ledger.shares()
        digest = ledger.digest
    result = CliRunner().invoke(app, ["ledger", str(file), "--page", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    sound(text, 1)
    assert all(f"run &lt;{number}&gt;" in text for number in range(3))
    assert "<b>patients" not in text
    assert digest in text
    assert ("No budget" in text) == (not budget)
    if budget:
        assert f"{used:.0%} reserved" in text


def test_an_empty_ledgers_page() -> None:
    with dpoptim.Ledger(neighboring="zero-out", epsilon=1.0, delta=1e-6) as ledger:
        text = ledger_page(ledger)
    sound(text, 0)
    assert "0% reserved" in text


@pytest.mark.parametrize("measure", ["accuracy", "R2"])
def test_a_comparisons_page_names_its_measure(measure: str) -> None:
    found = [
        Compared(WITHOUT_PRIVACY, "none", (0.9, 0.91), 2.0, measure, 100),
        Compared("dp-<sgd>", "epsilon=1", (0.8, 0.82), 3.0, measure, 100),
        Compared("dp-ftrl", "epsilon=1", (0.7, 0.7), 300.0, measure, 100),
    ]
    text = compare_page(found, "softmax on digits")
    sound(text, 1)
    assert "dp-&lt;sgd&gt;" in text
    assert "5 min" in text
    assert ("accuracy" in text) == (measure == "accuracy")
    assert ("R2 on data declared public" in text) == (measure == "R2")


def test_labels_keep_apart() -> None:
    placed = apart([0.1, 0.1, 0.1, 0.9], 0.2)
    assert all(b - a >= 0.2 - 1e-12 for a, b in itertools.pairwise(placed))
