"""Plans of other code: they are read, resumed and verified with the same classes alone."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from command_work import run
from dpoptim import registry
from dpoptim.accounting.guarantee import Guarantee
from dpoptim.assumptions import CODE_OF_OTHERS
from dpoptim.documents import DIGEST, with_digest
from dpoptim.mechanisms import IndependentNoise
from dpoptim.methods import DPSGD, PrivateQuantile, TrainingMethod
from dpoptim.noise.stream import KeyStream
from dpoptim.plan import Plan
from dpoptim.plan.code import CODE
from dpoptim.sampling import Indices, PoissonSampling
from extensions.decaying_noise import DecayingSGD

N, STEPS = 40, 6
SHAPE: dict[str, Any] = {
    "n": N,
    "batch_size": 4,
    "steps": STEPS,
    "noise_multiplier": 1.0,
    "delta": 1e-5,
}
NOTE = CODE_OF_OTHERS.format(__name__.partition(".")[0])


@dataclass(frozen=True)
class Everybody(PoissonSampling):
    """It says Poisson, and takes every record."""

    def draw(self, coins: KeyStream, records: int) -> Indices:
        return np.arange(records)


class TakesAll(DPSGD):
    """By the name of DP-SGD."""

    def sampler(self, n: int, batch_size: int) -> Everybody:
        return Everybody(batch_size / n)


class Sampled(DPSGD):
    """By the name of DP-SGD, with its sampler."""


class Found(PrivateQuantile):
    """With the fields of the library's own."""


@dataclass(frozen=True)
class Named(TrainingMethod):
    """A method with a name of its own."""

    clip_norm: float
    name: ClassVar[str] = "named-sgd"
    summary: ClassVar[str] = "of another package"
    mechanism: ClassVar[IndependentNoise] = IndependentNoise()  # type: ignore[misc]

    def __post_init__(self) -> None:
        self.check()

    def sampler(self, n: int, batch_size: int) -> Everybody:
        return Everybody(batch_size / n)


@pytest.fixture
def named() -> Iterator[type[Named]]:
    yield dpoptim.register_method(Named)
    registry.unregister_method(Named.name)


def as_earlier(plan: Plan) -> str:
    """The document of a version that named no classes."""
    data = {name: each for name, each in json.loads(plan.to_json()).items() if name != CODE}
    return json.dumps(with_digest(data))


def test_a_plan_of_the_library_has_the_document_it_always_had() -> None:
    for method in (DPSGD(1.0), DPSGD(PrivateQuantile(), noise_schedule=(1.0, 2.0))):
        assert CODE not in json.loads(
            method.plan(**{**SHAPE, "n": 4000, "batch_size": 400}).to_json()
        )


def test_each_part_of_other_code_is_named() -> None:
    parts = json.loads(TakesAll(1.0).plan(**SHAPE).to_json())[CODE]
    here = __name__
    assert parts == {"method": f"{here}:TakesAll", "sampler": f"{here}:Everybody"}
    found = DPSGD(Found()).plan(**{**SHAPE, "n": 4000, "batch_size": 400})
    assert json.loads(found.to_json())[CODE] == {"setting clip_norm": f"{here}:Found"}


@pytest.mark.parametrize("method", [TakesAll(1.0), Sampled(1.0), DPSGD(Found())], ids=repr)
def test_another_class_of_the_same_name_does_not_come_back(method: DPSGD) -> None:
    plan = method.plan(**{**SHAPE, "n": 4000, "batch_size": 400})
    with pytest.raises(ValueError, match="another class of the same name") as refused:
        Plan.from_json(plan.to_json())
    assert f"{__name__}:" in str(refused.value)
    assert "Fix:" in str(refused.value)
    # by an earlier version, whose guarantee named the package
    with pytest.raises(ValueError, match="other code of the same name"):
        Plan.from_json(as_earlier(plan))


def test_a_class_that_only_says_that_it_is_ours_is_not() -> None:
    class Drawn(DPSGD):
        pass

    Drawn.__module__, Drawn.__qualname__ = DPSGD.__module__, "Drawn"
    plan = Drawn(1.0).plan(**SHAPE)
    assert plan.guarantee.notes
    with pytest.raises(ValueError, match="another class of the same name"):
        Plan.from_json(plan.to_json())


def test_an_unregistered_method_is_refused_with_the_way_to_register_it() -> None:
    text = Named(1.0).plan(**SHAPE).to_json()
    with pytest.raises(ValueError, match=rf"{__name__}:Named.*register_method"):
        Plan.from_json(text)


def test_a_registered_method_comes_back_by_new_and_earlier_documents(named: type[Named]) -> None:
    plan = named(1.0).plan(**SHAPE)
    for text in (plan.to_json(), as_earlier(plan)):
        read = Plan.from_json(text)
        assert read == plan
        assert type(read.sampler) is Everybody
        assert read.guarantee.notes == (NOTE,)


