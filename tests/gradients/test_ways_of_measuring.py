"""However a layer over positions is measured (formed and kept, claimed first, record by record),
the sums are the same.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping import Clipping, ClippingRule, SplitClipping
from dpoptim.gradients import clipped_sum as clipped_sum_module
from dpoptim.gradients import record_by_record as record_by_record_module
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.batch_invariant import ALIGNMENT
from dpoptim.gradients.arithmetic.norms import (
    LONG_BLOCK,
    NORM_BLOCK,
    blocks_in,
    raised,
    read_part,
    row_squared_norms,
    squared_norms_of_parts,
    squared_norms_together,
)
from dpoptim.gradients.arithmetic.products import GROUP_ROWS, Groups
from dpoptim.gradients.choose_formula import PublicSizes
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.layers import convolution as convolution_module
from dpoptim.gradients.layers.kernels import ByPatches
from dpoptim.gradients.per_sample import native
from dpoptim.gradients.per_sample import sequence_outer as sequence_outer_module
from dpoptim.gradients.per_sample.ghost_norms import ghost_squared_norms
from dpoptim.gradients.per_sample.lazy import Lazy
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter
from dpoptim.gradients.per_sample.sparse import Rows
from dpoptim.gradients.per_sample.tied import TiedHead
from dpoptim.gradients.record_by_record import add_record_by_record
from dpoptim.gradients.rows_of_records import sum_rows
from support import CASES, LIBRARIES, Case, by_engine, clipped, joint_norm, pairs, vmap_gradients

ROWS = 8  # unlike every other axis of the cases
T, WIDTH, WORDS = 12, 16, 24
WAYS: dict[str, dict[str, bool]] = {
    "kept": {},
    "claimed": {"ghost_norms": True},
    "claimed, record by record": {"ghost_norms": True, "alone": True},
    "record by record": {"alone": True},
}


def measured(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def lazy(grad: Lazy, public: PublicSizes) -> Lazy:
        return replace(grad, most=public.most, alone=way == "record by record")

    def outer(grad: SequenceOuter, public: PublicSizes) -> SequenceOuter:
        return replace(grad, most=public.most, **WAYS[way])

    monkeypatch.setattr(Lazy, "chosen", lazy)
    monkeypatch.setattr(SequenceOuter, "chosen", outer)
    monkeypatch.setattr(convolution_module, "WORTH_PATCHES", 0)


class Language(nn.Module):
    """A small language model; its head may be tied to its table."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH + 3), nn.Linear(WIDTH + 3, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        return self.head(self.norm(h + self.second(torch.tanh(self.first(h)))))


def sums_of(
    model: nn.Module,
    x: Tensor,
    targets: Tensor,
    rule: ClippingRule,
    groups: Groups | None = None,
    *,
    narrow: torch.dtype | None = None,
) -> list[list[Tensor]]:
    """``narrow``: what torch.autocast computes in, if it does."""
    engine = Engine(model, rule, capacity=len(x), reduction="sum")
    engine.attach()
    for _ in range(2):  # what the first left behind must not matter
        engine.begin_microbatch(len(x), groups=groups)
        with torch.autocast("cpu", narrow) if narrow else nullcontext():
            output = model(x).float()
        ((output - targets).square().mean((1, 2)) * weights(x)).sum().backward()
        found = [[total.clone() for total in engine.split(sums)] for sums in engine.take_sums()]
    engine.detach()
    return found


class Images(nn.Module):
    """Convolutions of which some are formed a few records at a time, beside a layer over
    positions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 4, 3, groups=2, stride=2)
        self.point, self.head = nn.Conv2d(4, 5, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(self.point(h).flatten(2))


def problem(kind: str, records: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, inputs and targets, of which those of record 3 are not finite."""
    if kind == "images":
        model, x, targets = Images(), torch.randn(records, 2, 7, 7), torch.randn(records, 5, 3)
    else:
        model, x = Language(tied=kind == "tied"), torch.randint(0, WORDS, (records, T))
        targets = torch.randn(records, T, WORDS)
    targets[3] = math.nan
    return model, x, targets


