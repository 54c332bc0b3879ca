"""Calls of the Triton kernels of `fused_outer`, on several layers that are alike."""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic.triton_calls import firsts, on_device_of, owners, upload
from dpoptim.gradients.per_sample.fused_factors import LEAST, WIDE, Factors, Way, power_of_two

ADD, MEASURE, BOTH = 0, 1, 2  # kinds of work, as in `outer_kernels`
ADDED_AT_ONCE = 2048  # entries of gradients that were kept
STAGE = 1 << 15  # bytes of shared memory, for two tiles of factors on their way
MOST_SHARES = 32


class Calls:
    """Calls that do the work of several layers each.

    Args:
        layers: of as many records each, on one device, of one dtype and tile; one alone if it has
            lookups.
        way: in which they are measured.

    Attributes:
        records: B.
        tiles: of a record's gradients, of all layers.
    """

    def __init__(self, layers: Sequence[Factors], way: Way) -> None:
        first, of = layers[0], layers[0].sizes
        tile = rows, columns = of.tile(way)
        if any((x.sizes.tile(way), x.sizes.divisor) != (tile, of.divisor) for x in layers):
            raise ValueError("layers must be alike in their tiles; see `fused_among`.")
        self._layers = list(layers)
        self._device, self.records = of.device, of.records
        self._tiles = tuple(each.sizes.tiles(way) for each in layers)
        self.tiles = sum(self._tiles)
        self._like = torch.empty(0, dtype=first.g.dtype, device=self._device)
        self._rest = placeholders(self._device)
        self._precision = "ieee" if of.narrow else "tf32x3"
        table = (self._rest.whole, self._rest.single, self._rest.whole, 0)
        if first.lookups is not None:
            index = first.lookups.index
            edges = first.lookups.edges(rows, -(-first.p // rows))
            table = index, first.lookups.values, edges, index.shape[1]
        self._given = {
            **dict(zip(("index", "values", "edges", "lookups"), table, strict=True)),
            **{"LOOKED_UP": first.lookups is not None, "DIVISOR": of.divisor},
            **{"BLOCK_T": 64 if of.narrow else 32, "BLOCK_P": rows, "BLOCK_D": columns},
            **{"PRECISION": self._precision, "DESCRIBED": self._rest.described},
        }

    def forget(self) -> None:
        """Let go of what the gradients are made of."""
        self._layers.clear()

    def squares(self) -> Tensor:
        """Room for squared lengths of each record's tiles: float64, (B, tiles)."""
        return self.empty(self.records, self.tiles, dtype=torch.float64)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def share(self, records: int, overhead: float) -> int:
        """Records that a program takes in turn: by the layers' shapes, and how many there are."""
        return records_per_program(
            max(1, records), max(1, self.tiles), self._rest.programs, overhead
        )

    def form(self, kept: Sequence[Tensor]) -> Tensor:
        """Write gradients to each layer's (B, entries), and return their tiles' `squares`."""
        squares = self.squares()
        if squares.numel():
            self._launch(
                kernels().form[(squares.numel(),)],
                *(self._table([each.data_ptr() for each in kept]), self._owners),
                *(squares, self._like, self.tiles),
                **self._given,
                **{"num_warps": 4, "num_stages": min(3, self._rest.stages)},
            )
        return squares

    def run(
        self,
        work: int,
        group: slice,
        share: int,
        *,
        squares: Tensor | None = None,
        weights: Tensor | None = None,
        out: Tensor | None = None,
        starts: Sequence[int] = (),
        wanted: Tensor | None = None,
    ) -> None:
        """Run `measure_or_add` on some records, ``share`` of them for each program.

        Args:
            work: a kind of it.
            squares: as of `squares`, to measure.
            weights: float64, (layers or 1, B), to add.
            out: float32, (shares, places), for what is added: each layer's from its start on.
            wanted: int32, 0 for layers that are left out.
        """
        turns, outs, across = -(-(group.stop - group.start) // share), [0] * len(self._layers), 0
        if out is not None:
            across = out.shape[1] if turns > 1 else 0
            outs = [out.data_ptr() + 4 * start for start in starts]
        if not self.tiles * turns:
            return
        self._launch(
            kernels().measure_or_add[(self.tiles * turns,)],
            *(self._table(outs), self._owners),
            self._rest.double if squares is None else squares,
            self._rest.double if weights is None else weights,
            cached_ones(len(self._layers), self._device) if wanted is None else wanted,
            *(self._like, self.tiles, work, group.start, group.stop, share),
            *(0 if weights is None else self._step(weights), across, self.records),
            **self._given,
            **{"num_warps": 4, "num_stages": self._rest.stages},
        )

    def claim(self) -> Tensor:
        """Squared ghost norms, raised by about their rounding: float64, (layers, B)."""
        claims = self.empty(len(self._layers), self.records, dtype=torch.float64)
        if not claims.numel():
            return claims
        positions = max(each.g.shape[1] for each in self._layers)
        most_rows = WIDE if self._precision == "ieee" else WIDE // 2
        block = min(most_rows, power_of_two(positions))
        most = (-(-positions // block)) ** 2
        products = self.empty(2, len(self._layers), self.records, most, dtype=torch.float64)
        self._launch(
            kernels().gram_products[(self.records * most, len(self._layers))],
            *(self._bare_table(), *products.unbind(), self._like, most),
            **{"BLOCK_T": block, "BLOCK_K": 64, "PRECISION": self._precision},
            DESCRIBED=self._rest.described,
            num_warps=8 if block > 64 else 4,
        )
        with on_device_of(claims):
            kernels().claim[(claims.numel(),)](*products.unbind(), claims, most, BLOCK=LEAST)
        return claims

    def hold(
        self, squares: Tensor, claims: Tensor, weights: Tensor, group: slice
    ) -> tuple[Tensor, Tensor]:
        """Weights (layers, B) by which nothing is longer than claimed, and which layers' changed.

        The latter: int32, 1 for those.
        """
        shorter = self.empty(len(self._layers), self.records, dtype=torch.float64)
        exceeded = self.empty(len(self._layers), dtype=torch.int32).zero_()
        with on_device_of(weights):
            kernels().hold[(group.stop - group.start, len(self._layers))](
                *(self._bare_table(), squares, claims, weights, shorter, exceeded),
                *(group.start, self._step(weights), self.records, self.tiles),
                BLOCK=WIDE,
            )
        return shorter, exceeded

    def add_kept(
        self, kept: Sequence[Tensor], sums: Sequence[Tensor], weights: Tensor, group: slice
    ) -> None:
        """Add up some records' kept gradients to each layer's sum, float32 or float64."""
        sizes = [each.shape[1] for each in kept]
        blocks = tuple(-(-entries // ADDED_AT_ONCE) for entries in sizes)
        each = zip(kept, sums, sizes, firsts(blocks), strict=True)
        table = [[x.data_ptr(), out.data_ptr(), entries, first] for x, out, entries, first in each]
        if sum(blocks):
            with on_device_of(weights):
                kernels().add_kept[(sum(blocks),)](
                    *(upload(table, self._device), owners(blocks, self._device), weights),
                    *(group.start, group.stop, self._step(weights)),
                    **{"EXACT": sums[0].dtype == torch.float64, "BLOCK": ADDED_AT_ONCE},
                    num_warps=8,
                )

    def _step(self, weights: Tensor) -> int:
        """Numbers from one layer's weights to the next."""
        return 0 if len(weights) == 1 else self.records

    @property
    def _owners(self) -> Tensor:
        return owners(self._tiles, self._device)

    def _bare_table(self) -> Tensor:
        """The layers' table, where nothing is written."""
        return self._table([0] * len(self._layers))

    def _table(self, outs: Sequence[int]) -> Tensor:
        """The layers' table, with what is written at these addresses."""
        each = zip(self._layers, outs, firsts(self._tiles), self._tiles, strict=True)
        return upload([layer.row(*numbers) for layer, *numbers in each], self._device)

    def _launch(self, kernel: Callable[..., Any], *given: Any, **named: Any) -> None:
        """Launch a kernel that describes its tensors to the device, which takes room there."""

        def launch() -> None:
            triton().set_allocator(self._room)
            with on_device_of(self._rest.double):
                kernel(*given, **named)

        copy_context().run(launch)  # the user's own allocator stays

    def _room(self, size: int, alignment: int, stream: int | None) -> Tensor:
        return self.empty(size, dtype=torch.int8)


@lru_cache(maxsize=4096)
def records_per_program(records: int, tiles: int, programs: int, overhead: float) -> int:
    """Records that a program takes so that all end soonest, where so many run at a time.

    Args:
        overhead: what a program takes beside them, in records.
    """

    def time(shares: int) -> float:
        return -(-tiles * shares // programs) * (-(-records // shares) + overhead)

    return -(-records // min(range(1, min(records, MOST_SHARES) + 1), key=time))


@lru_cache(maxsize=1024)
def cached_ones(layers: int, device: torch.device) -> Tensor:
    """Written before it returns, as streams that find it here do not wait for this one."""
    return torch.ones(layers, dtype=torch.int32, device="cpu").to(device)


@dataclass(frozen=True)
class Placeholders:
    """For arguments that are not used, on a device, and what runs there at a time.

    Attributes:
        programs: that run at a time.
        stages: of tiles on their way from memory, for which there is room.
        described: whether it reads tiles of memory that is described to it by itself: NVIDIA's
            since compute capability 9.
    """

    double: Tensor
    single: Tensor
    whole: Tensor
    programs: int
    stages: int
    described: bool


@cache
def placeholders(device: torch.device) -> Placeholders:
    dtypes = torch.float64, torch.float32, torch.int32
    double, single, whole = (torch.zeros(LEAST, dtype=dtype, device=device) for dtype in dtypes)
    cores, room, described = WIDE, 0, False
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        cores = properties.multi_processor_count
        room = getattr(properties, "shared_memory_per_block_optin", 0)
        described = torch.version.hip is None and properties.major >= 9
    stages = max(2, min(4, (room - 1024) // STAGE))
    return Placeholders(double, single, whole, cores, stages, described)


@cache
def kernels() -> Any:
    """The compiled kernels, by name; Triton takes a moment to import."""
    from dpoptim.gradients.per_sample import gram_kernels, outer_kernels

    return SimpleNamespace(**{**vars(outer_kernels), **vars(gram_kernels)})


@cache
def triton() -> Any:
    import triton

    return triton
