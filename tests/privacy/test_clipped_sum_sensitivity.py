"""Tries to falsify the engine's guarantee: ``|sum(D) - sum(D')| <= C``, whatever the records
hold.
"""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpoptim.clipping import Clipping, SplitClipping
from dpoptim.gradients.accumulation.summation_groups import number_of_groups
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic import products as products_module
from dpoptim.gradients.arithmetic.norms import NORM_BLOCK, row_squared_norms
from dpoptim.gradients.arithmetic.products import (
    BLOCK_GROUPS,
    GROUP_ROWS,
    Groups,
    add_weighted_outer,
    consecutive_groups,
    margin,
)
from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter
from privacy.test_adversarial_records import (
    FLOAT_CASES,
    KINDS,
    WAYS,
    LinearLoss,
    cheap_measures,
    cotangent_sum,
    poison,
)
from support import (
    LIBRARIES,
    Case,
    by_engine,
    clipped,
    joint_norm,
    vmap_gradients,
)

pytestmark = [
    pytest.mark.usefixtures("library"),
    pytest.mark.parametrize("library", LIBRARIES, indirect=True),
]


@pytest.mark.parametrize("case", FLOAT_CASES, ids=lambda case: case.name)
@pytest.mark.thinned(2)
def test_a_record_that_is_not_finite_counts_as_zero(case: Case) -> None:
    torch.manual_seed(0)
    model = case.build()
    x, target = case.inputs(8, torch.float32)
    for kind in ("nan", "inf"):
        bad = poison(x, ["plain", "plain", kind, "plain", "plain", "plain", "plain", "plain"])
        keep = [0, 1, 3, 4, 5, 6, 7]
        with_bad = by_engine(model, bad, target, Clipping(0.1), capacity=8, reduction="sum")
        without = by_engine(
            model, x[keep], target[keep], Clipping(0.1), capacity=8, reduction="sum"
        )
        assert joint_norm([a - b for a, b in zip(with_bad, without, strict=True)]) <= 1e-6


def test_a_single_record_never_exceeds_the_bound() -> None:
    """In float64, on sums of one record: the clipped record itself, margin included."""
    torch.manual_seed(0)
    for number, case in enumerate(FLOAT_CASES):
        model = case.build()
        for scale in ((1e-3, 1e3), (1.0, 1e6))[number % 2]:
            x, target = case.inputs(1, torch.float32)
            total = by_engine(model, x * scale, target, Clipping(0.01), capacity=1)
            assert joint_norm(total) <= 0.01 * (1 - margin(torch.float32, 1)) * (1 + 1e-6)