def weights(x: Tensor) -> Tensor:
    return torch.linspace(0.1, 20.0, len(x))


def spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers went record by record, pass by pass."""
    seen: list[int] = []

    def add(layers: dict[int, SequenceOuter], *rest: Any) -> None:
        seen.append(len(layers))
        add_record_by_record(layers, *rest)

    monkeypatch.setattr(clipped_sum_module, "add_record_by_record", add)
    return seen


@pytest.mark.parametrize(
    ("library", "way"),
    [("MKL", "claimed"), *((each, "record by record") for each in LIBRARIES)],
    indirect=["library"],
)
@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.integers], ids=lambda case: case.name
)
@pytest.mark.thinned(4)
def test_any_model_has_the_sums_of_whole_model_vmap(
    case: Case, library: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, way)
    torch.manual_seed(0)
    model = case.build()
    x, target = case.inputs(ROWS, torch.float32)
    truth = vmap_gradients(model, x, target)
    clipping = Clipping(float(torch.cat([g.flatten(1) for g in truth], 1).norm(dim=1).median()))
    for reduction in ("mean", "sum"):
        expected = clipped(truth, clipping, ROWS, reduction)
        sums = by_engine(model, x, target, clipping, capacity=ROWS, reduction=reduction)
        assert joint_norm(
            [a - b for a, b in zip(sums, expected, strict=True)]
        ) <= 5e-5 * joint_norm(expected)


RULES: dict[str, ClippingRule] = {
    "flat": Clipping(0.02),
    "automatic": Clipping(0.02, "automatic"),
    "per-layer": Clipping(0.02, "per-layer"),
    "error feedback": SplitClipping(0.02, 0.05),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("rule", "library", "kind", "records"),
    pairs(list(RULES), LIBRARIES, ["free", "tied", "images"], [9, GROUP_ROWS + 1]),
    indirect=["library"],
)
def test_every_way_gives_every_rule_the_same_sums(
    rule: str, kind: str, records: int, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x, targets = problem(kind, records)
    # the first is beyond what one float32 product may sum, where there are that many
    groups = [[records - 5, 0, 5]]
    found, seen = {}, spied(monkeypatch)
    for way in WAYS:
        measured(monkeypatch, way)
        found[way] = sums_of(model, x, targets, RULES[rule], groups)
    # also the kernel of a single place
    assert seen == ([4, 4] if kind == "images" and library != "MKL" else [3, 3])
    for sums in zip(*found.values(), strict=True):
        assert joint_norm(sums[0]) > 0
        for other in sums[1:]:
            assert joint_norm(
                [a - b for a, b in zip(sums[0], other, strict=True)]
            ) <= 5e-5 * joint_norm(sums[0])


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["free", "tied", "images"])
@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
@pytest.mark.thinned(2)
def test_every_way_gives_the_same_sums_under_autocast(
    kind: str, narrow: torch.dtype, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder are narrow then, and widened part by part: products of what they hold are
    exact.
    """
    torch.manual_seed(0)
    model, x, targets = problem(kind, 9)
    found, seen = [], spied(monkeypatch)
    for way in WAYS:
        measured(monkeypatch, way)
        (sums,) = sums_of(model, x, targets, Clipping(0.02), narrow=narrow)
        found.append(sums)
    assert len(seen) == 2
    assert joint_norm(found[0]) > 0
    for other in found[1:]:
        assert joint_norm(
            [a - b for a, b in zip(found[0], other, strict=True)]
        ) <= 5e-5 * joint_norm(found[0])


