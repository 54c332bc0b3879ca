"""The other audits: what they say of good and of bad material. (tests/audit/test_mutants.py has
the library's own.)
"""

import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpoptim.audit import audit_noise, audit_participation, audit_replay, audit_sensitivity
from dpoptim.audit.noise import edge_pvalues, gate_noise, noise_pvalues, tail_pvalues
from dpoptim.audit.participation import participation, participation_pvalues
from dpoptim.audit.replay import differences, observe
from dpoptim.audit.sensitivity import KINDS
from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.noise.stream import KeyStream
from support import CASES, record_loss

LEVEL = 1e-6 / 30  # of one check; each detector makes fewer than 30


# ---- sensitivity --------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number].name)
def test_no_supported_layer_exceeds_the_bound(number: int) -> None:
    case, style = CASES[number], ("flat", "automatic")[number % 2]
    torch.manual_seed(0)
    batch = case.inputs(4, torch.float64)
    model = case.build().double()
    loss = lambda m, b: record_loss(m(b[0]), b[1]).sum()  # noqa: E731
    result = audit_sensitivity(model, batch, loss, Clipping(0.1, style), records=1)  # type: ignore[arg-type]
    assert result.verdict == "consistent"
    assert 0.5 < result.largest_ratio <= 1
    assert result.trials == len(KINDS)
    assert all(p.grad is None for p in model.parameters())


def test_a_coupled_loss_is_refuted() -> None:
    """What the engine cannot see: a loss that is not a sum of one term per record."""
    torch.manual_seed(0)

    def contrastive(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        out = model(batch[0])
        return 10 * (out @ out.T).square().sum()

    model = nn.Linear(4, 3).double()
    result = audit_sensitivity(model, (torch.randn(6, 4).double(),), contrastive, 1.0)
    assert result.verdict == "refuted"
    assert result.largest_ratio > 1.1


def test_sensitivity_says_no_to_unusable_arguments() -> None:
    model, x = nn.Linear(2, 1), torch.ones(3, 2)
    with pytest.raises(ValueError, match="unknown"):
        audit_sensitivity(model, (x,), lambda m, b: m(b[0]).sum(), 1.0, kinds=("weird",))
    with pytest.raises(ValueError, match="common length"):
        audit_sensitivity(model, (x, x[:2]), lambda m, b: m(b[0]).sum(), 1.0)


def test_a_refusal_is_not_a_finding() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(PrivacyError, match="batch"):
        audit_sensitivity(model, (torch.ones(3, 2),), lambda m, b: m(b[0]).sum(), 1.0)


# ---- replay -------------------------------------------------------------------------------------


def prints(x: int) -> None:
    print(x)


def logs(x: int) -> None:
    logging.getLogger("somewhere").debug("%d", x)


def warns(x: int) -> None:
    warnings.warn(f"{x}", stacklevel=1)


def raises(x: int) -> None:
    raise KeyError(x)


def writes(x: int) -> None:
    Path("out.txt").write_text(str(x))


def names(x: int) -> None:
    Path(f"{x}.txt").write_text("")


def returns(x: int) -> dict[str, object]:
    return {"a": [1, {"b": torch.full((2,), float(x))}], "c": 3}


@pytest.mark.parametrize(
    ("leak", "where"),
    [
        (prints, "printed"),
        (logs, "logged[0]"),
        (warns, "warned[0]"),
        (raises, "raised"),
        (writes, "files['out.txt']"),
        (names, "keys of files"),
        (returns, "returned['a'][1]['b']"),
    ],
)
def test_replay_finds_every_kind_of_leak(leak: object, where: str) -> None:
    assert audit_replay(leak, 1, 1).verdict == "consistent"  # type: ignore[arg-type]
    assert audit_replay(leak, 1, 2).differences == (where,)  # type: ignore[arg-type]


def test_replay_does_not_mind_what_is_charged_or_seeded() -> None:
    assert audit_replay(returns, 1, 2, charged=("a",)).verdict == "consistent"
    assert audit_replay(lambda x: (torch.rand(3), np.random.rand()), 1, 2).verdict == "consistent"


def test_replay_compares_bit_by_bit() -> None:
    assert differences("x", float("nan"), float("nan")) == []
    assert differences("x", 0.0, -0.0) == ["x"]
    assert differences("x", torch.tensor([0.0]), torch.tensor([-0.0])) == ["x"]
    assert differences("x", np.ones(2), np.ones(3)) == ["x"]
    assert differences("x", 1, 1.0) == ["x"]
    assert differences("x", (1, 2), (1,)) == ["keys of x"]


def test_replay_leaves_logging_folder_and_generators_as_they_were() -> None:
    root, folder = logging.getLogger(), Path.cwd()
    state = torch.random.get_rng_state()
    before = (root.level, list(root.handlers))
    observe(writes, 1)
    assert (root.level, root.handlers) == before
    assert Path.cwd() == folder
    assert torch.equal(state, torch.random.get_rng_state())


# ---- noise --------------------------------------------------------------------------------------


def test_the_gates_noise_passes_with_keys_from_the_system() -> None:
    """False alarm: 1e-6."""
    assert audit_noise().verdict == "consistent"


@pytest.mark.variants
@pytest.mark.slow
def test_no_false_alarm_in_thirty_repetitions() -> None:
    """Of the checks on fresh seeds, at the level of the detector: 3e-8 each, so below 3e-5 for all
    of them. Checks that are wrong once in ten, or oftener, are found with a chance of 0.96.
    """
    for seed in range(30):
        pvalues = noise_pvalues(gate_noise(3, noise_seed=seed, shapes=((30, 20), (50,), (1, 600))))
        pvalues |= tail_pvalues(KeyStream.from_seed(seed, "test of the audit"), 20_000)
        pvalues |= edge_pvalues(KeyStream.from_seed(seed, "test of the edges"), 1 << 21)
        assert min(pvalues.values()) > LEVEL
        took_part = participation(records=60, batch_size=15, steps=8, noise_seed=seed)
        assert min(participation_pvalues(took_part, 0.25).values()) > LEVEL


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (lambda z: 1.03 * z, "standard deviation"),
        (lambda z: z + 0.1, "mean"),
        (lambda z: np.concatenate([z[:1], z[:-1]]), "any two steps are independent"),
        (lambda z: np.concatenate([z[:, :5000], z[:, :5000]], 1), "no stretch is repeated"),
        (lambda z: np.clip(z, -3, 3), "draws beyond 3 sigma"),
        (lambda z: np.sign(z) * np.sqrt(np.abs(z)), "law"),
        (lambda z: z.astype(np.float32).astype(float), "resolution"),
    ],
)
def test_each_check_finds_its_fault(fault: object, check: str) -> None:
    noise = np.random.default_rng(0).normal(size=(6, 10_000))
    assert min(noise_pvalues([noise]).values()) > LEVEL
    pvalues = noise_pvalues([fault(noise)])  # type: ignore[operator]
    assert min(p for name, p in pvalues.items() if check in name) < LEVEL