def test_numbers_of_numpy_in_its_settings_come_back() -> None:
    dpoptim.register_method(DecayingSGD)
    try:
        plan = DecayingSGD(1.0, half_life=np.float64(20.0)).plan(**SHAPE)
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.guarantee.notes == (CODE_OF_OTHERS.format("extensions"),)  # not numpy
    finally:
        registry.unregister_method(DecayingSGD.name)


def test_a_sampler_that_took_the_place_of_another_is_seen(named: type[Named]) -> None:
    plan = named(1.0).plan(**SHAPE)
    data = json.loads(plan.to_json())
    data[CODE]["sampler"] = "extensions.elsewhere:Careful"
    with pytest.raises(ValueError, match="sampler is of the class 'extensions.elsewhere:Careful'"):
        Plan.from_json(json.dumps(with_digest(data)))
    del data[CODE]["sampler"]
    with pytest.raises(ValueError, match="one of dpoptim's own"):
        Plan.from_json(json.dumps(with_digest(data)))


@pytest.mark.parametrize("code", [{}, [], {"method": 3}, "x"], ids=str)
def test_what_names_no_classes_is_damaged(code: Any) -> None:
    data = json.loads(DPSGD(1.0).plan(**SHAPE).to_json())
    with pytest.raises(ValueError, match="damaged plan"):
        Plan.from_json(json.dumps(with_digest({**data, CODE: code})))


# ---- checkpoints and certificates --------------------------------------------------------------


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def trained(plan: Plan, ledger: dpoptim.Ledger, until: int, **options: Any) -> Any:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(N, 3), torch.arange(N) % 2)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(
        plan, model, optimizer, data, loss=loss, ledger=ledger, **options
    ) as private:
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
            if private.steps_done == until:
                break
    return private


def test_a_run_goes_on_with_the_same_class_alone(tmp_path: Path) -> None:
    """What began with every record in each step may not end as a Poisson-sampled run."""
    ledger, path = dpoptim.Ledger(tmp_path / "ledger"), tmp_path / "checkpoint"
    trained(TakesAll(1.0).plan(**SHAPE), ledger, 3).save(path)
    for other in (DPSGD(1.0), Sampled(1.0)):
        with pytest.raises(ValueError, match="another plan: class of the method=.*TakesAll"):
            trained(other.plan(**SHAPE), ledger, STEPS, resume=path)
    with pytest.raises(ValueError, match="another plan: clip_norm=1.0 there and 2.0 here"):
        trained(TakesAll(2.0).plan(**SHAPE), ledger, STEPS, resume=path)
    private = trained(TakesAll(1.0).plan(**SHAPE), ledger, STEPS, resume=path)
    assert private.spent().notes == (NOTE,)
    folder = tmp_path / "run"
    dpoptim.certify(private, folder, data="made up", settings={})
    written = json.loads((folder / "certificate.json").read_text())
    assert written["guarantee"]["notes"] == [NOTE]
    assert written["plan"][CODE]["sampler"] == f"{__name__}:Everybody"
    assert not any("coin" in text for text in written["basis"]["enforced"])
    assert "another class of the same name" in run("verify", folder, code=2)


def test_no_other_class_takes_up_a_run_of_the_library(tmp_path: Path) -> None:
    ledger, path = dpoptim.Ledger(tmp_path / "ledger"), tmp_path / "checkpoint"
    trained(DPSGD(1.0).plan(**SHAPE), ledger, 3).save(path)
    with pytest.raises(ValueError, match="another class of the same name"):
        trained(TakesAll(1.0).plan(**SHAPE), ledger, STEPS, resume=path)


def test_a_run_of_a_registered_method_is_verified(named: type[Named], tmp_path: Path) -> None:
    ledger, folder = dpoptim.Ledger(tmp_path / "ledger"), tmp_path / "run"
    private = trained(named(1.0).plan(**SHAPE), ledger, STEPS)
    dpoptim.certify(private, folder, data="made up", settings={})
    assert NOTE in run("verify", folder)


def test_a_guarantee_still_differs_by_no_more_than_rounding() -> None:
    """Two documents that name the same classes, one of which promises something else."""
    from dpoptim.plan.plan import same_plan

    text = TakesAll(1.0).plan(**SHAPE).to_json()
    assert same_plan(text, text)
    data = {name: each for name, each in json.loads(text).items() if name != DIGEST}
    promised = Guarantee.from_json(data["guarantee"])
    data["guarantee"]["epsilon"] = promised.epsilon * (1 + 1e-9)
    assert same_plan(text, json.dumps(with_digest(data)))
    data["guarantee"]["epsilon"] = promised.epsilon / 2
    assert not same_plan(text, json.dumps(with_digest(data)))