@pytest.mark.parametrize("way", ["kept", "claimed"])
@pytest.mark.parametrize("tied", [False, True])
def test_narrow_books_are_multiplied_as_they_are_where_a_device_can(
    way: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: products of bfloat16 with float32 results, here by widening them inside the
    call.
    """
    calls, original = [], torch.bmm

    def bmm(x: Tensor, y: Tensor, *, out: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        assert (out_dtype is None) == (x.dtype == y.dtype == out.dtype)
        calls.append(out_dtype)
        return (
            original(x, y, out=out)
            if out_dtype is None
            else original(x.float(), y.float(), out=out)
        )

    torch.manual_seed(0)
    model, x, targets = (
        Language(tied=tied),
        torch.randint(0, WORDS, (9, T)),
        torch.randn(9, T, WORDS),
    )
    measured(monkeypatch, way)
    (expected,) = sums_of(model, x, targets, Clipping(0.02), narrow=torch.bfloat16)
    monkeypatch.setattr(sequence_outer_module, "multiplies_narrow", lambda device, dtype: True)
    monkeypatch.setattr(torch, "bmm", bmm)
    (sums,) = sums_of(model, x, targets, Clipping(0.02), narrow=torch.bfloat16)
    assert torch.float32 in calls
    assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) <= 1e-5 * joint_norm(
        expected
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_large_layers_go_record_by_record_by_public_numbers(
    library: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the batch; not in float64, nor where a record's length makes another way cheaper,
    or a small capacity, without compiled functions.
    """
    of_few = 2 if library in ("compiled", "rows") else 0
    monkeypatch.setattr(PublicSizes, "worth_claiming", lambda *sizes: False)
    seen = spied(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 160), nn.Tanh(), nn.Linear(160, 128)).to(dtype)
    for capacity, length, expected in ((100, 32, 2), (100, 8, 0), (20, 32, of_few)):
        for records in (1, 5):
            engine = Engine(
                model,
                Clipping(1.0),
                capacity=capacity,
                positions={"0": length, "2": length},
                reduction="sum",
            )
            engine.attach()
            engine.begin_microbatch(records)
            model(torch.randn(records, length, 128, dtype=dtype)).square().sum().backward()
            engine.detach()
            assert sum(seen) == (expected if dtype == torch.float32 else 0)
            seen.clear()


@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_short_records_are_claimed_by_public_numbers_where_functions_are_compiled(
    library: str,
) -> None:
    """Not with many positions, narrow layers, or a mean's factor, which rounds ghost norms anew."""
    for positions, width, common, expected in (
        (32, 160, False, True),
        (32, 160, True, False),
        (200, 160, False, False),
        (513, 1 << 13, False, False),
    ):
        outer = SequenceOuter(torch.empty(2, positions, width), torch.empty(2, positions, 128))
        public = PublicSizes(100, 100, 1 << 20, positions, common_factor=common)
        chosen = outer.chosen(public)
        assert chosen.alone
        assert chosen.ghost_norms == (expected and library in ("compiled", "rows"))


@pytest.mark.parametrize("records", [1, 9, GROUP_ROWS])
@pytest.mark.parametrize("positions", [1, 33, 512])
@pytest.mark.parametrize("library", ["compiled"], indirect=True)
def test_what_is_added_where_it_is_formed_has_the_bits_of_what_is_formed(
    positions: int, records: int, library: str
) -> None:
    """Its weight is a power of two, so that nothing is rounded; and it is measured, never low."""
    torch.manual_seed(0)
    for rows, columns in ((1, 1), (20, 30), (29, 77), (48, 64)):
        g, a = torch.randn(records, positions, rows), torch.randn(records, positions, columns)
        (chunk,) = SequenceOuter(g, a).one_by_one()
        for record in range(min(records, 3)):
            total, factors = torch.zeros(chunk.entries), [0.0] * records
            factors[record] = 0.25
            pieces = slice(0, chunk.pieces)
            squared = chunk.form_added(slice(0, records), total, factors, pieces).sum(0)
            formed = chunk.form(record)
            assert torch.equal(total, formed / 4)
            assert int((squared != 0).sum()) == 1
            truth = float(formed.double().square().sum())
            read = float(raised(squared, chunk.entries, NORM_BLOCK)[record])
            assert truth <= read <= truth * 1.001


