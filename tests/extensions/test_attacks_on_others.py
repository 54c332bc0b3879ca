"""Methods of other code are attacked with their own rule and state, and what is not is named."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import dp_accounting
import numpy as np
import pytest
import torch
from torch import Tensor

from command_work import run
from dpoptim import registry
from dpoptim.audit.attack_families import attack
from dpoptim.audit.command import verdict_text
from dpoptim.audit.own_parts import audit_query
from dpoptim.clipping import Clipping, ClippingRule, Units
from dpoptim.mechanisms import IndependentNoise
from dpoptim.methods import DPSGD, TrainingMethod, register_method
from dpoptim.methods.sensitive_state import NothingKept, SensitiveState
from dpoptim.noise.stream import KeyStream
from dpoptim.plan import Plan
from dpoptim.sampling import Floats, Indices, PoissonSampling

SHAPE: dict[str, Any] = {
    "n": 600,
    "batch_size": 600,
    "steps": 4,
    "noise_multiplier": 2.0,
    "delta": 1e-5,
    "neighboring": "zero-out",
}


@dataclass(frozen=True)
class Normalised(Clipping):
    """Each gradient over its own norm and a little more, times the bound and a factor."""

    factor: float = 1.0
    beyond: float = 0.0  # so much above the bound for long gradients alone

    def units(self, layers: Any) -> Units:
        return Units.one(self, layers)

    def factors(self, squared_norms: Tensor, margin: float) -> Tensor:
        norms = squared_norms.sqrt() * (1 + 2.0**-20)
        kept = self.factor * self.norm * (1 - margin) * (1 - 2.0**-20) / (norms + 0.1)
        kept = torch.where(norms > 1000, kept * (1 + self.beyond), kept)
        return torch.where(torch.isfinite(kept) & (kept > 1e-30), kept, 0.0)


class FiveTimes(NothingKept):
    def query(self, sums: list[list[Tensor]]) -> list[Tensor]:
        return [each.mul_(5) for each in sums[0]]


@dataclass(frozen=True)
class Own(TrainingMethod):
    """A method of other code, its parts chosen by a test."""

    clip_norm: float
    factor: float = 1.0
    beyond: float = 0.0
    leaks: bool = False
    everybody: bool = False
    name: ClassVar[str] = "own-sgd"
    summary: ClassVar[str] = "of another package"
    mechanism: ClassVar[IndependentNoise] = IndependentNoise()  # type: ignore[misc]

    def __post_init__(self) -> None:
        self.check()

    def rule_of(self, clip_norm: float) -> ClippingRule:
        return Normalised(clip_norm, factor=self.factor, beyond=self.beyond)

    def sampler(self, n: int, batch_size: int) -> PoissonSampling:
        return (Everybody if self.everybody else PoissonSampling)(batch_size / n)

    def sensitive_state(self, plan: Plan) -> SensitiveState | None:
        assert isinstance(plan.method, Own)  # as in a run
        return FiveTimes() if self.leaks else None


@dataclass(frozen=True)
class Everybody(PoissonSampling):
    """It says Poisson, and takes every record."""

    def draw(self, coins: KeyStream, records: int) -> Indices:
        return np.arange(records)


@dataclass(frozen=True)
class Subsets(PoissonSampling):
    """Batches of one size; only an RDP accountant knows a price."""

    relations = ("replace-one",)
    n: int

    def event(self, noise_multipliers: Floats) -> dp_accounting.DpEvent:
        gaussian = dp_accounting.GaussianDpEvent(float(noise_multipliers.min()))
        size = round(self.n * self.sample_rate)
        step = dp_accounting.SampledWithoutReplacementDpEvent(self.n, size, gaussian)
        return dp_accounting.SelfComposedDpEvent(step, len(noise_multipliers))


@dataclass(frozen=True)
class SubsetSGD(Own):
    def sampler(self, n: int, batch_size: int) -> Subsets:
        return Subsets(batch_size / n, n)


def test_a_right_method_passes() -> None:
    found = attack(Own(1.0).plan(**SHAPE), 4000, 0)
    assert found.verdict == "consistent"
    assert 0.4 * found.claimed < found.lower_bound <= found.claimed
    assert found.notes == ()
    assert audit_query(Own(1.0).plan(**SHAPE)).largest_ratio > 0.99  # the rule is at its bound


@pytest.mark.parametrize("settings", [{"factor": 10.0}, {"leaks": True}], ids=str)
def test_its_own_rule_and_state_are_attacked(settings: dict[str, Any]) -> None:
    found = attack(Own(1.0, **settings).plan(**SHAPE), 4000, 0)
    assert found.verdict == "refuted"
    assert found.lower_bound > 2 * found.claimed  # by the canaries
    assert "with the noise off, one record moves" in found.notes[0]  # and without statistics
    assert found.notes[0] in verdict_text(found, 4000)


def test_a_rule_that_fails_where_no_canary_goes_is_refuted_without_noise() -> None:
    found = attack(Own(1.0, beyond=0.5).plan(**SHAPE), 4000, 0)
    assert found.lower_bound <= found.claimed
    assert found.verdict == "refuted"
    assert not found.as_expected
    assert "its loss times 1000" in found.notes[0]


def test_what_cannot_be_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(rule: Normalised, layers: Any) -> Units:
        if len(set(layers)) > 1:
            raise TypeError("one layer, please")
        return Units.one(rule, layers)

    monkeypatch.setattr(Normalised, "units", picky)
    found = attack(Own(1.0).plan(**SHAPE), 2000, 0)
    assert "not attacked: its rule and state on adversarial records (TypeError" in found.notes[0]
    assert "please" not in found.notes[0]


def test_a_sampler_that_says_poisson_is_held_to_it() -> None:
    shape: dict[str, Any] = {**SHAPE, "batch_size": 30}
    assert attack(Own(1.0, everybody=True).plan(**shape), 4000, 0).verdict == "refuted"


def test_another_sampler_is_left_out_and_named() -> None:
    shape: dict[str, Any] = {**SHAPE, "batch_size": 60, "neighboring": "replace-one"}
    for factor, verdict in ((1.0, "consistent"), (10.0, "refuted")):
        found = attack(SubsetSGD(1.0, factor=factor).plan(**shape), 4000, 0)
        assert found.verdict == verdict
        assert any("not attacked: who takes part, by Subsets" in note for note in found.notes)


def test_an_attack_that_does_not_fit_names_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IndependentNoise, "audit_family", lambda *_: "fixed order")
    shape: dict[str, Any] = {**SHAPE, "batch_size": 60, "neighboring": "replace-one"}
    with pytest.raises(ValueError, match="by Subsets is not one Gaussian.*everybody"):
        attack(SubsetSGD(1.0).plan(**shape), 2000, 0)


@pytest.fixture
def leaky() -> Iterator[str]:
    @dataclass(frozen=True)
    class Leaky(Own):
        name = "leaky-sgd"
        leaks: bool = True

    register_method(Leaky)
    yield Leaky.name
    registry.unregister_method(Leaky.name)


def test_the_command_says_what_refuted_it(leaky: str, tmp_path: Any) -> None:
    said = run("audit", leaky, "--trials", "2000", "--out", tmp_path, code=1, columns=900)
    assert "refuted (should be consistent); with the noise off, one record moves" in said


def test_the_library_is_attacked_as_before() -> None:
    found = attack(DPSGD(1.0).plan(**SHAPE), 2000, 0)
    assert found.notes == ()


def test_a_policy_of_no_known_class_is_refused_by_those_that_there_are() -> None:
    class Policy:
        start = 1.0

        def begin(self) -> None: ...

    with pytest.raises(ValueError, match="PrivateQuantile, PlannedClipNorm.*got a Policy"):
        DPSGD(clip_norm=Policy())  # type: ignore[arg-type]
