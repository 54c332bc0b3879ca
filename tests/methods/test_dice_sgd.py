"""DiceSGD: the paper's algorithm, a guarantee that holds, and the paper's, which does not."""

import dataclasses
import io
import json
import math
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import ndtr
from sklearn.base import clone
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.accounting.gaussian import gdp_delta, gdp_epsilon
from dpoptim.clipping import SplitClipping
from dpoptim.documents import with_digest
from dpoptim.errors import LedgerError
from dpoptim.estimators import DPSGDClassifier
from dpoptim.gradients.engine import Engine
from dpoptim.methods.error_feedback import ErrorFeedback, HiddenStateNoise
from dpoptim.sampling import FixedBatches
from support import CASES, Case, joint_norm, record_loss

N, B = 12, 4
REFUTED = "unproven (counterexample known)"


def plan_of(method: dpoptim.DiceSGD | None = None, **changes: Any) -> dpoptim.Plan:
    arguments = {
        "n": N,
        "batch_size": B,
        "epochs": 2,
        "noise_multiplier": 2.0,
        "delta": 1e-3,
        **changes,
    }
    return (method or dpoptim.DiceSGD(1.0, 0.5, 3.0)).plan(
        **{k: v for k, v in arguments.items() if v is not ...}
    )


def paper_plan(method: dpoptim.DiceSGD | None = None, **changes: Any) -> dpoptim.Plan:
    method = method or paper()
    return plan_of(method, **{"n": 1000, "batch_size": 20, "epochs": ..., "steps": 400, **changes})


def paper(**changes: Any) -> dpoptim.DiceSGD:
    with pytest.warns(UserWarning, match="theorem is false"):
        return dpoptim.DiceSGD(
            **{"clip_norm": 1.0, "feedback_clip": 1.0, "accounting": "paper", **changes}
        )


def released_means(
    plan: dpoptim.Plan, x: Tensor, *, noise_seed: int = 3, physical_batch_size: int | None = None
) -> Tensor:
    """What each step releases, when record i's gradient is x[i] whatever the model: shape (steps,
    d).
    """
    model = nn.Linear(x.shape[1], 1, bias=False, dtype=x.dtype)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps = []
    with dpoptim.attach(
        plan, model, optimizer, TensorDataset(x), loss_reduction="sum", noise_seed=noise_seed
    ) as private:
        for (batch,) in private.batches(physical_batch_size=physical_batch_size):
            model(batch).sum().backward()
            optimizer.step()
            if private.finished_step:
                steps.append(-model.weight.detach()[0].double().clone())
                with torch.no_grad():
                    model.weight.zero_()
    return torch.stack(steps)


# ---- the algorithm ------------------------------------------------------------------------------