@pytest.mark.parametrize("library", ["compiled"], indirect=True)
def test_claimed_sums_and_their_claims_do_not_depend_on_threads(library: str) -> None:
    """To the last bit, on 1, 2, 4 and more threads than cores, whole tiles of rows or not."""
    torch.manual_seed(0)
    allowed = torch.get_num_threads()
    for rows, columns in ((768, 192), (130, 300), (64, 1030)):
        g, a = torch.randn(9, 33, rows), torch.randn(9, 33, columns)
        weights = torch.rand(1, 9, dtype=torch.float64)
        found = []
        for threads in (1, 2, 4, 7):
            torch.set_num_threads(threads)
            each = SequenceOuter(g, a, ghost_norms=True, alone=True)
            ghost = each.squared_norms([[9]], LONG_BLOCK).clone()
            sums = Sums([rows * columns])
            each.add_weighted_sums(sums, weights, [[9]])
            found.append((ghost, sums.settle()[0]))
        torch.set_num_threads(allowed)
        formed = torch.bmm(g.double().transpose(1, 2), a.double()).flatten(1)
        torch.testing.assert_close(found[0][0], formed.square().sum(1), rtol=1e-4, atol=0)
        torch.testing.assert_close(found[0][1], weights[0] @ formed, rtol=1e-4, atol=1e-4)
        for ghost, total in found[1:]:
            assert torch.equal(ghost, found[0][0])
            assert torch.equal(total, found[0][1])


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("library", ["compiled"], indirect=True)
def test_compiled_ghost_norms_are_the_norms_whatever_the_shape(
    level: int, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends that fill no vector and no tile; and zeros after the last position are nothing."""
    monkeypatch.setattr(native, "MOST_OF_PRODUCTS", level)
    torch.manual_seed(0)
    for positions, rows, columns in ((1, 1, 1), (2, 3, 17), (9, 31, 16), (33, 40, 100), (7, 0, 5)):
        g, a = torch.randn(3, positions, rows), torch.randn(3, positions, columns)
        ghost, longest = ghost_squared_norms(g, a)
        squared = torch.bmm(g.double().transpose(1, 2), a.double()).square().sum((1, 2))
        torch.testing.assert_close(ghost, squared, rtol=1e-5, atol=0)
        lengths = g.double().square().sum(2).amax(1)
        torch.testing.assert_close(longest, lengths, rtol=1e-5, atol=0)
        longer = [F.pad(x, (0, 0, 0, 11)) for x in (g, a)]
        assert all(map(torch.equal, ghost_squared_norms(*longer), (ghost, longest)))
    g, a = torch.randn(3, 9, 31), torch.randn(3, 9, 16)
    g[1, 0], a[2, 3, 1] = math.inf, math.nan
    assert ghost_squared_norms(g, a)[0].isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize("library", ["compiled"], indirect=True)
def test_what_one_record_is_shortened_to_leaves_the_bits_of_all_others(library: str) -> None:
    """Formed again for its sake, they are formed in the same way: also what cancels in them."""
    torch.manual_seed(0)
    g, a = torch.randn(7, 32, 160), torch.randn(1, 1, 128).expand(7, 32, 128).clone()
    g[1:] -= g[1:].mean(1, keepdim=True)  # cancel down to rounding
    weights = torch.rand(1, 7, dtype=torch.float64)
    weights[0, 1:] *= 1e7
    found = []
    for shorter in (False, True):
        each = SequenceOuter(g, a, ghost_norms=True, alone=True)
        ghost = each.squared_norms([[7]], LONG_BLOCK)
        ghost[1:] *= 100  # what is claimed of these is long enough
        ghost[0] = 0.0 if shorter else 1e9
        sums = Sums([160 * 128])
        of_all = weights.clone()
        of_all[0, 0] = 1.0 if shorter else 0.0
        each.add_weighted_sums(sums, of_all, [[7]])
        found.append(sums.settle()[0])
    assert float(found[0].norm()) > 0
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_kernels_go_record_by_record_by_public_numbers(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above; small kernels, and those of a single place, are kept.

    By compiled functions all go so.
    """
    monkeypatch.setattr(native, "library", lambda: None)
    seen = spied(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 2), nn.Conv2d(64, 600, 1)).to(
        dtype
    )
    for capacity, expected in ((100, 1), (20, 0)):
        for records in (1, 5):
            engine = Engine(model, Clipping(1.0), capacity=capacity, reduction="sum")
            engine.attach()
            engine.begin_microbatch(records)
            model(torch.randn(records, 64, 4, 4, dtype=dtype)).square().sum().backward()
            engine.detach()
            assert sum(seen) == (expected if dtype == torch.float32 else 0)
            seen.clear()


