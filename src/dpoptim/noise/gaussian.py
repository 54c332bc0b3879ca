"""Standard normal noise from a cryptographic stream, written to or added to a tensor.

`torch.randn` in float32 on CPU never exceeds 5.77 sigma; a single coordinate then has a floor
under delta that no accountant sees (about 9e-5 for sampling rate times steps = 100 at noise
multiplier 1). Here every draw is made in float64, by `ziggurat`, whose docstring says how close
its law is to the normal. Rounding to a smaller dtype comes after.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from dpoptim.noise.draws_in_place import put_at, throw_onto, thrown_by_one_call
from dpoptim.noise.few_rows import FewRows, Vector, memory_of, write_out
from dpoptim.noise.on_device import DTYPES, add_there, draws_on
from dpoptim.noise.prefetch import DrawnAhead
from dpoptim.noise.stream import BLOCK_WORDS, KeyStream, this_process
from dpoptim.noise.ziggurat import (
    Scratch,
    Throws,
    functions,
    settle,
    throw,
)

# A chunk is what one thread draws from one branch of the stream. The 0.4 % of draws outside their
# layer are settled once a chunk, because settling a handful costs as much as settling thousands.
_BEGAN = this_process()
_CHUNK = 64 * BLOCK_WORDS
_PIECE = 16 * _CHUNK  # what visits the host at a time when the tensor lives elsewhere
# Entries of a vector for which kernels elsewhere are compiled. On an NVIDIA H200, 2^14 took 0.17 ms
# by the host and 0.19 by kernels, 2^16 0.42 and 0.20, 2^18 1.16 and 0.21; compiling takes 1.6 s
# (benchmarks/noise_throughput.py --device cuda).
LEAST_ON_DEVICE = 1 << 16
_AT_ONCE = 1 << 22  # of its entries that are copied to float64 there, in 32 MiB
_LEAST_AHEAD = 1 << 12  # entries for which a thread is worth waking
# Its vectors multiply and add with one rounding there (tests/noise/test_compiled.py).
_TORCH_FUSES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
_local = threading.local()


def fill_standard_normal(stream: KeyStream, out: Tensor, *, threads: int | None = None) -> None:
    """Overwrite `out` with independent N(0, 1) draws.

    Args:
        stream: where the randomness comes from.
        out: a contiguous floating-point tensor of any shape, dtype and device. Draws are made in
            float64 and rounded to `out.dtype`: on the CPU, or where a large tensor lies if
            Triton has kernels for the device (`on_device`), so that a seed's draws depend on that;
            other tensors elsewhere are written through the CPU's memory.
        threads: how many may draw at once when `out` has more than 2^20 entries; None means
            `torch.get_num_threads()`. It does not change what a seeded stream draws.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.

    **Guarantee.** The entries are independent of each other and of all other draws, and N(0, 1) to
    the precision stated in `dpoptim.noise.ziggurat` before the rounding to `out.dtype`, to whoever
    does not know the stream's key.

    Examples:
        >>> import torch
        >>> from dpoptim.noise import KeyStream, fill_standard_normal
        >>> draws = torch.empty(4)
        >>> fill_standard_normal(KeyStream.from_seed(7, "example"), draws)
        >>> again = torch.empty(4)
        >>> fill_standard_normal(KeyStream.from_seed(7, "example"), again)
        >>> torch.equal(draws, again)
        True
    """
    _draw(stream, [out], None, threads)


def add_normal(
    stream: KeyStream, out: Vector | Sequence[Vector], std: float, *, threads: int | None = None
) -> None:
    """Add independent N(0, std^2) draws to `out`, in float64, then round to `out.dtype`.

    `std` is a standard deviation in the units of `out`, finite and >= 0; 0 leaves `out` as it is.
    The rest is as for `fill_standard_normal`. On the CPU the noise exists only in blocks of up to
    2^14 that stay in cache, elsewhere in registers or pieces of 2^22, never as a second tensor
    like `out`.

    Args:
        stream: where the randomness comes from.
        out: a contiguous floating-point tensor, changed in place; or several on one device, which
            on the CPU get what a single vector of all their entries would; where kernels draw,
            a seed's draws depend on their sizes. Tables may be `FewRows`, which are written out
            (with ``std`` 0 as well).
        std: in the units of ``out``, finite and >= 0; 0 leaves ``out`` as it is.
        threads: as for `fill_standard_normal`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.

    Examples:
        >>> import torch
        >>> from dpoptim.noise import KeyStream, add_normal
        >>> sums = torch.zeros(1_000)
        >>> add_normal(KeyStream(), sums, std=2.0)
        >>> bool(1.7 < sums.std() < 2.3)
        True
    """
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"std must be finite and >= 0, got {std}")
    _draw(stream, [out] if isinstance(out, Tensor | FewRows) else out, std, threads)


def draw_normal_ahead(stream: KeyStream, vectors: Sequence[Sequence[Vector]]) -> None:
    """Let a spare thread draw what the next calls of `add_normal` want, for these vectors in turn.

    Nothing is done where torch may use one thread only, elsewhere than on the CPU, for vectors so
    short that it would not pay, and for more than 2^20 entries, whose draws would take memory.

    **Guarantee.** The next calls add the same draws as without it, to the last bit, if they are as
    many and as long; otherwise others, of the same stream. No draw is used twice, and none by a
    forked child (`prefetch`).
    """
    sizes = [sum(each.numel() for each in vector) for vector in vectors]
    on_cpu = all(each.device.type == "cpu" for vector in vectors for each in vector)
    if on_cpu and _LEAST_AHEAD <= sum(sizes) <= _CHUNK and torch.get_num_threads() > 1:
        _ahead.begin(stream, [size for size in sizes if size])


def _check(out: Sequence[Tensor], threads: int | None) -> None:
    for each in out:
        if not each.is_floating_point():
            raise TypeError(f"out must be a floating-point tensor, got {each.dtype}")
        if not each.is_contiguous():
            raise ValueError(
                f"out must be contiguous, got shape {tuple(each.shape)} with strides "
                f"{each.stride()}"
            )
        if each.device != out[0].device:
            raise ValueError(f"out must be on one device, got {out[0].device} and {each.device}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be >= 1 or None, got {threads}")


def _draw(stream: KeyStream, out: Sequence[Vector], std: float | None, threads: int | None) -> None:
    """Check the arguments; `std` None means overwrite with N(0, 1)."""
    _check(memory_of(out), threads)
    if std == 0:
        write_out(out)
        return
    flat = [
        each.detach().view(-1) if isinstance(each, Tensor) else each for each in out if each.numel()
    ]
    if not flat:
        return
    workers = threads or torch.get_num_threads()
    device = flat[0].device
    if device.type == "cpu":
        _draw_on_cpu(stream, flat, std, workers)
    elif sum(map(len, flat)) >= LEAST_ON_DEVICE and all(
        draws_on(device, each.dtype if isinstance(each, Tensor) else torch.float64) for each in flat
    ):
        _draw_where_it_lies(stream, flat, std)
    else:
        _draw_through_host(stream, flat, std, workers)


Stretch = list[Vector]  # consecutive entries of a vector that lies in several flat tensors


def _stretches(flat: Sequence[Vector], size: int) -> Iterator[Stretch]:
    """Cut a vector into stretches of ``size`` entries, but for the last."""
    stretch: Stretch = []
    room = size
    for each in flat:
        start = 0
        entries = each.numel()
        while start < entries:
            taken = min(room, entries - start)
            stretch.append(each if taken == entries else each[start : start + taken])
            start, room = start + taken, room - taken
            if room == 0:
                yield stretch
                stretch, room = [], size
    if stretch:
        yield stretch


def _put_stretch(stretch: Stretch, z: Tensor, std: float | None) -> None:
    pieces = z.split([*map(len, stretch)]) if len(stretch) > 1 else [z]
    for target, each in zip(stretch, pieces, strict=True):
        _put(target, each, std)


def _together(stretch: Stretch, device: torch.device | str, *, pin_memory: bool = False) -> Tensor:
    """A float64 copy of a stretch on a device, in one tensor."""
    whole = torch.empty(
        sum(map(len, stretch)), dtype=torch.float64, device=device, pin_memory=pin_memory
    )
    for copy, each in zip(whole.split([*map(len, stretch)]), stretch, strict=True):
        copy.copy_(each.dense() if isinstance(each, FewRows) else each)
    return whole


def _draw_where_it_lies(stream: KeyStream, flat: Sequence[Vector], std: float | None) -> None:
    """Add to tensors in place, and to others in float64, a stretch at a time."""
    if std is None:
        for each in memory_of(flat):
            each.zero_()
        std = 1.0
    for dtype in DTYPES:
        if alike := [each for each in flat if isinstance(each, Tensor) and each.dtype == dtype]:
            add_there(stream, alike, std)
    others = [each for each in flat if isinstance(each, FewRows) or each.dtype not in DTYPES]
    for stretch in _stretches(others, _AT_ONCE):
        whole = _together(stretch, stretch[0].device)
        add_there(stream, [whole], std)
        _put_stretch(stretch, whole, None)


def _draw_through_host(
    stream: KeyStream, flat: Sequence[Vector], std: float | None, workers: int
) -> None:
    """Draw in pinned memory, a stretch at a time; copies block: each is there before the next."""
    for stretch in _stretches(flat, _PIECE):
        host = _together(stretch, "cpu", pin_memory=stretch[0].device.type == "cuda")
        _draw_on_cpu(stream, [host], std, workers)
        _put_stretch(stretch, host, None)


def _draw_on_cpu(
    stream: KeyStream, flat: Sequence[Vector], std: float | None, workers: int
) -> None:
    """Draw chunk by chunk, each from its own branch, so that threads do not change the draws."""
    chunks = [*_stretches(flat, _CHUNK)]
    branches = [stream.branch() for _ in chunks]
    together = min(workers, len(chunks))
    if together == 1:  # a forked child would wait for ever for OpenMP's threads
        for branch, chunk in zip(branches, chunks, strict=True):
            _draw_chunk(branch, chunk, std, 1 if was_forked() else workers)
        return
    # For this call only: a forked child would find a lasting pool dead.
    with ThreadPoolExecutor(together) as pool:
        list(pool.map(_draw_chunk, branches, chunks, [std] * len(chunks)))


def was_forked() -> bool:
    """Whether this process was forked from one that had this module, whose threads it has not."""
    return this_process() != _BEGAN


def _draw_chunk(stream: KeyStream, stretch: Stretch, std: float | None, threads: int = 1) -> None:
    drawn = _ahead.take(stream, sum(map(len, stretch)))
    if drawn is None:
        _throw_and_settle(stream, stretch, std, threads)
    elif all(isinstance(each, Tensor) and _compiled_addition(each) for each in stretch):
        _put_stretch(stretch, drawn, std)  # in one pass, which needs no block to stay in cache
    else:
        blocks = _stretches(stretch, BLOCK_WORDS)
        for block, z in zip(blocks, drawn.split(BLOCK_WORDS), strict=True):
            _put_stretch(block, z, std)
    stream.end()


def _throw_and_settle(
    stream: KeyStream, stretch: Stretch, std: float | None, threads: int = 1
) -> None:
    compiled = (std is None or _TORCH_FUSES) and all(map(thrown_by_one_call, stretch))
    if compiled:  # which draws and adds as torch's operations do, to the last bit
        thrown, ends = throw_onto(stream, stretch, std, _buffers(_CHUNK)[0], threads)
    else:
        thrown, ends = _thrown_in_blocks(stream, stretch, std)
    where, place, layer = thrown
    settled = settle(stream, place, layer)
    for target, (begin, end) in zip(stretch, pairwise([0, *ends]), strict=True):
        if begin == end:
            continue
        if compiled and isinstance(target, Tensor):
            put_at(target, where[begin:end], settled[begin:end], std)
        else:
            index = torch.from_numpy(where[begin:end])
            chosen = target.index_select(0, index)
            _put(chosen, torch.from_numpy(settled[begin:end]), std)
            target.index_copy_(0, index, chosen)


def _thrown_in_blocks(
    stream: KeyStream, stretch: Stretch, std: float | None
) -> tuple[Throws, list[int]]:
    """As `throw_onto`."""
    scratch, spare = _buffers(BLOCK_WORDS)
    values, thrown, start = spare.numpy(), [], 0
    for block in _stretches(stretch, BLOCK_WORDS):
        entries = sum(map(len, block))
        where, place, layer = throw(stream, values[:entries], scratch)
        values[where] = 0.0  # where a draw is not settled yet: adds nothing now
        _put_stretch(block, spare[:entries], std)
        thrown.append((where + start, place, layer))
        start += entries
    where, place, layer = map(np.concatenate, zip(*thrown, strict=True))
    edges = [0, *accumulate(map(len, stretch))]
    ends = np.searchsorted(where, edges).tolist()
    for edge, begin, end in zip(edges, ends, ends[1:], strict=False):
        where[begin:end] -= edge
    return (where, place, layer), ends[1:]


def _put(target: Vector, z: Tensor, std: float | None) -> None:
    """target <- z, or target + std z computed in float64 and rounded once."""
    if isinstance(target, FewRows):
        total = z if std is None else target.dense()
        if std is not None:
            _put(total, z, std)
        target.out.copy_(total)
    elif std is None:
        target.copy_(z)
    elif (add := _compiled_addition(target)) is not None:
        add(target.data_ptr(), len(target), z.data_ptr(), std)
    else:
        torch.add(target, z, alpha=std, out=target)


def _compiled_addition(target: Tensor) -> Callable[..., None] | None:
    """A compiled function that adds as torch does, where torch multiplies and adds in one."""
    library = functions()
    if library is None or not target.is_cpu or not _TORCH_FUSES:
        return None
    return library.add.get(target.dtype)


def _buffers(size: int) -> tuple[Scratch, Tensor]:
    """This thread's own, made once: scratch for so many throws, and a block of draws.

    What is never written takes no memory: of scratch for a chunk, all but the first pages.
    """
    if not hasattr(_local, "buffers") or len(_local.buffers[0].where) < size:
        draws = torch.empty(BLOCK_WORDS, dtype=torch.float64, device="cpu")
        _local.buffers = Scratch.of(max(size, BLOCK_WORDS)), draws
    buffers: tuple[Scratch, Tensor] = _local.buffers
    return buffers


_ahead = DrawnAhead(lambda stream, out: _throw_and_settle(stream, [out], None))
