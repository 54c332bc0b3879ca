"""The noise is N(0, 1): body, splice and tail; independent in every direction; the same with any
threads.

Statistical tests run on seeded streams, so they either always pass or always fail; the stated
false-alarm probability is what a wrong choice of seed would have cost.
"""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
import torch
from scipy import stats

from dpoptim.noise import KeyStream, add_normal, fill_standard_normal, gaussian, series, ziggurat
from dpoptim.noise.ziggurat_layers import EDGES, FLOOR, LAYERS, RISE, TAIL_START


def normals(n: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    out = torch.full((n,), math.nan, dtype=dtype)
    fill_standard_normal(KeyStream.from_seed(seed, "noise"), out)
    return out


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    """Four million draws, in several chunks the last of which is short."""
    return normals(4_000_000).numpy()


# --- the law -------------------------------------------------------------------------------------


def test_standard_deviation(sample: np.ndarray) -> None:
    """Chi-square of 1e6 coordinates within 5 sigma (0.35 % of the standard deviation): false alarm
    6e-7.
    """
    for part in sample.reshape(4, -1):
        assert abs((part**2).sum() - part.size) < 5 * math.sqrt(2 * part.size)


def test_moments(sample: np.ndarray) -> None:
    """The first eight moments, each within 5.5 of its standard errors: false alarm below 8 x
    4e-8.
    """
    power = np.ones_like(sample)
    for k in range(1, 9):
        power *= sample
        expected, second = (stats.norm.moment(order) for order in (k, 2 * k))
        assert abs(power.mean() - expected) < 5.5 * math.sqrt((second - expected**2) / sample.size)


def test_kolmogorov_smirnov(sample: np.ndarray) -> None:
    """Law of z and of |z|, a million draws each: false alarm 1e-7 each."""
    assert stats.kstest(sample[:1_000_000], "norm").pvalue > 1e-7
    assert stats.kstest(np.abs(sample[-1_000_000:]), "halfnorm").pvalue > 1e-7


def test_fine_histogram(sample: np.ndarray) -> None:
    """Chi-square over 4,000 equally likely cells, finer than the layers near 0: false alarm 1e-7
    each way.
    """
    cells = 4000
    counts = np.bincount((stats.norm.cdf(sample) * cells).astype(int), minlength=cells)
    chi_square = ((counts - sample.size / cells) ** 2).sum() / (sample.size / cells)
    assert 1e-7 < stats.chi2.sf(chi_square, cells - 1) < 1 - 1e-7


def test_splice_frequencies(sample: np.ndarray) -> None:
    """Draws beyond 3, R and 4.5 sigma, both signs, as often as due: exact tests, 6 x 1e-7 in
    all.
    """
    for edge in (3.0, TAIL_START, 4.5):
        for side in (sample, -sample):
            count = int((side > edge).sum())
            assert stats.binomtest(count, sample.size, stats.norm.sf(edge)).pvalue > 1e-7


def test_tail_has_the_conditional_law() -> None:
    """3e5 draws given |z| > R: KS against sf(x) / sf(R), and the far part again alone: false alarm
    1e-7 each.

    Beyond 5.77 sigma, where float32 torch.randn ends, 45 draws are due; |z| never ends before 6.
    """
    start = TAIL_START
    drawn = ziggurat.tail(KeyStream.from_seed(2, "noise"), 300_000)
    assert drawn.shape == (300_000,)
    assert drawn.min() > start
    for edge in (start, 5.0):
        beyond = drawn[drawn > edge]
        given = stats.norm.sf(edge)
        assert (
            stats.kstest(beyond, lambda x, given=given: 1 - stats.norm.sf(x) / given).pvalue > 1e-7
        )
    for edge in (5.0, 5.77, 6.0):
        due = stats.norm.sf(edge) / stats.norm.sf(start)
        assert stats.binomtest(int((drawn > edge).sum()), drawn.size, due).pvalue > 1e-7


def test_tail_reaches_13_sigma(monkeypatch) -> None:
    """The largest proposal, from the smallest word, is finite and beyond 13 sigma if it is
    accepted.
    """
    uniforms = iter([np.array([0.5 * 2.0**-64]), np.array([1e-300])])
    monkeypatch.setattr(ziggurat, "_uniforms", lambda stream, n: next(uniforms))
    (reach,) = ziggurat.tail(KeyStream(), 1)
    assert 13 < reach < 16


def test_layer_zero_settles_into_the_tail_with_its_sign() -> None:
    edge = EDGES
    place = np.concatenate(
        [np.full(5000, 0.5 * (edge[0] + edge[1])), np.full(5000, -0.5 * (edge[0] + edge[1]))]
    )
    settled = ziggurat.settle(KeyStream.from_seed(3, "noise"), place, np.zeros(10_000, np.int64))
    assert (settled[:5000] > edge[1]).all()
    assert (settled[5000:] < -edge[1]).all()


@pytest.mark.parametrize("layer", [1, 2, 40, 500, 1000, 1022, 1023])
def test_curved_end_of_a_layer(layer: int) -> None:
    """Places spread over the curved end stay with the share of the layer's height that is under
    the curve.

    Those that stay are seen because they are returned untouched. Their number and their law (KS)
    are compared with f(x) - f(x_i) over the end: false alarm 1e-7 each.
    """
    stream = KeyStream.from_seed(4, f"layer {layer}")
    outer, inner = EDGES[layer], EDGES[layer + 1]
    n = 100_000
    place = inner + (outer - inner) * (np.arange(n) + 0.5) / n
    settled = ziggurat.settle(stream, place.copy(), np.full(n, layer))
    stayed = settled == place
    under = (np.exp(-(place**2) / 2) - math.exp(-(outer**2) / 2)) / (
        math.exp(-(inner**2) / 2) - math.exp(-(outer**2) / 2)
    )
    assert abs(stayed.sum() - under.sum()) < 5.4 * math.sqrt((under * (1 - under)).sum())
    cumulative = np.cumsum(under) / under.sum()
    assert stats.kstest(place[stayed], lambda x: np.interp(x, place, cumulative)).pvalue > 1e-7
    assert stats.kstest(settled[~stayed], "norm").pvalue > 1e-7  # the others are whole new draws


def test_share_of_draws_that_need_settling() -> None:
    """1 minus the mean of x_{i+1} / x_i, over 2^20 throws, within 5.4 sigma: false alarm 7e-8."""
    n = 1 << 20
    out = np.empty(n)
    where, place, layer = ziggurat.throw(
        KeyStream.from_seed(5, "noise"), out, ziggurat.Scratch.of(n)
    )
    share = 1 - (EDGES[1:] / EDGES[:-1]).mean()
    assert 0.004 < share < 0.005
    assert abs(len(where) - n * share) < 5.4 * math.sqrt(n * share)
    np.testing.assert_array_equal(out[where], place)
    assert (np.abs(place) >= EDGES[layer + 1]).all()
    assert (np.abs(place) <= EDGES[layer]).all()


def test_tables_against_40_digits() -> None:
    """The density that the float64 tables give, computed to 40 digits, is the normal's to
    1e-13.
    """
    with mp.workdps(40):
        edges = [mp.mpf(float(x)) for x in EDGES]
        per_layer = [1 / (2 * LAYERS * x) for x in edges[:-1]]
        start = mp.mpf("4.0388498461095045227144234053359312047009919554155")
        area = start * mp.exp(-(start**2) / 2) + mp.sqrt(mp.pi / 2) * mp.erfc(start / mp.sqrt(2))
        assert abs(edges[1] / start - 1) < 1e-15
        whole = mp.sqrt(mp.pi / 2) / (LAYERS * area)  # the share of throws that are kept
        full = mp.mpf(0)
        for i in range(LAYERS):
            # In the middle of the curved end of layer i; below it layers 0 .. i - 1 are full.
            if i:
                x = (edges[i] + edges[i + 1]) / 2
                kept = (mp.exp(-(x**2) / 2) - float(FLOOR[i])) / float(RISE[i])
                assert abs((full + kept * per_layer[i]) / whole / mp.npdf(x) - 1) < 1e-13
            full += per_layer[i]
        tail_share = (1 - edges[1] / edges[0]) / LAYERS / whole
        assert abs(tail_share / mp.erfc(start / mp.sqrt(2)) - 1) < 1e-13


@pytest.mark.parametrize(
    ("function", "true", "lowest"),
    [(series.exponential, mp.exp, -20.0), (series.logarithm, mp.log, 2.0**-65)],
)
def test_exp_and_log_against_40_digits(function, true, lowest) -> None:
    """Near their ends as well, where log nears 0."""
    random = np.random.default_rng(0)
    highest = 0.0 if lowest < 0 else 1.0
    depths = np.concatenate([random.uniform(0, 1, 2_000), 2.0 ** -random.uniform(1, 60, 2_000)])
    x = np.concatenate([highest - depths * min(highest - lowest, 20), [lowest, highest]])
    x = x[(x >= lowest) & (x <= highest)]
    if lowest > 0:
        x = np.concatenate([x, 2.0 ** -random.uniform(0, 65, 2_000)])
    with mp.workdps(40):
        for given, found in zip(x, function(x), strict=True):
            expected = true(mp.mpf(float(given)))
            assert abs(float(found) - expected) <= 2.0**-50 * abs(expected)


def test_neighbouring_values_are_equally_likely() -> None:
    """No coarse lattice: 1e6 float64 draws all differ, and their last 12 bits are uniform (1e-7
    each way).

    Only draws in [1, 2), where one unit in the last place is 2^-52; coarser uniforms would leave
    zeros there.
    """
    z = normals(1_000_000, seed=8).numpy()
    assert len(np.unique(z)) == z.size
    bits = z[(z >= 1) & (z < 2)].view(np.uint64) & np.uint64(4095)
    counts = np.bincount(bits.astype(np.int64), minlength=4096)
    chi_square = ((counts - bits.size / 4096) ** 2).sum() / (bits.size / 4096)
    assert 1e-7 < stats.chi2.sf(chi_square, 4095) < 1 - 1e-7


# --- independence --------------------------------------------------------------------------------


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In units of its standard deviation when there is none."""
    return float(abs((a * b).sum()) / math.sqrt(a.size))


def test_autocorrelation(sample: np.ndarray) -> None:
    """Of z and of z^2, at short lags and at the lengths of a block and a chunk: 5.7 sigma, 22 x
    1.2e-8.
    """
    for drawn in (sample, (sample**2 - 1) / math.sqrt(2)):
        for lag in (1, 2, 3, 7, 64, 1024, 16_383, 16_384, 16_385, 1 << 20, (1 << 20) + 1):
            assert correlation(drawn[lag:], drawn[:-lag]) < 5.7


def test_consecutive_fills_branches_and_streams_are_uncorrelated() -> None:
    """All pairs of six fills, z and z^2, 5.7 sigma: false alarm below 30 x 1.2e-8."""
    first, second = KeyStream.from_seed(1, "a"), KeyStream.from_seed(1, "b")
    fills = []
    for stream in (first, first, first.branch(), second, KeyStream.from_seed(2, "a"), second):
        out = torch.empty(200_000, dtype=torch.float64)
        fill_standard_normal(stream, out)
        fills.append(out.numpy())
    for i, a in enumerate(fills):
        for b in fills[:i]:
            assert correlation(a, b) < 5.7
            assert correlation((a**2 - 1) / math.sqrt(2), (b**2 - 1) / math.sqrt(2)) < 5.7


def test_streams_keyed_by_the_os_differ_after_fixing_global_seeds() -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        out = torch.empty(1000, dtype=torch.float64)
        fill_standard_normal(KeyStream(), out)
        drawn.append(out)
    assert not torch.isin(drawn[0], drawn[1]).any()


# --- the interface -------------------------------------------------------------------------------


def test_threads_do_not_change_the_draws(monkeypatch) -> None:
    monkeypatch.setattr(gaussian, "_CHUNK", gaussian.BLOCK_WORDS)
    n = 5 * gaussian.BLOCK_WORDS + 17
    drawn = []
    for threads in (1, 2, 5, None):
        out = torch.zeros(n, dtype=torch.float64)
        fill_standard_normal(KeyStream.from_seed(1, "noise"), out, threads=threads)
        added = torch.zeros(n, dtype=torch.float64)
        add_normal(KeyStream.from_seed(1, "noise"), added, 1.0, threads=threads)
        assert torch.equal(out, added)
        drawn.append(out)
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])
    assert len(drawn[0].unique()) == n


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (3, 5, 2), (0,), (4, 0), (16_385,), (1 << 20,), ((1 << 20) + 1,)]
)
def test_every_entry_is_written(shape: tuple[int, ...]) -> None:
    out = torch.full(shape, math.nan, dtype=torch.float64)
    fill_standard_normal(KeyStream(), out)
    assert out.isfinite().all()
    assert len(out.unique()) == out.numel()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_smaller_dtypes_are_float64_draws_rounded_once(dtype: torch.dtype) -> None:
    n = 50_000
    z = normals(n, seed=3)
    assert torch.equal(normals(n, seed=3, dtype=dtype), z.to(dtype))
    start = (torch.arange(n, dtype=torch.float64) / 977 - 20).to(dtype)
    out = start.clone()
    add_normal(KeyStream.from_seed(3, "noise"), out, 0.7)
    assert torch.equal(out, torch.add(start.double(), z, alpha=0.7).to(dtype))


def test_add_adds_in_place_to_parameters_and_views() -> None:
    weights = torch.nn.Parameter(torch.ones(4, 6))
    add_normal(KeyStream(), weights, 2.0)
    assert (weights != 1).all()
    assert weights.grad_fn is None
    table = torch.zeros(4, 6, dtype=torch.float64)
    fill_standard_normal(KeyStream(), table[1:3])
    assert (table[1:3] != 0).all()
    assert (table[[0, 3]] == 0).all()


def test_zero_noise_is_no_noise() -> None:
    out = torch.arange(10.0)
    add_normal(KeyStream(), out, 0.0)
    assert torch.equal(out, torch.arange(10.0))


def test_a_tensor_elsewhere_gets_the_same_draws(monkeypatch) -> None:
    """Through the host in several pieces; on a GPU where there is one, else on the CPU taken for
    one.
    """
    monkeypatch.setattr(gaussian, "_CHUNK", gaussian.BLOCK_WORDS)
    monkeypatch.setattr(gaussian, "_PIECE", 2 * gaussian.BLOCK_WORDS)
    n = 5 * gaussian.BLOCK_WORDS + 3
    expected = torch.ones(n)
    add_normal(KeyStream.from_seed(1, "noise"), expected, 3.0)
    if torch.cuda.is_available():
        out = torch.ones(n, device="cuda")
        add_normal(KeyStream.from_seed(1, "noise"), out, 3.0)
    else:
        out = torch.ones(n)
        gaussian._draw_through_host(KeyStream.from_seed(1, "noise"), [out], 3.0, 1)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("where", ["on the CPU", "through the host"])
def test_several_tensors_get_what_one_vector_gets(monkeypatch, where: str) -> None:
    """Cut at other places than the draws are, and rounded once each."""
    monkeypatch.setattr(gaussian, "_CHUNK", 2 * gaussian.BLOCK_WORDS)
    monkeypatch.setattr(gaussian, "_PIECE", 4 * gaussian.BLOCK_WORDS)
    sizes = [7, 0, 5 * gaussian.BLOCK_WORDS, 1, 3 * gaussian.BLOCK_WORDS + 5, 20]
    dtypes = [torch.float32, torch.float64, torch.float32, torch.bfloat16] * 2
    start = torch.arange(sum(sizes), dtype=torch.float64) / 64 % 32  # exact in every dtype
    parts = [
        each.to(dtype).clone() for each, dtype in zip(start.split(sizes), dtypes, strict=False)
    ]
    if where == "on the CPU":
        add_normal(KeyStream.from_seed(1, "noise"), parts, 3.0)
    else:
        flat = [each for each in parts if len(each)]
        gaussian._draw_through_host(KeyStream.from_seed(1, "noise"), flat, 3.0, 1)
    started = [each.to(p.dtype).double() for each, p in zip(start.split(sizes), parts, strict=True)]
    whole = torch.cat(started)
    add_normal(KeyStream.from_seed(1, "noise"), whole, 3.0)
    for part, expected in zip(parts, whole.split(sizes), strict=True):
        assert torch.equal(part, expected.to(part.dtype))


def test_bad_arguments_are_named_and_nothing_is_written() -> None:
    stream = KeyStream()
    with pytest.raises(TypeError, match=r"^out must be a floating-point tensor"):
        fill_standard_normal(stream, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^out must be contiguous"):
        fill_standard_normal(stream, torch.zeros(3, 4).T)
    for std in (-1.0, math.nan, math.inf):
        out = torch.zeros(3)
        with pytest.raises(ValueError, match=r"^std must be finite"):
            add_normal(stream, out, std)
        assert (out == 0).all()
    with pytest.raises(ValueError, match=r"^threads must be"):
        fill_standard_normal(stream, torch.zeros(3), threads=0)