@pytest.mark.parametrize("threads", [1, 4], indirect=True)
@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
@pytest.mark.parametrize("way", ["record by record", "claimed, record by record"])
def test_record_by_record_a_record_adds_the_same_in_any_company(
    way: str, library: str, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, also of a gradient that cancels down to rounding."""
    seen = spied(monkeypatch)
    measured(monkeypatch, way)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 160, bias=False))
    half = torch.randn(16, 1) * 1e7
    slopes = torch.cat([half, -half])[torch.randperm(32)].expand(32, 160)
    cancels = torch.randn(128).expand(32, 128)
    others = torch.randn(6, 32, 128)
    sums = []
    for place, records in ((0, 1), (0, 4), (3, 7)):
        x = torch.cat([others[:place], cancels[None], others[place : records - 1]])
        g = torch.zeros(records, 32, 160)  # all others are at a minimum
        g[place] = slopes
        engine = Engine(model, Clipping(1.0), capacity=100, positions={"0": 32}, reduction="sum")
        engine.attach()
        engine.begin_microbatch(records)
        (model(x) * g).sum().backward()
        sums.append(engine.split(engine.take())[0].clone())
        engine.detach()
    claimed = way.startswith("claimed")
    assert seen == ([] if claimed else [1, 1, 1])
    assert (0.0 if claimed else 0.9) < float(sums[0].norm()) <= 1.0
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_record_by_record_sums_do_not_depend_on_threads(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, whatever is dealt to whom; nor does cutting layers into chunks change
    more than rounding.
    """
    torch.manual_seed(0)
    g, a, out = torch.randn(5, 33, 48), torch.randn(5, 33, 32), torch.randn(5, 33, 32)
    table = Rows(torch.randint(0, 48, (5, 33)), out, 48)
    conv = nn.Conv2d(3, 4, 3)
    x, back = torch.randn(5, 3, 7, 7), torch.randn(5, 4, 5, 5)
    found: dict[tuple[int, int], list[Tensor]] = {}
    before = torch.get_num_threads()
    for chunk in (1 << 18, 20 * 32):
        monkeypatch.setattr(sequence_outer_module, "CHUNK", chunk)
        for threads in (1, 2, 4, 16):
            layers = {
                0: SequenceOuter(g, a),
                1: TiedHead(g.flip(1), a, table=table),
                2: ByPatches(conv, x, back),
                3: SequenceOuter(g[:, :, :7], a),
            }
            assert len(layers[0].one_by_one()) == (3 if chunk < 48 * 32 else 1)
            sizes = [48 * 32, 48 * 32, 4 * 27, 7 * 32]
            sums = [Sums([size]) for size in sizes]

            def weigh(part: slice, squared: dict[str, Tensor]) -> dict[str, Tensor]:
                return {unit: each.rsqrt()[None] for unit, each in squared.items()}

            torch.set_num_threads(threads)
            try:
                units = ["all", "all", "kernel", "all"]
                with torch.no_grad():
                    add_record_by_record(layers, units, sums, [[3], [2]], LONG_BLOCK, weigh)
                assert torch.get_num_threads() == threads
            finally:
                torch.set_num_threads(before)
            found[chunk, threads] = [each.settle()[0] for each in sums]
    whole, cut = (found[chunk, 1] for chunk in (1 << 18, 20 * 32))
    assert all(0.1 < float(each.norm()) <= 5 for each in whole)
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for (chunk, _), each in found.items():
        of_one = found[chunk, 1]
        assert all(torch.equal(one, other) for one, other in zip(of_one, each, strict=True))


def test_float32_models_are_measured_in_float32_whatever_the_default_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured(monkeypatch, "record by record")
    model, x = (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(2), nn.Linear(4, 5)),
        torch.randn(3, 2, 4, 4),
    )
    seen = spied(monkeypatch)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        sums = by_engine(model, x, torch.zeros(3), Clipping(1.0), capacity=3, reduction="sum")
    finally:
        torch.set_default_dtype(before)
    assert seen == [2]
    assert 0 < joint_norm(sums) <= 3


