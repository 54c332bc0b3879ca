"""Noise that is drawn where a tensor lies: the standard's keystream, the ziggurat's draws, each
word once; and kernels that draw what the reference on the CPU does, to the last bit.

The reference is tested everywhere. The kernels run on a GPU where there is one, and otherwise in
Triton's interpreter (``TRITON_INTERPRET=1``, where Triton is installed); else they are not tested.
"""

import ctypes
import importlib.util
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats

from dpoptim.noise import KeyStream, add_normal, fill_standard_normal, gaussian, on_device
from dpoptim.noise import on_device_reference as reference
from dpoptim.noise.few_rows import FewRows
from dpoptim.noise.on_device import add_there, draws_on
from dpoptim.noise.on_device_reference import REGION, draws, keystream
from dpoptim.noise.ziggurat import settle
from dpoptim.noise.ziggurat_layers import EDGES, INNER, TAIL_START
from drawn_by_reference import launch as launch_reference
from drawn_by_reference import launched_by

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
ON_GPU = HAS_TRITON and torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda:0") if ON_GPU else CPU
needs_kernels = pytest.mark.skipif(
    not (ON_GPU or (HAS_TRITON and INTERPRETED)),
    reason="needs Triton and a GPU, or TRITON_INTERPRET=1",
)
needs_interpreter = pytest.mark.skipif(
    not (HAS_TRITON and INTERPRETED), reason="needs Triton and TRITON_INTERPRET=1"
)
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs Triton and a GPU")
RFC_KEY = bytes(range(32))


@pytest.fixture
def by_reference() -> Iterator[None]:
    """The CPU's tensors are drawn for as an accelerator's, by the reference."""
    with launched_by(launch_reference):
        yield


@pytest.fixture
def tried_anew() -> Iterator[None]:
    draws_on.cache_clear()
    yield
    draws_on.cache_clear()


# ---- The keystream


def test_the_reference_has_the_block_of_the_standard() -> None:
    """RFC 8439, section 2.3.2, whose nonce has a second word that ours leaves 0: by the cipher that
    the reference asks, and the reference by that cipher.
    """
    start = (1).to_bytes(4, "little") + bytes.fromhex("000000090000004a00000000")
    block = Cipher(algorithms.ChaCha20(RFC_KEY, start), None).encryptor().update(bytes(64))
    assert block.hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4ed2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    own = Cipher(
        algorithms.ChaCha20(RFC_KEY, b"\x07\0\0\0" + b"\x02\0\0\0" + bytes(8)), None
    ).encryptor()
    assert keystream(RFC_KEY, 2, 7, 3).astype("<u8").tobytes() == own.update(bytes(192))


@needs_kernels
@pytest.mark.parametrize("first", [0, 1, 2**31 - 20, 2**32 - 64])
@pytest.mark.parametrize("nonce", [0, 1, 9, 2**32 - 1])
def test_the_kernels_keystream_is_the_references(first: int, nonce: int) -> None:
    from noise.keystream_kernel import keystream as by_kernel

    for key in (RFC_KEY, bytes(32), b"\xff" * 32, os.urandom(32)):
        found = by_kernel(key, nonce, first, 64, DEVICE)
        assert np.array_equal(found, keystream(key, nonce, first, 64))


