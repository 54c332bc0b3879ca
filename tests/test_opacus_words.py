"""Words of Opacus lead to what they are called here, and the page for its users names them."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim import opacus_words


@pytest.mark.parametrize("name", [*opacus_words.NAMES, *opacus_words.NOT_NEEDED])
def test_names_lead_on(name: str) -> None:
    said = f"Fix: (what others call {name} is here|leave {name} out)"
    with pytest.raises(AttributeError, match=said):
        getattr(dpoptim, name)
    assert not hasattr(dpoptim, name)
    with pytest.raises(ImportError, match=said):
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


def private_training() -> dpoptim.PrivateTraining:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(n=10, batch_size=2, steps=1, epsilon=1.0, delta=1e-3)
    model, data = nn.Linear(2, 2), TensorDataset(torch.randn(10, 2))
    return dpoptim.attach(plan, model, torch.optim.SGD(model.parameters(), lr=1.0), data)


def test_words_of_peers_lead_on() -> None:
    """Of JAX-Privacy, fastDP, private-transformers, dp-transformers and TensorFlow Privacy."""
    method = dpoptim.DPSGD(clip_norm=1.0)
    for words, ours in (
        ({"sample_size": 64}, "is here n="),
        ({"num_examples": 64}, "is here n="),
        ({"expected_batch_size": 8}, "is here batch_size="),
        ({"iterations": 8}, "is here steps="),
        ({"sample_rate": 0.1}, r"batch_size=n \* sample_rate"),
    ):
        with pytest.raises(TypeError, match=ours):
            method.plan(steps=1, epsilon=1.0, delta=1e-3, **words)  # type: ignore[arg-type]
    for word in ("num_microbatches", "rescale_to_unit_norm", "numerical_stability_constant"):
        with pytest.raises(TypeError, match=f"Fix: leave {word} out: "):
            dpoptim.DPSGD(clip_norm=1.0, **{word: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Fix: leave shuffle out: the plan's method says"):
        private_training().batches(shuffle=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"loss=loss\), where loss takes \(model, batch\)"):
        dpoptim.attach(None, None, None, None, criterion=nn.CrossEntropyLoss())  # type: ignore[call-arg, arg-type]


def test_a_private_training_is_no_engine_and_no_loader() -> None:
    private = private_training()
    with pytest.raises(AttributeError, match=r"no attribute 'get_epsilon'. Fix: private.spent\("):
        private.get_epsilon(1e-5)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'nothing'.$"):
        private.nothing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(TypeError, match=r"for batch in private.batches\(\)"):
        for _ in private:
            pass
    with pytest.raises(TypeError, match="not several things to unpack"):
        _model, _optimizer, _loader = private


def test_arguments_in_other_places_are_told_the_order() -> None:
    model, data = nn.Linear(2, 2), TensorDataset(torch.randn(10, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(TypeError, match=r"Fix: attach\(plan, model, optimizer, train_set, "):
        dpoptim.attach(model, optimizer, data)  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError, match=r"Fix: plan\(.*n=\.\.\."):
        dpoptim.DPSGD(clip_norm=1.0).plan(1000, 100)  # type: ignore[call-arg, misc]


def test_steps_of_private_transformers_lead_on() -> None:
    private = private_training()
    (optimizer,) = private.optimizers
    with pytest.raises(AttributeError) as raised, private:
        optimizer.virtual_step()  # type: ignore[attr-defined]
    assert "physical_batch_size" in raised.value.__notes__[0]
    private = private_training()
    (optimizer,) = private.optimizers
    with private, pytest.raises(dpoptim.PrivacyError, match="Fix: private.backward"):
        for (x,) in private.batches():
            private.backward(private.model(x).sum(1))
            optimizer.step(loss=1.0)  # type: ignore[call-arg]
    assert private.reservation is None


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