def test_without_noise_it_is_the_papers_algorithm_2() -> None:
    """R = inf, no reset: x and e of a plain transcription, on a model whose gradients depend on
    x.
    """
    torch.manual_seed(0)
    C1, C2, lr = 0.3, 0.4, 0.5
    x, y = torch.randn(N, 3).double() * 2, torch.randn(N).double()
    method = dpoptim.DiceSGD(C1, C2, math.inf, reset_each_epoch=False)
    plan = plan_of(method, noise_multiplier=0, epochs=4)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    w = model.weight.detach()[0].clone()
    e = torch.zeros(3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def clip(g: Tensor, C: float) -> Tensor:
        return g * min(1.0, C / float(g.norm()))

    fed_back = 0.0
    with dpoptim.attach(
        plan, model, optimizer, TensorDataset(x, y), loss_reduction="sum"
    ) as private:
        for bx, by in private.batches():
            (0.5 * (model(bx)[:, 0] - by).square()).sum().backward()
            optimizer.step()
            gradients = [(a @ w - b) * a for a, b in zip(bx, by, strict=True)]
            v = sum(clip(g, C1) for g in gradients) / B + (clip(e, C2) if e.any() else 0)
            w = w - lr * v
            e = e + sum(gradients) / B - v
            fed_back = max(fed_back, float(e.norm()))
            assert torch.allclose(model.weight.detach()[0], w, rtol=1e-4, atol=1e-5)
    assert fed_back > C2  # the projection was at work


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_any_optimizer_sees_the_noisy_sum_and_nothing_else(optimizer: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(N, 3)
    made = optimizer(model.parameters(), lr=0.01)
    before = set(model.state_dict())
    with dpoptim.attach(
        plan_of(), model, made, TensorDataset(x), ledger=dpoptim.Ledger(neighboring="zero-out")
    ) as private:
        for (batch,) in private.batches():
            model(batch).sum(1).mean().backward()
            made.step()
        assert private.steps_done == 6
        assert private.spent().status == "proven"
        assert set(model.state_dict()) == before
        sizes = {p.shape for p in model.parameters()}
        for state in made.state_dict()["state"].values():
            assert all(
                not torch.is_tensor(v) or v.dim() == 0 or v.shape in sizes for v in state.values()
            )


def test_a_refused_charge_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were e moved by a step that was not released, resets would no longer fall between passes."""
    x = torch.randn(N, 2, dtype=torch.float64) * 5
    plan = plan_of()
    expected = released_means(plan, x)
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ledger = dpoptim.Ledger(neighboring="zero-out")
    reserve, refusals = ledger.reserve, [True, True]

    def sometimes(*args: Any, **options: Any) -> Any:
        if refusals:
            refusals.pop()
            raise LedgerError("busy")
        return reserve(*args, **options)

    monkeypatch.setattr(ledger, "reserve", sometimes)
    steps = []
    nn.init.zeros_(model.weight)
    with dpoptim.attach(
        plan, model, optimizer, TensorDataset(x), loss_reduction="sum", noise_seed=3, ledger=ledger
    ) as private:
        for (batch,) in private.batches():
            model(batch).sum().backward()
            while True:
                try:
                    optimizer.step()
                    break
                except LedgerError:
                    continue
            steps.append(-model.weight.detach()[0].clone())
            with torch.no_grad():
                model.weight.zero_()
    assert torch.allclose(torch.stack(steps), expected)


def test_pieces_that_memory_holds_change_nothing() -> None:
    x = torch.randn(N, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 5
    whole, parts = (
        released_means(plan_of(noise_multiplier=0), x, physical_batch_size=size)
        for size in (None, 2)
    )
    assert torch.allclose(whole, parts, rtol=1e-9)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_two_sums_are_the_gradient(case: Case) -> None:
    """R infinite, every layer: what is clipped and what is left add up to the sum of the
    gradients, as autograd has it.
    """
    torch.manual_seed(0)
    model = case.build().double()
    x, target = case.inputs(5, torch.float64)
    engine = Engine(model, SplitClipping(1e-3, math.inf), capacity=5)
    engine.attach()
    try:
        engine.begin_microbatch(5)
        record_loss(model(x), target).mean().backward()
        kept, rest = (engine.split(part) for part in engine.take_sums())
    finally:
        engine.detach()
    plain = torch.autograd.grad(
        record_loss(model(x), target).sum(),
        engine.parameters,
        allow_unused=True,
        materialize_grads=True,
    )
    assert joint_norm(kept) <= 5 * 1e-3
    assert joint_norm(rest) > 0
    for a, b, total in zip(kept, rest, plain, strict=True):
        assert torch.allclose(a + b, total, rtol=1e-9, atol=1e-9)


# ---- the guarantee that holds -------------------------------------------------------------------


def test_the_run_is_one_gaussian() -> None:
    for relation in ("zero-out", "replace-one"):
        plan = plan_of(neighboring=relation)
        assert plan.event == dp_accounting.GaussianDpEvent(2.0)
        assert plan.guarantee.status == "proven"
        calibrated = plan_of(noise_multiplier=..., epsilon=1.5, neighboring=relation)
        assert 0.99 * 1.5 <= calibrated.guarantee.epsilon <= 1.5
        for each in (plan, calibrated):
            assert dpoptim.Plan.from_json(each.to_json()) == each
    assert plan_of(dpoptim.DiceSGD(1.0, residual_clip=math.inf)).guarantee.epsilon < math.inf


def adversarial(kind: str) -> Tensor:
    return {
        "huge": torch.tensor([1e30, 1e30]),
        "negative": torch.tensor([-1e18, 1e17]),
        "nan": torch.tensor([math.nan, 1.0]),
        "infinite": torch.tensor([math.inf, 0.0]),
        "just above": torch.tensor([1.0001, 0.0]),
        "between": torch.tensor([0.0, 1.7]),
        "short": torch.tensor([0.1, 0.2]),
        "zero": torch.zeros(2),
    }[kind]


@settings(max_examples=20)
@given(
    kind=st.sampled_from(
        ["huge", "negative", "nan", "infinite", "just above", "between", "short", "zero"]
    ),
    clip=st.sampled_from([0.5, 1.0]),
    feedback=st.sampled_from([0.01, 0.3, 5.0]),
    residual=st.sampled_from([1.0, 2.0, 6.0]),
    automatic=st.booleans(),
    reset=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 5),
)
@example(
    kind="short",
    clip=1.0,
    feedback=5.0,
    residual=6.0,
    automatic=True,
    reset=True,
    dtype=torch.float64,
    seed=0,
    # made longer by the scaling, so that nearly R and not R - C1 is left of it if C1 clips what
    # came before
)
def test_one_record_moves_the_true_run_by_at_most_s(
    kind: str,
    clip: float,
    feedback: float,
    residual: float,
    automatic: bool,
    reset: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Noise off, through attach: squared differences of all released sums together, zeroed against
    any value.
    """
    method = dpoptim.DiceSGD(
        clip,
        feedback,
        residual,
        clipping="automatic" if automatic else "flat",
        reset_each_epoch=reset,
    )
    plan = plan_of(method, epochs=3, noise_multiplier=0)
    x = torch.randn(N, 2, generator=torch.Generator().manual_seed(seed)).to(dtype) * 2
    without, record = x.clone(), x.clone()
    without[5], record[5] = 0, adversarial(kind).to(dtype)
    moved = (
        released_means(plan, record, noise_seed=seed)
        - released_means(plan, without, noise_seed=seed)
    ) * B
    assert torch.isfinite(moved).all()
    allowed = plan.mechanism.sensitivity(plan.sampler, plan.steps)  # type: ignore[attr-defined]
    # .grad is float32 where the model is: 2^-23 of each mean's size.
    slack = 1e-5 * B * (clip + feedback) if dtype == torch.float32 else 1e-12
    assert float(moved.square().sum().sqrt()) <= allowed + slack


def test_the_bound_is_nearly_reached() -> None:
    """One pass: the record in the first step, pulled out of e at once."""
    plan = plan_of(dpoptim.DiceSGD(1.0, 1.0, 2.0), epochs=1, noise_multiplier=0)
    x = torch.zeros(N, 2, dtype=torch.float64)
    ratios = []
    for record in range(N):
        other = x.clone()
        other[record, 0] = 100.0
        moved = (released_means(plan, other) - released_means(plan, x)) * B
        ratios.append(
            float(moved.square().sum().sqrt())
            / plan.mechanism.sensitivity(plan.sampler, plan.steps)
        )  # type: ignore[attr-defined]
    assert 0.999 < max(ratios) <= 1


def worst_share(method: dpoptim.DiceSGD, *, n: int, batch_size: int, epochs: int) -> float:
    """Of S, over the records: how far the true run moves when one large gradient is added to
    zeros.
    """
    plan = plan_of(method, n=n, batch_size=batch_size, epochs=epochs, noise_multiplier=0)
    x = torch.zeros(n, 1, dtype=torch.float64)
    allowed = plan.mechanism.sensitivity(plan.sampler, plan.steps)  # type: ignore[attr-defined]
    shares = []
    for record in range(0, n, max(1, n // 4)):
        other = x.clone()
        other[record] = 100.0
        shares.append(float(released_means(plan, other).norm()) * batch_size / allowed)
    return max(shares)


def unclipped_rest(rule: SplitClipping, squared: Tensor, margin: float) -> Tensor:
    kept = (rule.norm / squared.sqrt()).clamp(max=1.0)
    return torch.stack([kept, 1 - kept])


def normalised_share(memory: ErrorFeedback, length: float, radius: float) -> float:
    return radius / length if length > 0 else 1.0


def participates_once(sampler: FixedBatches, steps: int) -> int:
    return 1


honest_sensitivity = HiddenStateNoise.sensitivity


def on_the_scale_of_means(method: HiddenStateNoise, batches: FixedBatches, steps: int) -> float:
    return honest_sensitivity(method, batches, steps) / batches.batch_size


def never_reset(method: dpoptim.DiceSGD, plan: dpoptim.Plan) -> ErrorFeedback:
    return ErrorFeedback(0.2 * plan.batch_size, None)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "method", "shape"),
    [
        (SplitClipping, "factors", unclipped_rest, dpoptim.DiceSGD(1.0, 2.0, 2.0), (12, 4, 1)),
        (ErrorFeedback, "_share", normalised_share, dpoptim.DiceSGD(1.0, 0.3, 3.0), (40, 1, 1)),
        (
            FixedBatches,
            "participations",
            participates_once,
            dpoptim.DiceSGD(1.0, 1.0, 2.0),
            (12, 4, 3),
        ),
        (
            HiddenStateNoise,
            "sensitivity",
            on_the_scale_of_means,
            dpoptim.DiceSGD(1.0, 1.0, 2.0),
            (12, 4, 1),
        ),
        (
            dpoptim.DiceSGD,
            "sensitive_state",
            never_reset,
            dpoptim.DiceSGD(1.0, 0.2, 3.0),
            (4, 4, 6),
        ),
    ],
    ids=[
        "residual not clipped",
        "e normalised",
        "k under-counted",
        "noise on the mean's scale",
        "e never reset",
    ],
)
def test_seeded_faults_are_found_in_the_true_run(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    fault: Any,
    method: dpoptim.DiceSGD,
    shape: tuple[int, int, int],
) -> None:
    n, batch_size, epochs = shape
    assert worst_share(method, n=n, batch_size=batch_size, epochs=epochs) <= 1
    monkeypatch.setattr(owner, name, fault)
    assert worst_share(method, n=n, batch_size=batch_size, epochs=epochs) > 1.02


@settings(max_examples=200)
@given(
    exponent=st.floats(-30, 40),
    clip=st.floats(1e-3, 1e3),
    ratio=st.floats(1.01, 1e6),
    automatic=st.booleans(),
    margin=st.sampled_from([2.0**-20, 2.0**-8, 0.3]),
)
def test_both_parts_of_a_gradient_are_bounded(
    exponent: float, clip: float, ratio: float, automatic: bool, margin: float
) -> None:
    rule = SplitClipping(clip, clip * ratio, "automatic" if automatic else "flat")
    norm = torch.tensor([10.0**exponent], dtype=torch.float64)
    kept, rest = rule.factors(norm.square(), margin).float().double() * norm
    s = 1 - math.sqrt(2) * margin
    assert 0 <= float(kept) <= rule.norm * s
    assert 0 <= float(rest) <= (rule.residual_clip - rule.norm) * s


def test_records_that_are_not_finite_count_as_zero_in_both_parts() -> None:
    for rule in (SplitClipping(1.0, math.inf), SplitClipping(1.0, 2.0, "automatic")):
        factors = rule.factors(torch.tensor([math.nan, math.inf, 1.0]).double(), 2.0**-20)
        assert factors[:, :2].eq(0).all()
        assert factors[0, 2] > 0


def test_nothing_but_the_model_depends_on_a_record() -> None:
    """Replay: output, guarantee, basis and state keys of seeded runs on neighbouring data."""

    def seen(x: Tensor) -> dict[str, Any]:
        output = io.StringIO()
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        with (
            redirect_stdout(output),
            redirect_stderr(output),
            dpoptim.attach(plan_of(), model, optimizer, TensorDataset(x), noise_seed=1) as private,
        ):
            for (batch,) in private.batches():
                model(batch).mean().backward()
                optimizer.step()
            return {
                "spent": str(private.spent()),
                "remaining": private.remaining(),
                "basis": private.basis,
                "steps": private.steps_done,
                "keys": sorted(model.state_dict())
                + sorted(map(str, optimizer.state_dict()["state"])),
                "output": output.getvalue(),
            }

    x = torch.randn(N, 2)
    for value in (1e30, math.nan, 0.0):
        other = x.clone()
        other[3] = value
        assert seen(other) == seen(x)


# ---- the paper's, which does not ----------------------------------------------------------------


def test_the_papers_noise_is_what_the_paper_prints() -> None:
    T, n, delta, epsilon, C1, C2, batch = 400, 1000, 1e-5, 1.0, 0.5, 2.0, 20
    plan = paper_plan(
        paper(clip_norm=C1, feedback_clip=C2), noise_multiplier=..., epsilon=epsilon, delta=delta
    )
    squared = 32 * T * (C1**2 + 2 * (batch * C2) ** 2) * math.log(1 / delta) / (n**2 * epsilon**2)
    assert plan.query.standard_deviation / batch == pytest.approx(math.sqrt(squared))
    assert plan.guarantee.epsilon == pytest.approx(epsilon)
    automatic = paper_plan(
        paper(clipping="automatic"), noise_multiplier=..., epsilon=epsilon, delta=delta
    )
    printed = math.sqrt(96 * T * math.log(1 / delta)) / (n * epsilon)
    assert automatic.query.standard_deviation / batch == pytest.approx(printed)


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_the_papers_guarantee_is_marked_wherever_it_is_printed(clipping: str) -> None:
    plan = paper_plan(paper(clipping=clipping), delta=1e-5)
    assert plan.guarantee.status == REFUTED
    assert REFUTED in plan.describe()
    assert "in words" not in plan.describe()
    assert plan.guarantee_at(1e-7).status == REFUTED
    assert any(item.kind == "unproven" for item in plan.basis)
    with pytest.warns(UserWarning, match="theorem is false"):
        assert dpoptim.Plan.from_json(plan.to_json()) == plan
    forged = json.loads(plan.to_json())
    forged["guarantee"]["status"] = "proven"
    with (
        pytest.warns(UserWarning, match="theorem is false"),
        pytest.raises(ValueError, match="it was edited"),
    ):
        dpoptim.Plan.from_json(json.dumps(with_digest(forged)))
    model = nn.Linear(1, 1)
    with dpoptim.attach(
        plan,
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        TensorDataset(torch.zeros(1000, 1)),
    ) as private:
        for (batch,) in private.batches():
            model(batch).sum().backward()
            private.optimizers[0].step()
            break
        for delta in (None, 1e-6):
            assert REFUTED in str(private.spent(delta))


def canary_shift(plan: dpoptim.Plan, seed: int) -> tuple[int, np.ndarray]:
    """(first step of the canary, shift of each released mean) of the true code path without noise;
    1-D, others zero.
    """
    x = torch.zeros(plan.n, 1, dtype=torch.float64)
    x[17] = 1e6
    quiet = dataclasses.replace(plan, noise_multiplier=0.0)
    shift = released_means(quiet, x, noise_seed=seed)[:, 0].numpy()
    return int(np.flatnonzero(shift)[0]), shift


def true_epsilon(plan: dpoptim.Plan, delta: float) -> float:
    """A lower bound on epsilon at ``delta``, without sampling error: the statistic is the sum of
    all that is released.

    Given its first step J the canary shifts every later step by C2 at least (`canary_shift`), so
    the sum by C2 (T - 1 - J); J is geometric. Threshold tests on the sum give epsilon >=
    log((power - delta) / level).
    """
    deviation = plan.query.standard_deviation / plan.batch_size * math.sqrt(plan.steps)
    first = np.arange(plan.steps)
    q = plan.batch_size / plan.n
    chance, shift = q * (1 - q) ** first, 1.0 * (plan.steps - 1 - first)
    levels: Iterator[float] = np.linspace(0, 20, 400)  # type: ignore[assignment]
    bounds = [0.0]
    for cut in levels:
        power, level = float(chance @ ndtr(shift / deviation - cut)), float(ndtr(-cut))
        if power > delta and level > 0:
            bounds.append(math.log((power - delta) / level))
    return max(bounds)


@pytest.mark.variants
@pytest.mark.parametrize(
    ("clipping", "at_least"),
    [("flat", 4.5), pytest.param("automatic", 9.3, marks=pytest.mark.variants)],
)
def test_the_papers_guarantee_is_refuted_for_certain(clipping: str, at_least: float) -> None:
    """Section 3.2's setting of a canary that fills e: a claimed epsilon of 1 is in truth several
    times larger.
    """
    plan = paper_plan(paper(clipping=clipping), noise_multiplier=..., epsilon=1.0, delta=1e-5)
    assert plan.guarantee.epsilon == pytest.approx(1.0)
    for seed in range(2):
        first, shift = canary_shift(plan, seed)
        assert np.all(shift[first + 1 :] >= 1.0 - 1e-4)  # C2 in every step ever after
        assert not shift[:first].any()
    lower = true_epsilon(plan, 1e-5)
    assert lower > at_least
    # What the ledger is charged covers it.
    charged = dpoptim.accounting.compute_epsilon(plan.event, 1e-5, plan.neighboring).epsilon
    assert charged > lower


@pytest.mark.thinned(2)
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("reset", [True, False])
def test_the_same_attack_does_not_refute_ours(epochs: int, reset: bool) -> None:
    method = dpoptim.DiceSGD(1.0, 1.0, 21.0, reset_each_epoch=reset)
    plan = plan_of(
        method, n=200, batch_size=10, epochs=epochs, noise_multiplier=..., epsilon=1.0, delta=1e-5
    )
    strongest = 0.0
    for seed in range(3):
        _, shift = canary_shift(plan, seed)
        mu = float(np.linalg.norm(shift)) * plan.batch_size / plan.query.standard_deviation
        strongest = max(strongest, mu)
        assert gdp_epsilon(mu, 1e-5) <= plan.guarantee.epsilon  # the best attack on these shifts
        assert gdp_delta(mu, plan.guarantee.epsilon) <= 1e-5
    if epochs == 1:
        # the attack is not empty: a bound five times smaller would be refuted
        assert gdp_epsilon(strongest, 1e-5) > 0.2


# ---- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clip_norm": 0}, "clip_norm must be"),
        ({"feedback_clip": math.inf}, "feedback_clip must be"),
        ({"feedback_clip": -1}, "feedback_clip must be"),
        ({"residual_clip": 0.5}, "must be at least clip_norm"),
        ({"residual_clip": 1.0 + 1e-9}, "too close to clip_norm"),
        ({"accounting": "guess"}, "accounting must be"),
        ({"clipping": "soft"}, "clipping must be"),
        ({"clipping": "automatic", "residual_clip": math.inf}, "must be finite"),
    ],
)
def test_bad_settings(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dpoptim.DiceSGD(**{"clip_norm": 1.0, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"neighboring": "add-or-remove-one"}, "no guarantee under it is known"),
        ({"epochs": 1.5}, "whole number"),
        ({"epochs": math.inf}, "finite number"),
    ],
)
def test_bad_plans(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_of(**changes)
    with pytest.raises(ValueError, match="no guarantee under it is known"):
        dataclasses.replace(plan_of(), neighboring="add-or-remove-one")
    with pytest.raises(ValueError, match="at most 1/5"):
        paper_plan(batch_size=500)


def test_n_must_be_that_of_the_data() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(
        ValueError, match=f"train_set has 11 records but the plan was made for n={N}"
    ):
        dpoptim.attach(
            plan_of(),
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            TensorDataset(torch.zeros(11, 2)),
        )


@pytest.mark.filterwarnings("ignore:DiceSGD.accounting='paper'")
def test_a_default_batch_is_one_that_the_papers_theorem_takes() -> None:
    """Of a small table the usual batch is more than the fifth that it is for."""
    x = np.random.default_rng(0).uniform(-1, 1, (700, 2))
    model = DPSGDClassifier(
        **{"epsilon": 2.0, "delta": 1e-5, "classes": [0, 1], "hidden_layer_sizes": (), "epochs": 1},
        method="dice-sgd",
        method_options={"accounting": "paper"},
        noise_seed=0,
    )
    with pytest.raises(ValueError, match="Fix: a batch_size of at most n / 5"):
        clone(model).set_params(batch_size=141).fit(x, x[:, 0] > 0)
    assert model.fit(x, x[:, 0] > 0).privacy_.status == "unproven (counterexample known)"
    assert dpoptim.DiceSGD(1.0).batch_within(512, 700) == 512
    assert dpoptim.DiceSGD(1.0, accounting="paper").batch_within(512, 35) == 7
