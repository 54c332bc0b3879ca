"""What notebooks and progress bars show: public figures, escaped, and names instead of
addresses.
"""

import io

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim

PLAN = dpoptim.DPSGD(clip_norm=1.0).plan(n=40, batch_size=10, steps=4, epsilon=8.0, delta=1e-4)


def run(
    ledger: dpoptim.Ledger | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer, dpoptim.PrivateTraining]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
    return model, optimizer, dpoptim.attach(PLAN, model, optimizer, data, ledger=ledger)


def test_tables_name_things_and_escape_them() -> None:
    ledger = dpoptim.Ledger(dataset="<b>patients</b>")
    for shown in (PLAN, PLAN.guarantee, ledger):
        html = shown._repr_html_()
        assert "<table>" in html
        assert "REPLACE_SPECIAL" not in html + repr(shown)
        assert " at 0x" not in html + repr(shown)
    assert "<b>patients" not in ledger._repr_html_()
    assert repr(PLAN.guarantee) == f"Guarantee({PLAN.guarantee})"


def test_a_run_shows_steps_and_epsilon() -> None:
    model, optimizer, private = run()
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    with private:
        assert "0 of 4 steps" in repr(private)
        for x, y in private.progress(private.batches(), screen):
            private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
        assert "4 of 4 steps" in repr(private)
        assert "epsilon" in private._repr_html_()
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "4/4" in shown
    assert "steps/s" in shown
    assert "reserved" in shown


def test_batches_have_a_length_where_it_is_public() -> None:
    model, optimizer, private = run()
    with private:
        assert len(private.batches()) == len(private.steps(physical_batch_size=3)) == 4
        cut = private.batches(physical_batch_size=3)
        with pytest.raises(TypeError, match=r"private\.steps"):
            len(cut)
        for step in private.steps(physical_batch_size=3):
            for x, y in step:
                private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            if private.steps_done == 1:
                break
        assert len(private.batches()) == 3
