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
    assert not hasattr(dpoptim, name)
    with pytest.raises(ImportError, match="Fix: what Opacus calls"):
        exec(f"from dpoptim import {name}")


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


def test_only_what_is_similar_is_proposed() -> None:
    known = ["warm_start", "steps", "clip_norm"]
    assert opacus_words.hint_of_keyword("random_state", known) == ""  # once warm_start
    assert opacus_words.hint_of_keyword("clipnorm", known) == " Fix: clip_norm=...?"
    assert opacus_words.hint_of_keyword("num_steps", known) == " Fix: steps=...?"


@pytest.mark.parametrize(
    ("word", "ours"), [("C", r"l2 = 1 / \(C n\)"), ("bounds_y", "target_bound="), ("tol", "steps=")]
)
def test_words_of_diffprivlib_lead_on(word: str, ours: str) -> None:
    from dpoptim.estimators import DPLinearRegression

    with pytest.raises(TypeError, match=f"{word!r}.*Fix: .*{ours}"):
        DPLinearRegression(**{word: 1.0})


def classes() -> list[type]:
    """All public classes that users make: methods, policies, estimators, ledgers."""
    from dpoptim import estimators, methods, preprocessing

    homes = (dpoptim, methods, estimators, preprocessing)
    found = {getattr(home, name) for home in homes for name in home.__all__}
    made_by_us = (dpoptim.Plan, dpoptim.PrivateTraining, dpoptim.Guarantee)
    return sorted(
        (
            kind
            for kind in found - set(made_by_us)
            if isinstance(kind, type) and not issubclass(kind, BaseException)
        ),
        key=lambda kind: kind.__name__,
    )


@pytest.mark.parametrize("kind", classes())
def test_every_class_leads_on(kind: type) -> None:
    with pytest.raises(TypeError, match="'max_grad_norm'.*Fix: .*clip_norm=..."):
        kind(max_grad_norm=1.0)


def test_the_argument_of_the_function_at_hand_is_named() -> None:
    from dpoptim.estimators import DPSGDClassifier

    with pytest.raises(TypeError, match="Fix: what others call target_epsilon is here epsilon="):
        DPSGDClassifier(target_epsilon=1.0)
    with pytest.raises(TypeError, match=r"Fix: epsilon is here DPSGD\(...\).plan\(epsilon="):
        dpoptim.DPSGD(clip_norm=1.0, epsilon=1.0)  # type: ignore[call-arg]


def test_misspelt_keywords_are_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'clip_nrm'. Fix: clip_norm="):
        dpoptim.DPSGD(clip_nrm=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'clip'. Fix: clip_norm="):
        dpoptim.DPSGD(clip=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'.$"):
        dpoptim.DPSGD(x=1.0)  # type: ignore[call-arg]


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