class Linear(nn.Module):
    """Per-record gradient = the record itself, so that a test controls every bit of what is
    summed.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("rows", [300, 800, 9_194, 65_536])
def test_rounding_of_a_large_batch_stays_inside_the_margin(rows: int) -> None:
    """The record sums where ordered float32 moved by 1.49 C (9,194 records) and an aligned product
    by 5e-4 C.
    """
    torch.manual_seed(0)
    size = 3
    model = Linear(size)
    direction = torch.randn(size)
    direction /= direction.norm()
    # all aligned: errors add up instead of cancelling
    x = direction.repeat(rows, 1) * (1 + torch.rand(rows, 1))
    labels = torch.randint(0, number_of_groups(rows, None), (rows,)).sort().values
    sums = {}
    for name, batch, label in (("with", x, labels), ("without", x[1:], labels[1:])):
        engine = Engine(model, Clipping(1.0), capacity=rows, reduction="sum")
        engine.attach()
        sizes = label.bincount().tolist()
        engine.begin_microbatch(
            len(batch),
            groups=[sizes[i : i + BLOCK_GROUPS] for i in range(0, len(sizes), BLOCK_GROUPS)],
        )
        model(batch).sum().backward()
        sums[name] = engine.split(engine.take())
        engine.detach()
    difference = joint_norm([a - b for a, b in zip(sums["with"], sums["without"], strict=True)])
    assert 0.9 < difference <= 1.0


def test_the_factor_of_a_mean_stays_inside_the_margin() -> None:
    """1/B and 1/(B + 1) round all gradients, norms and products anew. Nothing is proved for means:
    this was the worst case (1.05 C) when the margin was 6 u B and norms were summed in blocks of
    1,024."""
    rows, slope = 17_993, 1.579
    model = nn.Linear(1, 1024, bias=False)
    sums = []
    for count in (rows, rows + 1):
        engine = Engine(model, Clipping(1.0), capacity=rows + 1, reduction="mean")
        engine.attach()
        engine.begin_microbatch(count)
        x = torch.ones(count, 1)
        (model(x) * slope).sum(1).mean().backward()
        sums.append(engine.split(engine.take())[0].clone())
        engine.detach()
    assert 0.9 < joint_norm([sums[1] - sums[0]]) <= 1.0


def moved_by_cancelling(joining: int, reduction: Reduction) -> float:
    """In clip norms, by one record more of those that cancel inside but for rounding."""
    model = nn.Linear(1, 1, bias=False)
    slopes = torch.tensor([1.1, 3.7, -4.8]) * 1e9
    sums = []
    for rows in (joining - 1, joining):
        engine = Engine(model, Clipping(1.0), capacity=200, reduction=reduction)
        engine.attach()
        engine.begin_microbatch(rows)
        losses = (model(torch.ones(rows, 3, 1))[:, :, 0] * slopes).sum(1)
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        sums.append(engine.split(engine.take())[0].clone())
        engine.detach()
    return joint_norm([sums[1] - sums[0]])


@pytest.mark.parametrize("joining", [105, 106, 107])
def test_records_that_cancel_inside_are_bounded_under_a_sum(joining: int) -> None:
    assert moved_by_cancelling(joining, "sum") <= 1.0


def test_records_that_cancel_inside_are_not_bounded_under_a_mean() -> None:
    """What `products` says of means is so: one more turns what all others leave of themselves from
    nothing into C each.
    """
    assert max(moved_by_cancelling(joining, "mean") for joining in range(100, 110)) > 100


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("size", [1e18, 1e20, 1e25])
def test_a_longer_record_changes_no_others_formula(size: float, reduction: Reduction) -> None:
    """Padding to two positions: records of huge gradients on tiny inputs once counted only beside
    a longer one (995 C).
    """
    model = nn.Linear(1, 1, bias=False)
    sums = []
    for length in (1, 2):
        engine = Engine(model, Clipping(1.0), capacity=1000, reduction=reduction)
        engine.attach()
        x = torch.zeros(1000, length, 1)
        x[:, 0] = 1 / size
        engine.begin_microbatch(len(x))
        losses = model(x).sum((1, 2)) * size
        (losses.sum() if reduction == "sum" else losses.mean()).backward()
        sums.append(engine.split(engine.take())[0].clone())
        engine.detach()
    assert joint_norm([sums[1] - sums[0]]) <= 1e-9
    assert joint_norm([sums[0]]) > 900


@pytest.mark.parametrize("size", [1.0, 1e18, 1e19, 1e20, 1e30])
def test_a_layer_that_a_record_does_not_use_leaves_it_as_it_is(size: float) -> None:
    """One record sends the batch through an expert; the others have the gradient zero there, and
    inputs of any size.
    """
    main, expert = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    model = nn.ModuleList([main, expert])
    sums = []
    for used in (False, True):
        engine = Engine(model, Clipping(1.0), capacity=1001, reduction="sum")
        engine.attach()
        engine.begin_microbatch(1000)
        x, h = torch.ones(1000, 2), torch.full((1000, 2), size)
        flag = torch.zeros(1000, 1)
        out = main(x) + flag * expert(h) if used else main(x)
        out.sum().backward()
        sums.append([part.clone() for part in engine.split(engine.take())])
        engine.detach()
    assert joint_norm([a - b for a, b in zip(*sums, strict=True)]) <= 1e-9
    assert joint_norm(sums[0]) > 900


def weighted_outer(g: Tensor, a: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    total = Sums([g.shape[1], a.shape[1]])
    add_weighted_outer(total, g, a, weights[None], groups)
    return total.settle()[0]


@settings(max_examples=40)
@given(
    rows=st.integers(1, 900),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 100),
)
def test_products_err_by_less_than_the_theorem_says(
    rows: int, dtype: torch.dtype, seed: int
) -> None:
    """Each group errs by at most gamma_{s+2} times the sum of its terms' norms."""
    torch.manual_seed(seed)
    g, a = torch.randn(rows, 4, dtype=dtype), torch.randn(rows, 6, dtype=dtype)
    weights = torch.rand(rows, dtype=torch.float64)
    total = weighted_outer(g, a, weights, consecutive_groups(rows))
    terms = weights[:, None, None] * g.double()[:, :, None] * a.double()[:, None, :]
    size = float(terms.flatten(1).norm(dim=1).sum())
    unit = 2.0**-24 if dtype == torch.float32 else 2.0**-53
    depth = min(rows, GROUP_ROWS) + BLOCK_GROUPS
    assert float((total - terms.sum(0)).norm()) <= (depth * unit + rows * 2.0**-52) * size


