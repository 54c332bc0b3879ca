"""Words of Opacus lead to what they are called here, and the page for its users names them."""

from pathlib import Path

import pytest
import torch
from torch import nn

import dpoptim
from dpoptim import opacus_words


@pytest.mark.parametrize("name", opacus_words.NAMES)
def test_names_lead_on(name: str) -> None:
    with pytest.raises(AttributeError, match="Fix: what Opacus calls"):
        getattr(dpoptim, name)


def test_keywords_lead_on() -> None:
    with pytest.raises(TypeError, match="clip_norm"):
        dpoptim.DPSGD(max_grad_norm=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="epsilon="):
        dpoptim.DPSGD(clip_norm=1.0).plan(
            n=10, batch_size=2, steps=1, target_epsilon=1.0, delta=1e-3
        )  # type: ignore[call-arg]
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(n=10, batch_size=2, steps=1, epsilon=1.0, delta=1e-3)
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="train_set"):
        dpoptim.attach(plan, model, torch.optim.SGD(model.parameters(), lr=1.0), data_loader=[])  # type: ignore[call-arg]


def test_other_unknown_keywords_are_refused_as_ever() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        dpoptim.DPSGD(clip_nrm=1.0)  # type: ignore[call-arg]


def test_the_page_for_opacus_users_names_them() -> None:
    page = (Path(__file__).parents[1] / "docs" / "opacus.md").read_text()
    for word in (
        "PrivacyEngine",
        "make_private_with_epsilon",
        "BatchMemoryManager",
        "max_grad_norm",
        "GradSampleModule",
    ):
        assert word in page
