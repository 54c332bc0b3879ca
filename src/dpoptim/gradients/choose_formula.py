"""Choice of the formula for a layer's gradients, by public numbers alone: no record decides it."""

from typing import NamedTuple

MEMORY_CAP = 1 << 26  # elements that one temporary may hold (256 MiB in float32)
# entries of a layer's per-record gradients up to which forming and keeping them is cheapest
KEPT_GRADIENTS = 1 << 20
# multiplications for one record's gradient that take longer than asking for them
WORTH_A_CALL = 1 << 19
# up to which ghost norms are cheaper still, as for the rows of a record in a linear layer
FEW_POSITIONS = 8
# positions up to which compiled functions add gradients where they form them, if norms are known
CLAIMED_POSITIONS = 512
# multiplications for ghost norms that take as long as to write, read and add one number of a
# record's gradient
CLAIMED_FOR_A_NUMBER = 64
# share of the multiplications for gradients that ghost norms may take on accelerators
CLAIMED_THERE = 0.5
# memory of gradients, over that of what they are made of, up to which accelerators keep them
KEPT_THERE = 1.5
# entries of a convolution's kernel that make as much work, by whatever products
LARGE_KERNEL = 1 << 15


class OverPositions(NamedTuple):
    """How gradients that are sums over positions are measured.

    Attributes:
        alone: record by record.
        claimed: by ghost norms, before they are formed.
    """

    alone: bool
    claimed: bool


class PublicSizes(NamedTuple):
    """Facts of a backward pass, beside the shapes, devices and dtypes of its layers.

    Attributes:
        capacity: records in a batch.
        most: records that a pass may have.
        parameters: trainable entries of the model; a record's gradients must fit into memory.
        positions: of each record in the layer, None where unknown.
        in_parts: whether no process has the memory for whole gradients of all parameters.
        common_factor: whether all gradients carry a factor that depends on the pass's other
            records: see `products`.
        sums: that each record adds to.
    """

    capacity: int
    most: int
    parameters: int
    positions: int | None = None
    in_parts: bool = False
    common_factor: bool = False
    sums: int = 1

    def small(self, entries: int) -> bool:
        """Whether gradients of so many entries are just formed and kept."""
        return self.capacity * entries <= KEPT_GRADIENTS

    def large_kernel(self, entries: int) -> bool:
        """Whether a convolution's gradients are to be formed record by record."""
        return not self.small(entries) and self.whole_fits and entries >= LARGE_KERNEL

    def worth_a_call(self, positions: int, entries: int) -> bool:
        """Whether sums over positions are to be formed record by record, on a processor."""
        return positions > FEW_POSITIONS and positions * entries >= WORTH_A_CALL

    @property
    def whole_fits(self) -> bool:
        """Whether memory has room for a record's gradients of all parameters."""
        return self.parameters <= MEMORY_CAP and not self.in_parts

    def worth_ghost_norms(self, positions: int, p: int, d: int) -> bool:
        """Whether norms of sums of outer products are taken from Gram products.

        That takes positions (p + d) multiplications for each p d: where it takes less time, and,
        where memory is dear, also where it takes somewhat more.
        """
        return positions * (p + d) < (2.0 if self.in_parts else 0.8) * p * d

    def worth_claiming(self, positions: int, p: int, d: int) -> bool:
        """Whether compiled functions are to be told norms, so that they need not write gradients.

        Gradients that are measured first wait in memory until all of the record are formed. With
        few positions, that takes longer than to form them. Not where a common factor rounds all
        records' ghost norms anew, which err by more than the margin for it (see `products`).
        """
        for_a_number = positions * positions * (p + d) / (p * d)
        short = positions <= CLAIMED_POSITIONS and for_a_number <= CLAIMED_FOR_A_NUMBER
        return short and not self.common_factor

    def over_positions(
        self, positions: int, p: int, d: int, *, here: bool, compiled: bool
    ) -> OverPositions | None:
        """How sums over positions of outer products, p by d, are measured; None: formed and kept.

        Args:
            here: whether they are float32 on a processor.
            compiled: whether compiled functions form them, which are for such alone.
        """
        claimed = compiled and self.worth_claiming(positions, p, d)
        if claimed and self.sums == 1:
            return OverPositions(alone=True, claimed=True)  # all layers in one call
        entries = p * d
        by_call = here and self.worth_a_call(positions, entries)
        fits = by_call and self.whole_fits
        if self.small(entries) and not (fits and compiled):  # which stays in cache
            return None
        if fits and not claimed:
            return OverPositions(alone=True, claimed=False)
        ghost_norms = (claimed and by_call) or self.worth_ghost_norms(positions, p, d)
        return OverPositions(by_call and ghost_norms, ghost_norms)

    def worth_claiming_there(self, positions: int, p: int, d: int) -> bool:
        """Whether an accelerator is to be told ghost norms (`fused_outer`).

        They take positions (p + d) multiplications for each p d, and three calls. Not where a
        common factor rounds them: see `worth_claiming`.
        """
        return positions * (p + d) <= CLAIMED_THERE * p * d and not self.common_factor


def worth_keeping_there(positions: int, p: int, d: int, size: int) -> bool:
    """Whether an accelerator is to form a record's gradients once, and keep them (`fused_outer`).

    Args:
        size: bytes of a number that they are made of; they take four each themselves.
    """
    return 4 * p * d <= KEPT_THERE * size * positions * (p + d)


def may_keep(most: int, entries: int) -> bool:
    """Whether memory allows to keep the gradients of a parameter for all records of a pass."""
    return most * entries <= MEMORY_CAP