def test_no_block_of_a_key_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of odd lengths, with entries that are settled in several attempts."""
    used: list[np.ndarray] = []
    original = reference.keystream

    def recorded(key: bytes, nonce: int, first: int, blocks: int) -> Any:
        used.append((nonce << 32) + np.arange(first, first + blocks))
        return original(key, nonce, first, blocks)

    monkeypatch.setattr(reference, "keystream", recorded)
    draws(os.urandom(32), [300_001, 1, 77_777, REGION])
    blocks = np.concatenate(used)
    assert blocks.max() >> 32 >= 2
    assert len(np.unique(blocks)) == len(blocks)
    assert (blocks & (2**32 - 1)).max() < 2**32 - 1


def test_a_piece_stays_within_a_key() -> None:
    assert on_device.MOST_REGIONS * REGION <= 2**32


def test_every_piece_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    monkeypatch.setattr(on_device, "MOST_REGIONS", 2)
    with launched_by(lambda regions, tables, dtype, key, std: keys.append(key)):
        for stream in (KeyStream(), KeyStream.from_seed(1, "noise")):
            for _ in range(3):
                add_there(stream, [torch.zeros(5 * REGION), torch.zeros(3)], 1.0)
    assert len(keys) == 2 * 3 * 3
    assert len({*keys}) == len(keys)


# ---- The law, of the reference


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    """Two million draws, of two tensors of which one is odd."""
    return draws(bytes(range(1, 33)), [1_000_001, 999_999])


def test_the_law(sample: np.ndarray) -> None:
    """Each false alarm is below 1e-6."""
    assert abs((sample**2).sum() - sample.size) < 5 * math.sqrt(2 * sample.size)
    assert stats.kstest(sample, "norm").pvalue > 1e-7
    counts = np.bincount((stats.norm.cdf(sample) * 1000).astype(int), minlength=1000)
    chi_square = ((counts - sample.size / 1000) ** 2).sum() / (sample.size / 1000)
    assert 1e-7 < stats.chi2.sf(chi_square, 999) < 1 - 1e-7
    for start in (3.0, 4.0388):  # the second is where the tail begins: 108 of the draws
        share = 2 * stats.norm.sf(start)
        beyond = (np.abs(sample) > start).sum()
        assert 1e-7 < stats.binom.cdf(beyond, sample.size, share) < 1 - 1e-7


def test_draws_are_unrelated(sample: np.ndarray) -> None:
    """Neighbours, those of a block and of programs, and tensors: false alarm below 1e-6 each."""
    for lag in (1, 2, 8, 512, 4096, REGION, 1_000_000, 1_000_001):
        correlation = float(np.mean(sample[lag:] * sample[:-lag]))
        assert abs(correlation) < 5.5 / math.sqrt(sample.size - lag)


def test_throws_outside_are_settled_by_the_ziggurats_law() -> None:
    """On made-up throws, as many as 10 million draws have: all layers' ends."""
    generator, count = np.random.default_rng(0), 40_000
    width = EDGES[:-1]
    share = (width - INNER) / width
    layer = generator.choice(len(share), count, p=share / share.sum())
    place = INNER[layer] + generator.random(count) * (width - INNER)[layer]
    place *= generator.choice([-1, 1], count)
    found = reference.settled(os.urandom(32), np.arange(count), place, layer)
    expected = settle(KeyStream(), place.copy(), layer.copy())
    assert stats.ks_2samp(found, expected).pvalue > 1e-7
    for low, high in pairwise([0, 0.5, 1, 2, 3, 4.1, 9]):  # where few draws are
        counts = [((low <= abs(z)) & (abs(z) < high)).sum() for z in (found, expected)]
        assert abs(counts[0] - counts[1]) < 5.5 * math.sqrt(sum(counts) + 1)
    same_side = np.sign(found) == np.sign(place)
    assert same_side[layer == 0].all()
    assert 0.5 < same_side.mean() < 0.95  # the refused ones are drawn anew


def test_the_tail_is_the_normals() -> None:
    start, count = TAIL_START, 20_000
    place = np.where(np.arange(count) % 2, start * 1.01, -start * 1.01)
    found = reference.settled(os.urandom(32), np.arange(count), place, np.zeros(count, int))
    assert np.array_equal(np.sign(found), np.sign(place))
    law = stats.truncnorm(start, math.inf)
    assert stats.kstest(np.abs(found), law.cdf).pvalue > 1e-7


def test_lists_are_long_enough() -> None:
    """Odds below 2^-200 that more of a region's entries are listed than there is room for."""
    share = float(np.mean(1 - INNER / EDGES[:-1]))
    assert 0.004 < share < 0.0045  # 70 entries are expected
    assert stats.binom.logsf(256, REGION, share) < -200 * math.log(2)


# ---- What surrounds the kernels


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("std", [None, 3.0])
def test_all_dtypes_get_the_same_draws_rounded(dtype: torch.dtype, std: float | None) -> None:
    out = torch.ones(2 * REGION + 7, dtype=dtype)
    gaussian._draw_where_it_lies(KeyStream.from_seed(3, "noise"), [out], std)
    secret = bytearray(32)
    KeyStream.from_seed(3, "noise").branch().fill(secret)
    z = torch.from_numpy(draws(bytes(secret), [len(out)]))
    assert torch.equal(out, (z if std is None else 1.0 + 3.0 * z).to(dtype))