@pytest.mark.parametrize("removed", [0, 4, 13, 29])
def test_one_record_of_large_kernels_moves_the_sum_by_the_clip_norm_at_most(
    removed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where gradients cancel inside every third record, and lengths differ by many orders."""
    seen = spied(monkeypatch)
    torch.manual_seed(removed)
    model = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.Conv2d(64, 128, 3, 2, bias=False)
    )
    x, g = torch.randn(30, 64, 6, 6), torch.randn(30, 128, 2, 2)
    x, g = (each * 10 ** torch.empty(30, 1, 1, 1).uniform_(-3, 3) for each in (x, g))
    x[::3] = torch.randn(10, 64, 1, 1)
    g[::3] = (g[::3] - g[::3].mean((2, 3), keepdim=True)) * 1e6
    sums = []
    for keep, sizes in (
        (range(30), [14, 16]),
        ([i for i in range(30) if i != removed], [13, 16] if removed < 14 else [14, 15]),
    ):
        rows = list(keep)
        engine = Engine(model, Clipping(1.0), capacity=100, reduction="sum")
        engine.attach()
        engine.begin_microbatch(len(rows), groups=[sizes])
        (model(x[rows]) * g[rows]).sum().backward()
        sums.append([total.clone() for total in engine.split(engine.take())])
        engine.detach()
    assert seen == [2, 2]
    assert 0.9 < joint_norm([a - b for a, b in zip(*sums, strict=True)]) <= 1.0


LAYOUTS = {
    "rows": (0, 1, 2),
    "time first": (1, 0, 2),
    "transposed": (0, 2, 1),
    "features first": (2, 0, 1),
}


LONG = [
    (600, 2, 800),
    (600, 900, 1),
    (600, 1, 5000),
    (600, 5000, 1),
    (32, 129, 161),
    (7, 65, 80),
    (128, 256, 1024),
    (1500, 64, 192),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("shape", "library", "threads"),
    pairs(LONG, LIBRARIES, [1, 4]),
    indirect=["library", "threads"],
    ids=str,
)
def test_one_record_is_formed_alike_however_the_batch_lies(
    shape: tuple[int, int, int], library: str, threads: None
) -> None:
    """What an elementwise operation returns may lie otherwise for one record than for two."""
    torch.manual_seed(0)
    length, p, d = shape
    g, a = torch.randn(1, length, p), torch.randn(1, length, d)
    seen = set()
    for order in LAYOUTS.values():
        back = [order.index(axis) for axis in range(3)]
        for records in (1, 5):
            slopes, inputs = (
                each.expand(records, *each.shape[1:]).permute(order).contiguous().permute(back)
                for each in (g, a)
            )
            chunks = SequenceOuter(slopes, inputs).one_by_one()
            parts = [[chunk.form(record) for chunk in chunks] for record in range(records)]
            assert all(each.data_ptr() % ALIGNMENT == 0 for part in parts for each in part)
            formed = [torch.cat(part) for part in parts]
            seen |= {each.numpy().tobytes() for each in formed}
    assert len(seen) == 1
    torch.testing.assert_close(formed[0].view(p, d), g[0].T @ a[0], rtol=1e-4, atol=1e-3)


class Optional(nn.Module):
    """Two layers, of which the second runs only if some record asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.main = nn.Linear(178, 184, bias=False), nn.Linear(128, 160, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.main(x[:, :, :128]).sum((1, 2))
        asking = x[:, 0, 178] > 0
        return h + self.asked(x[:, :, :178]).sum((1, 2)) * asking if bool(asking.any()) else h


@pytest.mark.parametrize("way", ["record by record", "claimed, record by record"])
def test_a_large_layer_that_runs_for_one_record_leaves_the_norms_of_others(
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of squares that were cut elsewhere read all others' norms anew: 1.02 C in 5,000
    records.
    """
    seen = spied(monkeypatch)
    measured(monkeypatch, way)
    torch.manual_seed(0)
    model = Optional()
    x = torch.randn(40, 32, 179)
    x[:, :, 178] = -1
    x[0] = 0
    sums = []
    for asks in (-1, 1):
        x[0, 0, 178] = asks
        engine = Engine(
            model, Clipping(1.0), capacity=100, positions={"asked": 32, "main": 32}, reduction="sum"
        )
        engine.attach()
        engine.begin_microbatch(len(x))
        model(x).sum().backward()
        sums.append(engine.split(engine.take())[1].clone())
        engine.detach()
    assert seen == ([] if way.startswith("claimed") else [1, 2])
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-9, atol=0)


def norm_of(parts: list[Tensor], block: int) -> Tensor:
    read = [torch.empty(blocks_in(len(part), block)) for part in parts]
    for part, out in zip(parts, read, strict=True):
        read_part(part, out, block=block)
    each = [part[None] for part in parts]
    return squared_norms_of_parts(each, torch.cat(read).double()[None], block=block)


@pytest.mark.parametrize("block", [NORM_BLOCK, LONG_BLOCK])
def test_short_layers_are_read_alike_beside_others(block: int) -> None:
    """What another layer adds for the sake of one record must not raise what all others measure:
    0.1 C in 6,000 records.
    """
    for entries in (1, 20, 1000, 1024, 1100):
        part = torch.randn(entries)
        alone, beside = (norm_of(parts, block) for parts in ([part], [torch.zeros(2000), part]))
        assert abs(float(alone / beside) - 1) <= 1e-12
        assert float(alone) >= float(part.double().square().sum())


@pytest.mark.parametrize("block", [NORM_BLOCK, LONG_BLOCK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_that_are_measured_together_have_the_bits_of_those_measured_alone(
    block: int, dtype: torch.dtype
) -> None:
    """Zeros, squares that leave float32's range, and what is not finite, too; and it is said
    whether there is any.
    """
    torch.manual_seed(0)
    several = [torch.randn(40, entries, dtype=dtype) for entries in (1, 20, 1024, 1100, 3000)]
    for odd in (None, 0.0, 1e-30, 1e-42, 1e30, math.inf, math.nan):
        if odd is not None:
            several[3][7] *= odd
        together, tame = squared_norms_together(several, block=block)
        assert tame == (odd is None and dtype == torch.float32)
        for each, squared in zip(several, together, strict=True):
            alone = row_squared_norms(each, block=block)
            assert torch.equal(squared.nan_to_num(nan=-1), alone.nan_to_num(nan=-1))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("records", [5, GROUP_ROWS + 1])
def test_what_is_longer_than_its_ghost_norm_is_shortened_to_it(alone: bool, records: int) -> None:
    """Whatever made the ghost norm too small; added up in float32, and in float64."""
    torch.manual_seed(0)
    g, a = torch.randn(records, 33, 48), torch.randn(records, 33, 32)
    formed = SequenceOuter(g, a).form(slice(0, records)).double()
    each = SequenceOuter(g, a, ghost_norms=True, alone=alone)
    ghost = each.squared_norms([[records]], LONG_BLOCK)
    ghost[1] /= 4
    ghost[3] = 0
    weights = torch.rand(1, records, dtype=torch.float64)
    factors = torch.ones(records, dtype=torch.float64)
    factors[1], factors[3] = 0.5, 0.0
    sums = Sums([48 * 32])
    each.add_weighted_sums(sums, weights, [[records]])
    expected = (weights[0] * factors) @ formed
    torch.testing.assert_close(sums.settle()[0], expected, rtol=1e-4, atol=1e-4)


def test_a_lone_claim_is_kept_when_norms_of_layers_in_turn_are_added() -> None:
    """To a copy: else what is longer than was claimed would not be shortened."""
    torch.manual_seed(0)
    claimed = SequenceOuter(torch.randn(3, 9, 4), torch.randn(3, 9, 5), ghost_norms=True)
    units = Clipping(1.0).units(["first", "second"])
    clipped = clipped_sum_module.ClippedSum(
        units, 2.0**-8, None, 3, torch.device("cpu"), [[3]], common_factor=False
    )
    norms = clipped.measure({0: claimed}, [0, 1])
    assert claimed._ghost is not None
    claim = claimed._ghost.clone()
    norms.squared[""] += 1e6
    assert torch.equal(claimed._ghost, claim)


def test_a_few_at_once_add_what_they_add_singly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers are formed a few records at a time: as one after the other but for rounding,
    with records that do not count, in two units, and with several rows to a record.
    """
    monkeypatch.setattr(native, "library", lambda: None)
    torch.manual_seed(0)
    g, a = torch.randn(9, 33, 48), torch.randn(9, 33, 32)
    g[4, 5, 6] = math.nan
    wide = torch.randn(9, 33, 1100)
    for K, group_rows in ((1, 160), (3, 160), (1, 8)):
        monkeypatch.setattr(record_by_record_module, "GROUP_ROWS", group_rows)
        found = []
        for few in (4, 1 << 30):
            monkeypatch.setattr(record_by_record_module, "FEW", few)
            outer = [SequenceOuter(g, a), SequenceOuter(g[:, :, :16], wide)]
            rows = [each if K == 1 else sum_rows(each, 9, K) for each in outer]
            layers = dict(enumerate(replace(each, alone=True) for each in rows))
            sums = [Sums([48 * 32], None, ((1.0, 0.5),)), Sums([16 * 1100], None, ((1.0, 0.5),))]

            def weigh(part: slice, squared: dict[str, Tensor]) -> dict[str, Tensor]:
                counts = torch.isfinite(sum(squared.values()))
                return {
                    unit: torch.where(counts, torch.stack([each.rsqrt(), each.rsqrt() / 3]), 0.0)
                    for unit, each in squared.items()
                }

            with torch.no_grad():
                add_record_by_record(layers, ["x", "y"], sums, [[9 // K]], LONG_BLOCK, weigh)
            found.append([total for each in sums for total in each.settle()])
        for one, other in zip(*found, strict=True):
            assert 0.1 < float(one.norm()) < 9
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_how_many_records_wait_for_their_weights_changes_rounding_alone(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is decided by a public number: how many entries a record's gradients have."""
    torch.manual_seed(0)
    layers = {0: SequenceOuter(torch.randn(9, 33, 48), torch.randn(9, 33, 32))}
    found = []
    for waiting, expected in ((1, [1] * 9), (4 * 48 * 32 + 5, [4, 4, 1]), (1 << 22, [9])):
        monkeypatch.setattr(record_by_record_module, "WAITING", waiting)
        sums, seen = [Sums([48 * 32])], []

        def weigh(
            part: slice, squared: dict[str, Tensor], seen: list[int] = seen
        ) -> dict[str, Tensor]:
            seen.append(part.stop - part.start)
            return {unit: each.rsqrt()[None] for unit, each in squared.items()}

        with torch.no_grad():
            add_record_by_record(layers, ["all"], sums, [[9]], LONG_BLOCK, weigh)
        assert seen == expected
        found.append(sums[0].settle()[0])
    assert 0.1 < float(found[0].norm()) <= 9
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("block", [NORM_BLOCK, LONG_BLOCK])
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-12, 1e18, 1e30, 1e37])
def test_norms_of_parts_are_never_read_low_and_hardly_high(block: int, size: float) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(entries) * size for entries in (3000, 1, 700)]
    truth = sum(float(part.double().square().sum()) for part in parts)
    assert truth <= float(norm_of(parts, block)) <= truth * 1.001
    parts[1][0] = math.nan
    assert math.isnan(float(norm_of(parts, block)))


@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_records_without_positions_add_nothing(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, "record by record")
    sums = by_engine(
        nn.Linear(5, 4, bias=False),
        torch.randn(3, 0, 5),
        torch.zeros(3),
        Clipping(1.0),
        capacity=3,
        reduction="sum",
    )
    assert joint_norm(sums) == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_part_without_records_adds_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, way)
    model = nn.Sequential(nn.Linear(5, 4))
    engine = Engine(model, Clipping(1.0), capacity=9, reduction="sum", partial_backward=True)
    engine.attach()
    engine.begin_microbatch(3)
    for rows in (0, 3):
        model(torch.ones(rows, 6, 5)).sum().backward()
    assert float(engine.take()[0].norm()) == pytest.approx(3.0, rel=0.01)
    engine.detach()
