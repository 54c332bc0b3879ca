"""Whether tensors hold what they held; ``_version`` misses writes through ``.data``."""

import hashlib
import io
import pickle
import struct
from collections.abc import Callable, Iterable
from ctypes import c_int
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpoptim.runtime.compiled import PLACE, WHOLE, function, library
from dpoptim.runtime.torch_internals import parts_held

LANES = 1021  # a prime: no row of a matrix is as long by habit
COPIED = 8 * LANES  # 64-bit words up to which all are compared
SOURCE = struct.Struct("=Qqq")  # as in `values.c`
WORDS, BYTES, TABLE = range(3)


@dataclass
class _Memory:
    """Reading of the tensors on one device, and where it goes.

    Attributes:
        sources: pieces of 64-bit words (or bytes, at ends that are not aligned) that are copied.
        summed: tables of words, shape (k, LANES), whose columns are added.
    """

    sources: list[Tensor] = field(default_factory=list)
    summed: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of the tensors, in the order of what is read

    @cached_property
    def _in_c(self) -> bytes:
        """The same, once all of it is known; empty where compiled functions cannot read it."""
        if compiled_reader() is None or not all(t.is_cpu for t in (*self.sources, *self.summed)):
            return b""
        found = [
            (t.data_ptr(), BYTES if t.dtype == torch.uint8 else WORDS, len(t)) for t in self.sources
        ]
        found += [(t.data_ptr(), TABLE, len(t)) for t in self.summed]
        return b"".join([SOURCE.pack(*each) for each in found])

    @cached_property
    def _words(self) -> int:
        return sum(map(len, self.sources)) + LANES * len(self.summed)

    def read(self) -> Tensor:
        """Shape (words,): first what is copied, then the sums."""
        if sources := self._in_c:
            read, found = compiled_reader(), library()
            assert read is not None
            assert found is not None
            words = torch.empty(self._words, dtype=torch.int64, device="cpu")
            read(len(sources) // SOURCE.size, sources, LANES, words.data_ptr(), found.level)
            return words
        parts = [
            source if source.dtype == torch.int64 else source.to(torch.int64)
            for source in self.sources
        ]
        parts += [added_columns(table) for table in self.summed]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def name_at(self, place: int) -> str:
        sizes = [len(source) for source in self.sources] + [LANES] * len(self.summed)
        for name, size in zip(self.names, sizes, strict=True):
            if place < size:
                return name
            place -= size
        raise IndexError(place)


@cache
def compiled_reader() -> Callable[..., None] | None:
    """A compiled function that reads the same words in one call; None where there is none."""
    return function("dpoptim_read_values", WHOLE, PLACE, WHOLE, PLACE, c_int)


class Values:
    """The values of some tensors at one time, to be compared with those of later ones.

    Of large tensors 1,021 sums are kept, over the 64-bit words whose places are equal modulo
    1,021: a change passes unseen only if it leaves every one of these sums as it was. Smaller ones
    are compared word by word. It costs as much as reading the tensors.

    Args:
        tensors: what to watch, by name.

    Attributes:
        tensors: the same.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.tensors = list(tensors)
        self._addresses: list[int] | None = None
        self._memories: dict[torch.device, _Memory] = {}
        self._odd: list[tuple[str, Tensor]] = []  # whose memory is not one dense piece
        # whether nothing but `data_ptr` need be asked where they lie: types and layouts stay
        self._usual = all(
            type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided for _, t in self.tensors
        )
        self.note()

    def note(self) -> None:
        """Take what the tensors hold now as what they shall hold."""
        if not self.tensors and self._addresses is not None:
            return
        addresses = self._where()
        if addresses != self._addresses:
            self._addresses = addresses
            self._look_up()
        self._noted = {device: memory.read() for device, memory in self._memories.items()}
        self._noted_odd = [digest(tensor) for _, tensor in self._odd]

    def changed(self) -> str | None:
        """The name of a tensor that holds something else than noted, or lies elsewhere; or None."""
        assert self._addresses is not None
        places = self._where()
        if places != self._addresses:
            moved = zip(self._held(), places, self._addresses, strict=True)
            return next(name for (name, _), here, there in moved if here != there)
        for device, memory in self._memories.items():
            now = memory.read()
            if not torch.equal(now, self._noted[device]):
                return memory.name_at(int((now != self._noted[device]).nonzero()[0]))
        for (name, tensor), digested in zip(self._odd, self._noted_odd, strict=True):
            if digest(tensor) != digested:
                return name
        return None

    def checksum(self) -> int:
        """One number of 63 bits for what was noted, which does not tell where it lies."""
        total = 0
        for noted in self._noted.values():
            places = torch.arange(1, 2 * len(noted), 2, device=noted.device)
            total += int((noted * places).sum())  # modulo 2^64
        for noted_odd in self._noted_odd:
            total += int.from_bytes(noted_odd[:8], "big")
        return total % (1 << 63)

    def _where(self) -> list[int]:
        if self._usual:
            return [tensor.data_ptr() for _, tensor in self.tensors]
        return [address(part) for _, part in self._held()]

    def _held(self) -> list[tuple[str, Tensor]]:
        """The plain tensors that these hold; a part has the name of the whole."""
        return [(name, part) for name, tensor in self.tensors for part in parts_held(tensor)]

    def _look_up(self) -> None:
        self._memories, self._odd = {}, []
        summed: dict[torch.device, list[str]] = {}
        for name, tensor in self._held():
            flat = bytes_of(tensor)
            if flat is None:
                self._odd.append((name, tensor))
                continue
            memory = self._memories.setdefault(flat.device, _Memory())
            start = min(len(flat), -flat.storage_offset() % 8)
            end = start + (len(flat) - start) // 8 * 8
            words = (
                flat[start:end].view(torch.int64)
                if end > start
                else flat.new_empty(0, dtype=torch.int64)
            )
            rows = len(words) // LANES if len(words) > COPIED else 0
            if rows:
                memory.summed.append(words[: rows * LANES].view(rows, LANES))
                summed.setdefault(flat.device, []).append(name)
            for rest in (flat[:start], words[rows * LANES :], flat[end:]):
                if len(rest):
                    memory.sources.append(rest)
                    memory.names.append(name)
        for device, names in summed.items():
            self._memories[device].names += names


def added_columns(table: Tensor) -> Tensor:
    """Sums of a table's columns, modulo 2^64."""
    if table.is_cpu:  # numpy reads as fast as memory gives, torch at a third of that
        return torch.from_numpy(np.add.reduce(table.numpy(), axis=0))
    return table.sum(0)


def address(tensor: Tensor) -> int:
    """Where a plain tensor's values lie; 0 where they are not one dense piece."""
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


def bytes_of(tensor: Tensor) -> Tensor | None:
    """A plain tensor's memory as bytes, uncopied; None if it is not dense."""
    flat = tensor.detach()
    if flat.layout != torch.strided or flat.is_quantized or flat.is_meta:
        return None
    flat = flat.permute(sorted(range(flat.dim()), key=flat.stride, reverse=True))
    return flat.reshape(-1).view(torch.uint8) if flat.is_contiguous() else None


def digest(value: object) -> bytes:
    """Digest of anything, best of what can be pickled."""
    written = io.BytesIO()
    try:
        ByContents(written).dump(value)
    except Exception:  # whatever objects raise that cannot be pickled
        return hashlib.sha256(repr(value).encode()).digest()
    return hashlib.sha256(written.getvalue()).digest()


class ByContents(pickle.Pickler):
    """Writes tensors by what they hold; as PyTorch writes them, they say where they lie."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        held = [bytes_held(part.detach().cpu()) for part in parts_held(value)]
        return tuple, ((str(value.dtype), tuple(value.shape), *held),)


def bytes_held(tensor: Tensor) -> bytes:
    here = tensor.dequantize() if tensor.is_quantized else tensor
    dense = here.to_dense() if here.layout != torch.strided else here
    return dense.contiguous().flatten().view(torch.uint8).numpy().tobytes()
