"""Normal draws that compiled functions put, or add, where they belong: not written in between.

As `ziggurat.throw` makes them, to the last bit, by the functions of `ziggurat.c`.
"""

import ctypes
import struct
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dpoptim.noise.few_rows import FewRows, Vector, memory_of
from dpoptim.noise.keystream import compiled_keystream
from dpoptim.noise.stream import KeyStream
from dpoptim.noise.ziggurat import (
    ENTRY,
    MOST_PARTS,
    Functions,
    Indices,
    Scratch,
    Throws,
    functions,
    start_of,
)
from dpoptim.noise.ziggurat_layers import STEP_AND_INNER, Floats
from dpoptim.runtime import compiled_work
from dpoptim.runtime.compiled_work import address

IN, ADDED_TO, OVER_ROWS, OF_DOUBLES = 0, 1, 2, 4  # ways of `ziggurat.c` to put draws into numbers
A_DRAW = 100  # multiplications that take as long
A_WORD = 8  # bytes of the keystream that make a draw
# `Draws` of `ziggurat.c`: what is said of the keystream, of the target, and of what lies outside
DRAWS = struct.Struct("=QQQqqQQdQQQQQ")


def thrown_by_one_call(out: Vector) -> bool:
    """Whether `throw_onto` can: with the library, on a processor with instructions for AES."""
    served = out.is_cpu and out.dtype in (torch.float32, torch.float64)
    return served and functions() is not None and compiled_keystream() is not None


def throw_onto(
    stream: KeyStream,
    targets: Sequence[Vector],
    std: float | None,
    scratch: Scratch,
    threads: int,
) -> tuple[Throws, list[int]]:
    """`throw`, and add ``std`` times the draws to all entries in turn, or (None) write them.

    Nothing is added where `settle` has to decide, and 0 is written there.

    Args:
        targets: each contiguous; as many entries as the scratch has, at most; see
            `thrown_by_one_call`.
        threads: to use at most, with the same draws for any number of them.

    Returns:
        What `throw` returns, in the scratch's memory, with the place of each entry in its target;
        and how many of them are in the targets up to each.
    """
    library = functions()
    assert library is not None
    assert sum([each.numel() for each in targets]) <= len(scratch.where)
    ends: list[int] = []
    for alone, some in groupby(targets, lambda each: worth_threads(each, threads)):
        for few in ([each] for each in some) if alone else (list(some),):
            given = [Target.of(each, std) for each in few]
            before = ends[-1] if ends else 0
            ends += _throw_onto(library, stream, given, scratch, before, threads)
    outside = ends[-1] if ends else 0
    return (scratch.where[:outside], scratch.edge[:outside], scratch.layer[:outside]), ends


def worth_threads(target: Vector, threads: int) -> bool:
    """Whether the target is drawn by several threads; others are drawn in one call, in turn."""
    return threads > 1 and A_DRAW * target.numel() >= 2 * compiled_work.WORTH_A_THREAD


class Target(NamedTuple):
    """Numbers that draws are put into, or added to, and how compiled functions do that.

    Attributes:
        rows: where a table holds what draws are added to; kept for as long as they are read.
    """

    entries: int
    way: int
    memory: Tensor
    std: float
    rows: ctypes.Structure | None

    @classmethod
    def of(cls, target: Vector, std: float | None) -> Self:
        rows, way = None, IN if std is None else ADDED_TO
        if isinstance(target, FewRows):
            assert std is not None
            rows, way = target.rows(), OVER_ROWS
        (memory,) = memory_of([target])
        assert memory.is_contiguous()
        way += OF_DOUBLES if memory.dtype == torch.float64 else 0
        return cls(target.numel(), way, memory, 0.0 if std is None else std, rows)

    def packed(self, key: bytes, number: int, start: int, outside: Sequence[int]) -> bytes:
        """The draws as compiled functions read them.

        Args:
            key, number, start: of the keystream.
            outside: addresses for what `settle` has to decide.
        """
        *room, found = outside
        return DRAWS.pack(
            *(address(key), number, start, self.entries, self.way, start_of(STEP_AND_INNER)),
            *(self.memory.data_ptr(), self.std, *room, found),
            0 if self.rows is None else ctypes.addressof(self.rows),
        )


def _throw_onto(
    library: Functions,
    stream: KeyStream,
    targets: Sequence[Target],
    scratch: Scratch,
    before: int,
    threads: int,
) -> list[int]:
    """Add draws in one pass, but where `settle` has to decide.

    Which entries these are is written into the scratch, after so many ``before``; there, 0 is added
    or written.

    Returns:
        How many they are up to the end of each target, those before included.
    """
    *room, found = scratch.addresses
    outside = (*(each + ENTRY * before for each in room), found)

    def draw(key: bytes, number: int, start: int) -> tuple[int, list[int]]:
        if len(targets) == 1:
            (target,) = targets
            given = target.packed(key, number, start, outside)
            work = A_DRAW * target.entries
            parts = library.draw.run(given, work, min(threads, MOST_PARTS))
            return target.entries, [library.outside(given, parts)]
        words, several = 0, list[bytes]()
        for target in targets:
            several.append(target.packed(key, number, start + A_WORD * words, outside))
            words += target.entries
        ends = np.empty(len(targets), np.int64)
        library.draw_in_turn(b"".join(several), len(targets), start_of(ends))
        return words, ends.tolist()

    return [before + end for end in stream.spend(draw)]


def put_at(target: Tensor, where: Indices, z: Floats, std: float | None) -> None:
    """Add ``std`` times draws to some entries, or (None) write them; see `thrown_by_one_call`."""
    library = functions()
    assert library is not None
    library.put_at[target.dtype](
        *(target.data_ptr(), len(where), start_of(where), start_of(z)),
        *(0.0 if std is None else std, std is not None),
    )
