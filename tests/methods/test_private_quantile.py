"""The private clip norm: it is the quantile, it costs what the plan says, and one record moves its
queries by at most 1.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.clipping import Clipping
from dpoptim.gate import Gate
from dpoptim.gradients.arithmetic.products import COMMON_FACTOR_ERROR
from dpoptim.gradients.engine import Engine
from dpoptim.methods.private_quantile import BINS, QuantileSearch, histogram, quantile_of
from spies import worlds_of_queries

NORMS = st.floats(min_value=0, allow_infinity=True) | st.just(math.nan)
WAYS = ("at the start", "all along")


def data(n: int = 2000) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=generator) * torch.rand(n, 1, generator=generator) * 4
    return TensorDataset(x, (x[:, 0] > 0).long())


def run(
    plan: dpoptim.Plan, train_set: TensorDataset, *, noise_seed: int | None = 0
) -> tuple[nn.Module, list[float], Any]:
    model = nn.Linear(5, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9, weight_decay=0.1)
    norms = []
    with dpoptim.attach(plan, model, optimizer, train_set, noise_seed=noise_seed) as private:
        for x, y in private.batches():
            before = model.weight.detach().clone()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if not private.finished_step:
                # no momentum, no weight decay: nothing moved
                assert torch.equal(before, model.weight.detach())
            norms.append(private.clip_norm)
        return model, norms, private.spent()


def gradient_norms(train_set: TensorDataset) -> Tensor:
    """At zero weights: |p - e_y| |(x, 1)|, p uniform."""
    x = train_set.tensors[0]
    return math.sqrt(0.5) * torch.hypot(x.norm(dim=1), torch.ones(len(x)))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("when", WAYS)
def test_the_quantile_is_found(when: Any, quantile: float) -> None:
    train_set = data()
    choice = dpoptim.PrivateQuantile(quantile, share=0.2, when=when, start=0.3)
    plan = dpoptim.DPSGD(choice).plan(
        n=2000, batch_size=500, steps=100, noise_multiplier=0.7, delta=1e-5
    )
    _, norms, _ = run(plan, train_set)
    share = float((gradient_norms(train_set) <= norms[-1]).double().mean())
    assert abs(share - quantile) < 0.1
    if when == "at the start":
        assert math.isnan(norms[18])
        # twenty of the hundred steps measure, and from there it stays
        assert len(set(norms[19:])) == 1


@pytest.mark.parametrize("when", WAYS)
def test_it_costs_what_a_fixed_clip_norm_costs(when: Any) -> None:
    settings: Any = {"n": 2000, "batch_size": 500, "epochs": 20, "epsilon": 2.0, "delta": 1e-5}
    fixed = dpoptim.DPSGD(1.0).plan(**settings)
    plan = dpoptim.DPSGD(dpoptim.PrivateQuantile(0.5, when=when)).plan(**settings)
    assert plan.guarantee == fixed.guarantee
    assert plan.noise_multiplier == fixed.noise_multiplier
    assert dpoptim.Plan.from_json(plan.to_json()) == plan
    text = plan.describe()
    assert "PrivateQuantile(quantile=0.5" in text
    assert "found from noisy counts" in text
    *_, spent = run(plan, data())
    assert spent.epsilon == fixed.guarantee.epsilon


@pytest.mark.parametrize("when", WAYS)
def test_every_release_is_one_query_of_norm_one(when: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours, through the true run: one record moves what reaches the gate by at most 1, at
    every step.
    """
    worlds: list[list[Tensor]] = []

    def spy(self: Gate, sums: list[Tensor]) -> list[Tensor]:
        assert self.query.noise_multiplier == 0.7
        assert self.query.norm_bound == 1.0
        worlds[-1].append(torch.cat([total.clone() for total in sums]))
        self.released += 1
        # the same in both worlds, so that they stay comparable
        return [torch.full_like(total, 3.0) for total in sums]

    monkeypatch.setattr(Gate, "release_sum", spy)
    choice = dpoptim.PrivateQuantile(0.4, share=0.3, when=when)
    for hostile in (1.0, 1e4, 1e-6, math.nan, math.inf):
        worlds.clear()
        for world in (0, 1):
            train_set = data(60)
            if world:
                train_set.tensors[0][7] = hostile
            plan = (
                dpoptim.DPSGD(choice).plan(
                    n=60,
                    batch_size=60,
                    steps=8,
                    noise_multiplier=0.7,
                    delta=1e-5,
                    neighboring="replace-one",
                )
                if when == "all along"
                else dpoptim.Plan(dpoptim.DPSGD(choice), 60, 60, 8, 0.7, "replace-one", 1e-5)
            )
            worlds.append([])
            run(plan, train_set)
        moved = [float((a - b).norm()) for a, b in zip(*worlds, strict=True)]
        assert len(moved) == 8
        assert max(moved) <= 2.0  # each of the two records has norm 1
        assert max(moved) > 0.01