@pytest.mark.usefixtures("by_reference")
def test_a_vector_of_all_kinds_gets_noise_on_every_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dtypes, tables of few rows, in several pieces: all draws are different, of variance 1."""
    monkeypatch.setattr(gaussian, "_AT_ONCE", 5000)
    monkeypatch.setattr(on_device, "MOST_REGIONS", 2)
    row, value = torch.tensor([3, 700]), torch.full((2, 9), 5.0, dtype=torch.float64)
    table = FewRows(torch.full((7200,), 99.0), 0, row, value)
    flat: list[Any] = [torch.zeros(9001), torch.zeros(3 * REGION + 1).double(), table]
    flat += [torch.zeros(100).bfloat16() for _ in range(3)] + [torch.zeros(1)]
    gaussian._draw_where_it_lies(KeyStream(), flat, 1.0)
    noise = [each.double() for each in flat if isinstance(each, torch.Tensor)]
    noise.append(table.out.double() - table.dense())
    for each in noise:
        assert abs(float((each**2).mean()) - 1) < 6 * math.sqrt(2 / len(each))
    fine = torch.cat([each for each in noise if len(each) > 100])
    assert len(fine.unique()) > 0.998 * len(fine)


@pytest.mark.usefixtures("by_reference")
def test_seeds_repeat_and_calls_do_not() -> None:
    def drawn(stream: KeyStream) -> torch.Tensor:
        out = torch.zeros(1000)
        add_there(stream, [out], 1.0)
        return out

    first, again, other = (KeyStream.from_seed(seed, "noise") for seed in (1, 1, 2))
    found = drawn(first)
    assert torch.equal(drawn(again), found)
    assert not torch.equal(drawn(first), found)
    assert not torch.equal(drawn(other), found)
    assert not torch.equal(drawn(KeyStream()), drawn(KeyStream()))


@pytest.mark.parametrize(
    "wrong", ["one draw", "scale", "sign of the tail", "no noise", "retries use the throws' words"]
)
def test_a_device_that_adds_something_else_is_refused(wrong: str) -> None:
    def nonce_before(key: bytes, nonce: int, first: int, blocks: int) -> Any:
        return keystream(key, max(nonce - 1, 0), first, blocks)

    def spoil(each: np.ndarray) -> None:
        if wrong == "one draw":
            each[77] = np.nextafter(each[77], math.inf)
        elif wrong == "scale":
            each *= 1.01
        elif wrong == "sign of the tail":
            np.copyto(each, 1 + abs(each - 1), where=abs(each - 1) > 1.7 * 4.04)

    def launch(regions: Any, *given: Any) -> None:
        if wrong == "retries use the throws' words":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(reference, "keystream", nonce_before)
                launch_reference(regions, *given)
        elif wrong != "no noise":
            launch_reference(regions, *given)
            on_memory(regions, np.float64, spoil)

    with (
        launched_by(launch),
        pytest.raises(RuntimeError, match="noise cannot be drawn on cpu"),
    ):
        draws_on(CPU, torch.float64)


def on_memory(regions: torch.Tensor, kind: type, change: Any) -> None:
    """Change the entries of all regions but small ones."""
    for address, entries in regions.tolist():
        if entries > 77:
            memory = (ctypes.c_char * (entries * np.dtype(kind).itemsize)).from_address(address)
            change(np.frombuffer(memory, kind))


def test_where_kernels_fail_the_cpu_draws_and_says_so() -> None:
    def launch(*given: Any) -> None:
        raise RuntimeError("no compiler")

    with launched_by(launch), pytest.warns(RuntimeWarning, match="drawn on the CPU.*no compiler"):
        assert not draws_on(CPU, torch.float32)
    with launched_by(None), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not draws_on(CPU, torch.float32)


# ---- The kernels


@needs_kernels
@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_kernels_add_what_the_reference_draws(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which `draws_on` compares; in the interpreter, fewer draws, of a key with two in the tail."""
    if not ON_GPU:
        with_tail(monkeypatch, (REGION + 5000, 1, 777))
    assert draws_on(DEVICE, dtype)


def with_tail(patch: pytest.MonkeyPatch, lengths: tuple[int, ...]) -> None:
    """The sample is of these lengths, from a key with draws in both tails."""
    patch.setattr(on_device, "CHECKED", lengths)
    for seed in range(1000):
        secret = bytearray(32)
        KeyStream.from_seed(seed, "noise").fill(secret)
        z = draws(bytes(secret), lengths)
        if z.min() < -4.04 and z.max() > 4.04:
            break
    patch.setattr(on_device, "KeyStream", lambda: KeyStream.from_seed(seed, "noise"))


@needs_kernels
@pytest.mark.parametrize("length", [1, 15, 513, 4097, REGION + 1])
def test_odd_lengths_and_addresses(length: int) -> None:
    """Nothing is written beside a target that begins anywhere in memory."""
    whole = torch.full((length + 20,), 2.0, device=DEVICE)
    stream, secret = KeyStream.from_seed(9, "noise"), bytearray(32)
    add_there(stream, [whole[11 : 11 + length]], 0.7)
    KeyStream.from_seed(9, "noise").branch().fill(secret)
    expected = torch.full((length + 20,), 2.0)
    drawn = 2.0 + 0.7 * draws(bytes(secret), [length])
    expected[11 : 11 + length] = torch.from_numpy(drawn).float()
    assert torch.equal(whole.cpu(), expected)