DIRECTIONS = ((1.0, 0.0), (1.0, 3.0))


@settings(max_examples=40)
@given(
    sizes=st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=4), min_size=1, max_size=3),
    shares=st.sampled_from([(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0, 20, 1)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 100),
)
def test_two_sums_are_formed_together_within_the_errors_of_one(
    sizes: list[list[int]], shares: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> None:
    """Rows of both directions, and of none, in any mixture."""
    torch.manual_seed(seed)
    rows = sum(map(sum, sizes))
    g, a = torch.randn(rows, 70, dtype=dtype), torch.randn(rows, 65, dtype=dtype)
    first, other = torch.rand(2, rows, dtype=torch.float64)
    kind = torch.multinomial(
        torch.tensor(shares, dtype=torch.float64), max(rows, 1), replacement=True
    )[:rows]
    second = torch.stack([0 * first, 3 * first, other]).gather(0, kind[None])[0]
    weights = torch.stack([first, second])
    sums = Sums([70, 65], directions=DIRECTIONS)
    add_weighted_outer(sums, g, a, weights, sizes)
    terms = g.double()[:, :, None] * a.double()[:, None, :]
    unit = 2.0**-24 if dtype == torch.float32 else 2.0**-53
    for total, each in zip(sums.settle(), weights, strict=True):
        size = float(each @ terms.flatten(1).norm(dim=1))
        error = float((total - torch.einsum("r,rpd->pd", each, terms)).norm())
        assert error <= (2 * GROUP_ROWS * unit + rows * 2.0**-50) * size


def test_each_direction_is_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Error feedback must not cost a second product where no record needs one."""
    multiplied: list[int] = []

    def counted(
        honest: Callable[..., Tensor], left: Tensor, right: Tensor, **options: Tensor | None
    ) -> Tensor:
        product = honest(left, right, **options)
        multiplied.append(len(product))
        return product

    # by the processor
    for owner, name in ((torch, "mm"), (products_module, "transposed_product")):
        monkeypatch.setattr(owner, name, partial(counted, getattr(owner, name)))
    g, a, first = torch.randn(160, 70), torch.randn(160, 65), torch.rand(160, dtype=torch.float64)
    for second, products in ((0 * first, [70]), (3 * first, [70]), (first, [140])):
        sums = Sums([70, 65], directions=DIRECTIONS)
        add_weighted_outer(sums, g, a, torch.stack([first, second]), [[160]])
        assert multiplied == products
        multiplied.clear()


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    spread=st.floats(0, 3),
    residual=st.sampled_from([1.01, 2.0, 100.0]),
    removed=st.integers(0, 199),
    kind=st.sampled_from(KINDS),
)
def test_one_record_moves_both_sums_of_error_feedback_by_their_bounds(
    seed: int, spread: float, residual: float, removed: int, kind: str
) -> None:
    """Gradients shorter than C1, between C1 and R, and longer than R, beside one record that is
    there or is not.
    """
    torch.manual_seed(seed)
    model = nn.Linear(80, 60)
    x = torch.randn(200, 80) * 10 ** (spread * (torch.rand(200, 1) - 1))
    x[removed] = poison(x[removed : removed + 1], [kind])[0]
    g = torch.randn(200, 60) / 60
    engine = Engine(model, SplitClipping(1.0, residual), capacity=200, reduction="sum")
    engine.attach()
    moved = []
    for there in (1.0, 0.0):
        engine.begin_microbatch(200)
        mask = torch.ones(200, 1)
        mask[removed] = there
        (torch.where(mask > 0, model(torch.where(mask > 0, x, 0.0)), 0.0) * g).sum().backward()
        moved.append([torch.cat([part.clone() for part in sums]) for sums in engine.take_sums()])
    engine.detach()
    (kept, rest), (kept_without, rest_without) = moved
    assert torch.isfinite(kept).all()
    assert torch.isfinite(rest).all()
    assert float((kept - kept_without).norm()) <= 1.0
    assert float((rest - rest_without).norm()) <= residual - 1.0


def test_the_margin_is_what_the_theorem_asks_for() -> None:
    unit = 2.0**-24
    depths = (GROUP_ROWS + 2) + (BLOCK_GROUPS - 1) * BLOCK_GROUPS
    worst = 2 * depths * unit / (1 - (GROUP_ROWS + 2) * unit) * GROUP_ROWS
    for rows in (1, 176, 10_000, 190_000):
        adding_groups = 2 * (rows / GROUP_ROWS + 1) * 2.0**-53 * rows
        assert worst + adding_groups + (4 + 1 + NORM_BLOCK + 4) * unit * rows <= margin(
            torch.float32, rows
        )


@pytest.mark.parametrize("sizes", [(100,), (1, 99, 30), (160, 5, 160), (161,), (3, 400, 2)])
def test_a_groups_sum_is_the_same_wherever_the_group_stands(sizes: tuple[int, ...]) -> None:
    """Condition 3 of the theorem: to the last bit, for aligned and unaligned rows, small and large
    products.
    """
    torch.manual_seed(0)
    for p, d in ((1, 3), (10, 785), (64, 64), (257, 33)):
        g, a = torch.randn(sum(sizes), p), torch.randn(sum(sizes), d)
        weights = torch.rand(sum(sizes), dtype=torch.float64)
        alone = []
        for rows in (slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))):
            alone.append(
                weighted_outer(
                    g[rows].clone(), a[rows].clone(), weights[rows], [[rows.stop - rows.start]]
                )
            )
        together = weighted_outer(g, a, weights, [[size] for size in sizes])
        expected = torch.zeros(p, d, dtype=torch.float64)
        for total in alone:
            expected += total
        assert float((together - expected).norm()) <= 1e-14 * float(expected.norm())


@settings(max_examples=60)
@given(
    entries=st.sampled_from([1, 2, 7, 100, 1023, 1024, 1025, 5000]),
    exponent=st.integers(-50, 38),
    spread=st.integers(0, 30),
    seed=st.integers(0, 1000),
)
def test_norms_are_never_read_low(entries: int, exponent: int, spread: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = (
        torch.randn(5, entries).double()
        * 10.0**exponent
        * 10.0 ** -(spread * torch.rand(5, entries).double())
    ).float()
    true = x.double().square().sum(1)
    read = row_squared_norms(x)
    assert bool((read >= true).all())
    normal = torch.isfinite(read) & (true > 1e-17 * entries)
    assert bool((read[normal] <= true[normal] * (1 + 2 * (32 + 4) * 2.0**-24 + 1e-7)).all())


def test_clip_factors_do_not_depend_on_how_many_records_share_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alternating signs nearly cancel inside each record; one more record pushes the batch over
    the memory cap.
    """
    torch.manual_seed(0)
    inputs, T, rows = 64, 32, 40
    monkeypatch.setattr("dpoptim.gradients.choose_formula.MEMORY_CAP", inputs * inputs * rows)
    model = LinearLoss(inputs, inputs)
    sign = torch.tensor([1.0, -1.0]).repeat(T // 2)[None, :, None]
    record = torch.randn(1, 1, inputs) * sign * 100 + torch.randn(1, T, inputs) * 0.05
    x, g = record.repeat(rows + 1, 1, 1), torch.ones(rows + 1, T, inputs)
    stored = cotangent_sum(model, x[:rows], g[:rows], 1.0, 200)
    formed_again = cotangent_sum(model, x, g, 1.0, 200)
    assert joint_norm([a - b for a, b in zip(stored, formed_again, strict=True)]) <= 1.0


def test_how_sums_are_formed_does_not_depend_on_how_many_records_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kept gradients and those formed again are summed otherwise: every group's rounding would
    change (1.6 C at 2^20).
    """
    monkeypatch.setattr("dpoptim.gradients.choose_formula.MEMORY_CAP", 8 * 8 * 40)
    measured, kept = SequenceOuter.squared_norms, []

    def spied(self: SequenceOuter, groups: Groups, block: int) -> Tensor:
        found = measured(self, groups, block)
        kept.append(self._kept is not None)
        return found

    monkeypatch.setattr(SequenceOuter, "squared_norms", spied)
    model = LinearLoss(8, 8)
    for capacity in (40, 41):
        for rows in (1, 39, 40):
            cotangent_sum(model, torch.ones(rows, 3, 8), torch.ones(rows, 3, 8), 1.0, capacity)
    assert kept == [True] * 3 + [False] * 3


def test_clip_factors_do_not_depend_on_how_long_others_are() -> None:
    """Padding a batch with zeros to the length of one record leaves every other record's factor as
    it was.
    """
    torch.manual_seed(0)
    rows, inputs = 100, 66
    model = LinearLoss(inputs, inputs)
    x, g = torch.randn(rows, 34, inputs), torch.randn(rows, 34, inputs)
    x[:-1, 32:] = 0  # only the last record is longer than 32
    padded = cotangent_sum(model, x, g, 1.0, rows)
    short = cotangent_sum(model, x[:-1, :32], g[:-1, :32], 1.0, rows)
    assert joint_norm([a - b for a, b in zip(padded, short, strict=True)]) <= 1.0


@settings(max_examples=60)
@given(
    x_exponent=st.integers(-45, 30),
    g_exponent=st.integers(-45, 30),
    clip_exponent=st.integers(-6, 3),
    positions=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 50),
)
def test_one_record_with_extreme_factors_adds_at_most_the_bound(
    x_exponent: int, g_exponent: int, clip_exponent: int, positions: int, seed: int
) -> None:
    """Denormal inputs against enormous output gradients and the other way round: products may not
    vanish unmeasured.
    """
    torch.manual_seed(seed)
    model = LinearLoss(32, 24)
    x = (torch.randn(1, positions, 32).double() * 10.0**x_exponent).float()
    g = (torch.randn(1, positions, 24).double() * 10.0**g_exponent).float()
    clip_norm = 10.0**clip_exponent
    total = cotangent_sum(model, x, g, clip_norm, 1)
    assert joint_norm(total) <= clip_norm


@pytest.fixture(params=WAYS)
def cheaply_measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    cheap_measures(request.param, monkeypatch)


@pytest.mark.usefixtures("cheaply_measured")
def test_cheaply_measured_norms_give_the_same_sum() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 16))
    x, target = torch.randn(40, 8, 32), torch.randn(40)
    truth = vmap_gradients(model, x, target)
    clipping = Clipping(float(torch.cat([t.flatten(1) for t in truth], 1).norm(dim=1).median()))
    expected = clipped(truth, clipping, 40)
    sums = by_engine(model, x, target, clipping, capacity=40)
    assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) <= 3e-5 * joint_norm(
        expected
    )
    x[3, 2, 1] = math.nan
    x[5] = math.inf
    assert all(
        bool(torch.isfinite(s).all()) for s in by_engine(model, x, target, clipping, capacity=40)
    )


def test_the_clipped_record_by_an_independent_formula() -> None:
    """g min(1, C / |g|) in float64, without any of the engine's own code, but for the margin given
    up.
    """
    torch.manual_seed(0)
    x, g = torch.randn(50, 32), torch.randn(50, 24)
    gradients = g.double()[:, :, None] * x.double()[:, None, :]
    norms = gradients.flatten(1).norm(dim=1)
    clip_norm = float(norms.median())
    expected = (gradients * (clip_norm / norms).clamp(max=1)[:, None, None]).sum(0)
    (total,) = cotangent_sum(LinearLoss(32, 24), x, g, clip_norm, 50)
    assert float((total - expected).norm()) <= 0.005 * 50 * clip_norm
    assert float((total - expected).norm()) > 0  # the margin is really given up
    scaled = total / (1 - margin(torch.float32, 50))
    assert abs(float((scaled * expected).sum() / expected.square().sum()) - 1) < 0.005


def test_the_rounding_of_a_mean_is_covered() -> None:
    """1 / B against 1 / (B + 1) in float32 moves all records' gradients together."""
    rows = 65_283
    model = LinearLoss(1, 1)
    x = torch.full((rows, 1), 0.996)
    sums = []
    for batch in (x, x[1:]):
        engine = Engine(model, Clipping(1.0), capacity=rows, reduction="mean")
        engine.attach()
        engine.begin_microbatch(len(batch))
        model(batch).mean().backward()
        sums.append(engine.split(engine.take()))
        engine.detach()
    assert joint_norm([a - b for a, b in zip(*sums, strict=True)]) <= 1.0


def test_a_batch_of_bad_records_sums_to_zero() -> None:
    model = nn.Linear(3, 2)
    x = torch.full((4, 3), math.nan)
    sums = by_engine(model, x, torch.zeros(4), Clipping(1.0), capacity=4)
    assert all(float(s.abs().max()) == 0 for s in sums)


@pytest.mark.parametrize("length", [2.0**54.5, 2.0**58, 2.0**61.9, 2.0**63.5, 1e25, 1e30])
@pytest.mark.parametrize("layer", ["outer", "positions", "formed"])
@pytest.mark.thinned(2)
def test_huge_gradients_under_a_mean_do_not_count_all_or_nothing(length: float, layer: str) -> None:
    """Where float32 ends, 1/B decided whether all records counted: one more moved the sum by 996
    C.
    """
    B = 600
    kinds: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "outer": (lambda: nn.Linear(1, 2, bias=False), (1,)),
        "positions": (lambda: nn.Linear(1, 2, bias=False), (3, 1)),
        "formed": (lambda: nn.Conv1d(1, 2, 1, bias=False), (1, 3)),
    }
    build, shape = kinds[layer]
    model, x = build(), torch.ones(B, *shape)
    # thresholds on the gradient of the mean, and on the records' own
    for scaled in (1.0, B, B - 0.5):
        w = torch.tensor(min(length * scaled, 1e37))
        found = []
        for rows in (B, B - 1):
            engine = Engine(model, Clipping(1.0), capacity=B, reduction="mean")
            engine.attach()
            engine.begin_microbatch(rows)
            (model(x[:rows]) * w).flatten(1).sum(1).mean().backward()
            found.append(engine.take()[0].clone())
            engine.detach()
        assert float((found[0] - found[1]).norm()) <= 1.0


@pytest.mark.parametrize("shape", [(16, 7, 5), (12, 5, 7), (8, 5, 17)])
def test_records_that_cancel_inside_do_not_depend_on_their_place(
    shape: tuple[int, int, int],
) -> None:
    """All rounding, clipped to C: products that round by place let one record turn all others (79
    C).
    """
    T, d, p = shape
    layer, B = nn.Linear(d, p, bias=False), 80
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        half, other = (
            torch.randn(T // 2, d, generator=generator),
            torch.randn(T // 2, p, generator=generator),
        )
        order = torch.randperm(T, generator=generator)
        a = (torch.cat([half, half])[order] * 1e7).expand(B, T, d)
        g = (torch.cat([other, -other])[order] * 1e7).expand(B, T, p)
        found = []
        for first in (0, 1):
            engine = Engine(layer, Clipping(1.0), capacity=B, reduction="sum")
            engine.attach()
            engine.begin_microbatch(B - first)
            (layer(a[first:]) * g[first:]).sum().backward()
            found.append(engine.take()[0].clone())
            engine.detach()
        assert float((found[0] - found[1]).norm()) <= 1.0


@pytest.mark.parametrize(
    "rule", [Clipping(1.0, "automatic"), Clipping(1e6, "automatic"), Clipping(1e6), Clipping(1.0)]
)
@pytest.mark.parametrize(
    ("size", "slope"),
    [(0.0, 1e37), (0.0, 3e38), (1e-38, 3e37), (3e-39, 3e38), (1e37, 0.0), (3e38, 1e-45)],
)
def test_a_weight_carries_no_factor_of_a_product_to_infinity(
    size: float, slope: float, rule: Clipping
) -> None:
    """Enormous gradients beside inputs that are zero or next to it: the sum became NaN, or
    infinite.
    """
    model = nn.Linear(1, 4, bias=False)
    for left_out in (1.0, math.nan):  # beside a record that does not count, too
        engine = Engine(model, rule, capacity=3, reduction="sum")
        engine.attach()
        engine.begin_microbatch(3)
        x = torch.tensor([[size], [1.0], [left_out]])
        (model(x) * torch.tensor([[slope], [1.0], [1.0]])).sum().backward()
        total = engine.split(engine.take())
        engine.detach()
        assert joint_norm(total) <= 3 * rule.norm


@pytest.mark.parametrize("bag", [False, True])
def test_squares_that_underflow_in_float64_are_not_read_as_zero(bag: bool) -> None:
    """Moved by 19.5 C: 1e6 entries of 1.5e-162, on an input of 1.3e154."""
    p, norm = 10**6, 1e-6
    model = (nn.EmbeddingBag(1, p, mode="sum") if bag else nn.Linear(1, p, bias=False)).double()
    engine = Engine(model, Clipping(norm), capacity=1, reduction="sum")
    engine.attach()
    engine.begin_microbatch(1)
    x = torch.tensor([[1.3e154]], dtype=torch.float64)
    out = model(torch.zeros(1, 1, dtype=torch.long), per_sample_weights=x) if bag else model(x)
    (out * 1.5e-162).sum().backward()
    total = engine.split(engine.take())
    engine.detach()
    assert joint_norm(total) <= norm
