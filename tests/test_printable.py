"""Nothing that a terminal or a page obeys gets through; names with markup neither crash nor
vanish.
"""

import io
from dataclasses import replace
from pathlib import Path

import dp_accounting
import pytest
from rich.console import Console
from typer.testing import CliRunner

from dpoptim import Ledger
from dpoptim.cli import app
from dpoptim.printable import printable
from dpoptim.runs.report import report
from dpoptim.terminal import say
from finished_run import small_run

EVIL = "a\x1b[31mb\x9b2Jc\rd\x08e\u202ef\u2066g\x00h\udc80i\u2028j"


def test_what_is_obeyed_is_shown_instead() -> None:
    assert printable("Grüße, 数据 [bold] 'x' \\") == "Grüße, 数据 [bold] 'x' \\"
    assert printable(EVIL) == (
        "a\\x1b[31mb\\x9b2Jc\\rd\\x08e\\u202ef\\u2066g\\x00h\\udc80i\\u2028j"
    )


@pytest.mark.parametrize(
    "text", ["[/bold]", "[red]x[/red]", "a[b]c", EVIL, "[link=http://x]y[/link]"]
)
def test_text_is_printed_as_it_is(text: str) -> None:
    out = io.StringIO()
    say(f"saved in {text}/", to=Console(file=out, force_terminal=True, width=400))
    assert out.getvalue() == f"saved in {printable(text)}/\n"


def test_labels_in_a_ledger() -> None:
    with Ledger(dataset=EVIL) as ledger:
        ledger.reserve(
            dp_accounting.GaussianDpEvent(5.0), neighboring="add-or-remove-one", label=EVIL[:20]
        )
        assert "\x1b" not in ledger.describe()
        assert printable(EVIL[:20]) in ledger.describe()


def test_a_page() -> None:
    page = report(replace(small_run(), data_name=EVIL, model_name="<script>alert(1)</script>"))
    assert not any(sign in page for sign in "\x1b\x9b\x00\u202e\u2066\x08\udc80")
    assert "<script" not in page
    assert "Content-Security-Policy" in page
    assert "default-src 'none'" in page


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["[/bold]", "x[red]y", "e\x1b[31mvil"])
def test_a_folder_whose_name_is_markup(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    command = [
        "train",
        "--epochs",
        "1",
        "--batch-size",
        "512",
        "--no-compare",
        "--out",
        str(folder),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert printable(name) in result.output.replace("\n", "")
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert printable(name) in again.output.replace("\n", "")
    assert "\x1b" not in again.output