@needs_kernels
def test_several_tensors_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "MOST_REGIONS", 2)
    lengths = [3, REGION + 1, 1, 40]
    targets = [torch.zeros(each, dtype=torch.float64, device=DEVICE) for each in lengths]
    add_there(KeyStream.from_seed(2, "noise"), targets, 1.0)
    stream, expected = KeyStream.from_seed(2, "noise"), []
    for piece in ([3, REGION], [1, 1], [40]):
        secret = bytearray(32)
        stream.branch().fill(secret)
        expected.append(draws(bytes(secret), piece))
    assert np.array_equal(torch.cat(targets).cpu().numpy(), np.concatenate(expected))


@needs_interpreter
@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize(
    "wrong", ["retries use the throws' words", "sign of the tail", "refused are kept", "an edge"]
)
def test_kernels_with_a_bug_are_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded bugs, each in a kernel that Triton interprets."""
    from dpoptim.noise import kernels

    with_tail(monkeypatch, (REGION,))
    chacha, attempted, layers = kernels.chacha, kernels.attempted, on_device.tables()

    def nonce_before(counter: Any, nonce: Any, *key: Any) -> Any:
        return chacha(counter, kernels.tl.maximum(nonce - 1, 0), *key)

    def unsigned(place: Any, *given: Any) -> Any:
        moved, layer, settled = attempted(place, *given)
        return kernels.tl.where(layer == 0, kernels.tl.abs(moved), moved), layer, settled

    def kept(place: Any, layer: Any, *given: Any) -> Any:
        moved, after, settled = attempted(place, layer, *given)
        return kernels.tl.where(layer == 0, moved, place), after, settled

    if wrong == "an edge":
        layers[1024 + 77] *= 1 - 2**-8
        monkeypatch.setattr(on_device, "tables_on", lambda device: layers)
    else:
        name, bug = {
            "retries use the throws' words": ("chacha", nonce_before),
            "sign of the tail": ("attempted", unsigned),
            "refused are kept": ("attempted", kept),
        }[wrong]
        monkeypatch.setattr(kernels, name, bug)
    with pytest.raises(RuntimeError, match="noise cannot be drawn on cpu"):
        draws_on(CPU, torch.float32)


@needs_interpreter
@pytest.mark.parametrize(("bound", "value"), [("LISTED", 20), ("ATTEMPTS", 0)])
def test_what_is_not_settled_is_no_number(
    bound: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than a sum without noise that nobody sees."""
    from dpoptim.noise import kernels

    monkeypatch.setattr(kernels, bound, kernels.tl.constexpr(value))
    out = torch.zeros(REGION)
    add_there(KeyStream(), [out], 1.0)
    assert 20 < int(out.isnan().sum()) < 110
    assert int((out == 0).sum()) == 0


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Whatever makes the host wait for a GPU, of what PyTorch sees, is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_what_waits_for_a_gpu_is_seen() -> None:
    there = torch.zeros(3, device=DEVICE)
    with nothing_waits(), pytest.raises(RuntimeError, match="synchronizing"):
        there.cpu()
    assert torch.cuda.get_sync_debug_mode() == 0


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nothing_waits_for_a_gpu_and_little_room_is_taken(dtype: torch.dtype) -> None:
    """Once it has been tried: 150 tensors with 20 million entries, in 16 MiB but for copies of
    what is narrow.
    """
    targets = [torch.zeros(133_333, dtype=dtype, device=DEVICE) for _ in range(150)]
    stream = KeyStream()
    add_normal(stream, targets, 1.0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with nothing_waits():
        add_normal(stream, targets, 1.0)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < (16 if dtype in on_device.DTYPES else 80) * 2**20
    assert 1.9 < float(torch.cat(targets).double().var()) < 2.1


@needs_gpu
def test_seeds_repeat_on_a_gpu_for_vectors_of_any_make() -> None:
    found = []
    for parts in ([1 << 20], [1 << 19, 1 << 19]):
        targets = [torch.empty(part, device=DEVICE) for part in parts]
        add = torch.empty(1 << 20, device=DEVICE)
        fill_standard_normal(KeyStream.from_seed(4, "noise"), add)
        for each in targets:
            each.zero_()
        add_normal(KeyStream.from_seed(4, "noise"), targets, 1.0)
        found += [torch.cat(targets), add]
    assert all(torch.equal(each, found[0]) for each in found)