@settings(max_examples=200)
@given(
    norms=st.lists(NORMS, max_size=20),
    extra=NORMS,
    share=st.floats(0.01, 0.99),
    start=st.floats(1e-5, 1e4),
    gradient=st.floats(0, 1),
)
def test_any_record_adds_at_most_one(
    norms: list[float], extra: float, share: float, start: float, gradient: float
) -> None:
    """Zero-out, at the level of the search: with and without one record whose clipped gradient has
    norm gradient * C.
    """
    for when in WAYS:
        queries = []
        for present in (False, True):
            choice = dpoptim.PrivateQuantile(0.5, share=share, when=when, start=start)
            search = QuantileSearch(choice, Clipping, batch_size=10, steps=100, capacity=10)
            search.observe(torch.tensor(norms, dtype=torch.float64).square())
            total = torch.tensor([2.0, -1.0], dtype=torch.float64)
            if present:
                search.observe(torch.tensor([extra], dtype=torch.float64).square())
                total[0] += gradient * start
            queries.append(
                torch.cat([part.clone() for part in search.query(*search.scaled([[total]]))])
            )
        difference = (queries[0] - queries[1]).norm()
        assert float(difference) <= 1 + 1e-9


@pytest.mark.parametrize("when", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_record_with_gradient_zero_does_not_vote(
    when: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero-out, as a weight of zero in the loss: the joint query moves by 1 at most, also where
    the record is clipped.
    """
    worlds = worlds_of_queries(monkeypatch)
    choice = dpoptim.PrivateQuantile(0.4, share=0.4, when=when, start=0.01)
    plan = dpoptim.Plan(dpoptim.DPSGD(choice), 40, 40, 6, 0.7, "zero-out", 1e-5)
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = (x[:, 0] > 0).long()
    for weight in (1.0, 0.0):
        weights = torch.ones(40, dtype=dtype)
        weights[7] = weight
        torch.manual_seed(0)
        model = nn.Linear(5, 2, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        worlds.append([])
        with dpoptim.attach(
            plan, model, optimizer, TensorDataset(x, y, weights), noise_seed=0
        ) as private:
            for a, b, w in private.batches():
                (F.cross_entropy(model(a), b, reduction="none") * w).mean().backward()
                optimizer.step()
    moved = [float((a - b).norm()) for a, b in zip(*worlds, strict=True)]
    assert len(moved) == 6
    assert 0.1 < max(moved) <= 1 + 1e-9


def test_a_histogram_counts_each_vote_once() -> None:
    octaves = torch.tensor([-1e6, -100.0, 0.0, 0.1, 1000.0, 1e300], dtype=torch.float64)
    counts = histogram(octaves, torch.tensor([1.0, 1, 1, 0.5, 1, 1], dtype=torch.float64))
    assert len(counts) == BINS
    assert float(counts.sum()) == pytest.approx(5.5)
    assert float(counts[0]) == 2
    assert float(counts[-1]) == 2


def test_quantiles_of_exact_histograms() -> None:
    octaves = torch.linspace(-3, 3, 10_001, dtype=torch.float64)
    for quantile in (0.1, 0.5, 0.9):
        found = quantile_of(histogram(octaves, torch.ones_like(octaves)), quantile)
        assert math.log2(found) == pytest.approx(-3 + 6 * quantile, abs=0.1)
    # noise alone: some norm
    assert 0 < quantile_of(torch.full((BINS,), -5.0, dtype=torch.float64), 0.5) <= 2**10


@pytest.mark.parametrize("when", WAYS)
@pytest.mark.parametrize("around", [1.0, 0.7071067811865476, 2.0**-40, 2.0**-39])
def test_rounding_that_all_records_share_turns_no_votes(when: Any, around: float) -> None:
    """Under a mean one record more rounds all norms anew, by 42 units in the last place at most:
    no query may jump.
    """
    capacity = 20_000
    for shift in (-COMMON_FACTOR_ERROR, COMMON_FACTOR_ERROR):
        queries = []
        for factor in (1.0, 1.0 + shift):
            search = QuantileSearch(
                dpoptim.PrivateQuantile(0.5, share=0.9, when=when),
                Clipping,
                batch_size=capacity,
                steps=10,
                capacity=capacity,
            )
            search.observe(torch.full((capacity,), around * factor, dtype=torch.float64).square())
            if factor != 1.0:
                search.observe(torch.tensor([5.0], dtype=torch.float64).square())
            queries.append(
                torch.cat([part.clone() for part in search.query([torch.zeros(1).double()])])
            )
        assert float((queries[0] - queries[1]).norm()) <= 1.0


@pytest.mark.parametrize("when", WAYS)
def test_gradients_that_fade_out_of_the_sum_fade_out_of_the_vote(when: Any) -> None:
    """Short inputs and enormous gradients under a mean: whether their squares overflow depends on
    how many there are.
    """
    B = 8
    x, w = torch.full((B, 3), 2.0**-70), torch.full((B, 4), 2.0**63 * 7.5)
    model = nn.Linear(3, 4, bias=False)
    queries = []
    for first in (0, 1):
        choice = dpoptim.PrivateQuantile(0.5, when=when, start=200.0)
        search = QuantileSearch(choice, Clipping, batch_size=B, steps=200, capacity=16)
        engine = Engine(model, search.rule, capacity=16, reduction="mean")
        engine.observer = search.observe
        engine.attach()
        engine.begin_microbatch(B - first)
        (model(x[first:]) * w[first:]).flatten(1).sum(1).mean().backward()
        sums = search.scaled([[total.clone() for total in engine.take()]])
        queries.append(torch.cat([part.clone().flatten() for part in search.query(*sums)]))
        engine.detach()
    assert float((queries[0] - queries[1]).norm()) <= 1.0


def test_an_interrupted_step_is_measured_once() -> None:
    choice = dpoptim.PrivateQuantile(0.5, share=0.5, when="all along")
    plan = dpoptim.DPSGD(choice).plan(
        n=60, batch_size=60, steps=4, noise_multiplier=0.7, delta=1e-5
    )
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, data(60), noise_seed=0) as private:
        for x, y in private.batches():
            F.cross_entropy(model(x), y).backward()
            break
        before = private._steps.clip_norm._count
        for x, y in private.batches():
            assert private._steps.clip_norm._count == 0
            F.cross_entropy(model(x), y).backward()
            assert private._steps.clip_norm._count == before
            break


def test_a_monitor_counts_and_leaves_the_clip_norm_alone() -> None:
    train_set = data()
    norm = float(gradient_norms(train_set).quantile(0.3))
    shares = {}
    for noise in (0.0, 0.7):
        monitored = dpoptim.DPSGD(dpoptim.PrivateQuantile.monitor(norm, share=0.1))
        plan = monitored.plan(
            n=2000,
            batch_size=2000,
            steps=5,
            noise_multiplier=noise,
            delta=1e-5,
            neighboring="zero-out",
        )
        model = nn.Linear(5, 2)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        with dpoptim.attach(plan, model, optimizer, train_set, noise_seed=0) as private:
            assert math.isnan(private.share_unclipped)
            for x, y in private.batches():
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                shares[noise] = private.share_unclipped
                assert private.clip_norm == norm
    assert shares[0.0] == pytest.approx(0.3, abs=1e-3)
    assert shares[0.7] == pytest.approx(0.3, abs=0.01)
    assert shares[0.7] != shares[0.0]
    assert "noisy count of unclipped" in plan.describe()


@pytest.mark.parametrize("norm", [1e-6, 5000.0])
def test_a_monitored_clip_norm_stays_outside_the_range_of_the_search_too(norm: float) -> None:
    monitored = dpoptim.DPSGD(dpoptim.PrivateQuantile.monitor(norm))
    plan = monitored.plan(n=60, batch_size=60, steps=3, noise_multiplier=0.7, delta=1e-5)
    assert run(plan, data(60))[1] == [norm] * 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"quantile": 0}, "quantile must be between 0 and 1"),
        ({"quantile": 0.5, "share": 1.0}, "share must be between 0 and 1"),
        ({"quantile": 0.5, "when": "later"}, "when must be one of 'at the start'"),
        ({"quantile": 0.5, "start": -1}, "start must be"),
        ({"quantile": 0.5, "rate": math.inf}, "rate must be"),
        ({"quantile": "low"}, "quantile must be a number"),
    ],
)
def test_bad_settings_are_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dpoptim.PrivateQuantile(**wrong)


def test_a_search_that_would_follow_noise_is_refused() -> None:
    for when in WAYS:
        method = dpoptim.DPSGD(dpoptim.PrivateQuantile(0.1, when=when))
        with pytest.raises(ValueError, match="would follow the noise"):
            method.plan(n=1000, batch_size=20, steps=100, noise_multiplier=5.0, delta=1e-5)
    with pytest.raises(ValueError, match="leaves none to train"):
        dpoptim.DPSGD(dpoptim.PrivateQuantile(0.5)).plan(
            n=100, batch_size=100, steps=1, noise_multiplier=1.0, delta=1e-5
        )


def test_fixed_norms_say_themselves() -> None:
    plan = dpoptim.DPSGD(0.5).plan(n=60, batch_size=60, steps=4, noise_multiplier=0.7, delta=1e-5)
    _, norms, _ = run(plan, data(60))
    assert set(norms) == {0.5}
    assert Clipping(0.5) == plan.method.rule