def test_two_tensors_with_one_noise_are_found() -> None:
    noise = np.random.default_rng(0).normal(size=(6, 1000))
    assert noise_pvalues([noise, noise.copy()])["tensors 0 and 1 are independent"] < LEVEL


def test_a_single_step_has_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        audit_noise(steps=1)


# ---- participation ------------------------------------------------------------------------------


def test_participation_passes_with_coins_from_the_system() -> None:
    """False alarm: 1e-6."""
    result = audit_participation(records=200, batch_size=20, steps=60)
    assert result.verdict == "consistent"
    assert result.steps_missing == 0


@pytest.mark.parametrize(("batch_size", "steps"), [(20, 10), (5, 1)])
def test_participation_needs_coins_to_test(batch_size: int, steps: int) -> None:
    with pytest.raises(ValueError, match="use a smaller batch, or more steps"):
        audit_participation(records=20, batch_size=batch_size, steps=steps)


def test_a_small_bias_of_the_coins_is_found() -> None:
    rng = np.random.default_rng(0)
    assert (
        min(participation_pvalues((rng.random((400, 400)) < 0.25).astype(float), 0.25).values())
        > LEVEL
    )
    assert (
        participation_pvalues((rng.random((400, 400)) < 0.265).astype(float), 0.25)["sample rate"]
        < LEVEL
    )


def test_a_record_that_counts_twice_is_found() -> None:
    took_part = (np.random.default_rng(0).random((50, 50)) < 0.25).astype(float)
    took_part[3, 4] = 2.0
    assert participation_pvalues(took_part, 0.25)["each record counts once or not at all"] == 0
