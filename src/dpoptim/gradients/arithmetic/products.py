"""Weighted sums over records with bounded rounding, so that clipping bounds what is computed.

Clipping promises that one record moves the sum by at most C. Arithmetic in float32 breaks the
promise: adding a record changes how every other record's term is rounded, and those errors grow
with the batch (9,194 bounded records, added in order, moved by 1.49 C). So a batch is summed in
*groups*: each group is one float32 product, and the groups' sums are added in float64. A record's
group is chosen without looking at the other records, so one record touches the rounding of its own
group (and of the few that are added up with it), and that error fits into a small margin: records
are clipped to ``C (1 - margin)``.

**Theorem.** Let u be the unit roundoff of the gradients' dtype and B at least the number of
records in a physical batch. Let two batches differ in one record, and suppose that

1. every other record has the same rows in both: the loss is a sum over records;
2. each clip factor c_i and each stored gradient G_i is computed from record i's rows alone, with
   c_i |G_i| at most C (1 - margin);
3. every other record belongs to the same group in both, in the same order, and the product of a
   group is a function of its rows (they start on 64-byte boundaries, so that the kernel finds them
   aligned in the same way);
4. a float32 product sums at most k = `GROUP_ROWS` rows (larger groups are multiplied in float64),
   and only the at most m = `BLOCK_GROUPS` groups of a *block*, always the same ones, are added in
   float32.

Then the computed sums differ by at most C if ``margin >= 2^-8 + 2^-32 B``.

*Proof.* What does not contain the record is equal in both. The product of a group of s <= k rows
has, in whatever order it is summed, an error of at most gamma_{s+2} times the sum of the absolute
values of its terms (Higham 2002, section 3.1; the two extra roundings are those of c_i and of c_i
g_i). Its terms are the entries of the c_i G_i themselves, one row to a record, so nothing cancels
inside a record, and the error is at most (k + 2) u' k C with u' = u / (1 - (k + 2) u). Adding m
groups errs by at most (m - 1) u' m k C in either world. Both worlds together: 2 ((k + 2) k + (m -
1) m k) u' C, which is 0.85 * 2^-8 C for k = 160, m = 4. (Records added one after the other are
such a product, too.) Adding these sums in float64 costs a relative 2^-53 for each addition of at
most B, in both worlds less than 2^-32 B C. The differing record itself adds at most C (1 -
margin). QED. (Where `populations` multiplies and adds the rows of a group apart, by their
directions, these errors are those of shorter groups, and add up to less.)
(tests/privacy/test_clipped_sum_sensitivity.py tries to falsify it.)

**Gradients in float64** need no groups, nor conditions 3 and 4: products of w = `WIDE_ROWS` rows,
added one after the other, err by at most (w + B / w + 2) 2^-53 B C in either world, in whatever
order each is summed. Both worlds together that is less than max(2^-20, 2^-32 B) C, the `margin`
of float64, up to B = 2^32.

`Groups` are written as blocks of group sizes, e.g. ((112, 98, 120, 105), (110, 99)).

Under zero-out and replace-one, neighbours have equally many rows: consecutive groups of k rows
satisfy condition 3. Under add-or-remove-one a removed record shifts all that follow it, so there
the sampler draws each record's group with a coin of its own (`summation_groups.into_groups`); with
the coins coupled, condition 3 holds.

**Under a mean** condition 1 fails, and nothing is proved: 1/B against 1/(B + 1) rounds every
gradient anew. The margin gives up 42 u B more (u that of float32), which is what the records of
one layer need whose gradients do not cancel inside: at most 4 u for the gradient, 36 u for its
norm (`norms.row_squared_norms` errs by 18 u, another way in each world), and less than u for the
`taper`, because of which no factor jumps. But the products of all groups round anew as well (by 2
(k + 2) u B C in the worst case), and so does every operation of the backward pass; a gradient that
cancels inside down to that rounding moves as a whole (106 records by 106 C), as does one that
leaves float32's range on the way. `attach` lists this among what is trusted. Sums cost nothing.

**With a fixed shape** (``batches(fixed_shape=True)``, see `slots`) every other record has
its place beside the same others, in equally shaped batches, in both worlds, and a mean's factor is
a public constant: the theorem holds for means as for sums, and what follows cannot happen with
kernels that treat rows apart.

What this does not cover otherwise, and no per-sample clipping in floating point can: that forward
and backward pass round record j differently beside record i (other kernels for other batch sizes,
other padding). Nor, for layers without a rule, that torch.func does. That other operations round a
record the same wherever it lies is arranged (`batch_invariant`; a fixed number of records in a
convolution) and tested, not proved: kernels are the vendor's. Nor that a record runs through other
formulas beside other records: how often a layer is used, and on how many axes, is taken as public.
Under torch.autocast those roundings are of 8 or 11 bits. The hooks widen what was saved to float32
before anything is measured or summed (or an accelerator multiplies it to float32), and what is
formed is measured, so the theorem holds with float32's u; the loss must be a sum (condition 1).
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dpoptim.clipping import Directions
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.batch_invariant import aligned
from dpoptim.gradients.arithmetic.multiplication import onednn_multiplies
from dpoptim.gradients.arithmetic.onednn import transposed_product

Groups = Sequence[Sequence[int]]

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
SUM_MARGIN = 2.0**-8  # of float32 sums
GROUP_ROWS = 160  # k of the theorem
BLOCK_GROUPS = 4  # m of the theorem
FLOAT64_ROWS = 1024  # rows that are multiplied in float64 at a time
WIDE_ROWS = 8192  # the same of gradients in float64, which need not be converted
FLOAT64_ENTRIES = 1 << 17  # that are converted to float64 at a time: they stay in cache
# columns up to which one float64 product is as fast as a float32 product for each group
NARROW = 512
SMALL_RESULT = 1 << 12  # entries up to which groups are multiplied in one batched product
LEAST_BATCHED = 8  # blocks
WEIGHTED_AT_ONCE = 1 << 17  # entries that are weighted before they are grouped: they stay in cache
BATCHED_ROWS = 64 * GROUP_ROWS  # rows of one batched product
COMMON_FACTOR_ERROR = 42 * 2.0**-24  # that a mean gives up for each record: see above


def margin(dtype: torch.dtype, capacity: int, *, common_factor: bool = True) -> float:
    """Share of the clip norm given up to rounding: by the theorem, or as said of common factors.

    Args:
        dtype: dtype of the gradients (float32 or float64).
        capacity: B of the theorem, records in a batch, at least 1.
        common_factor: whether all gradients carry a factor that depends on how many there are,
            such as a mean's.

    Returns:
        2^-8 + capacity * 42 * 2^-24 for float32 (without a common factor: capacity * 2^-32
        instead, for adding up the groups); for float64 2^-20, growing as capacity * 2^-32 beyond
        4,096 records, and the same for a common factor, since losses may be computed in float32.

    Raises:
        ValueError: a float32 batch so large that rounding could eat most of the bound.
    """
    common = COMMON_FACTOR_ERROR * capacity if common_factor else 0.0
    if dtype != torch.float32:
        share = max(2.0**-20, capacity * 2.0**-32) + common
    else:
        share = SUM_MARGIN + (common or 2.0**-32 * capacity)
    if share > 0.5:
        fix = (
            'a smaller batch_size, or a summed loss (reduction="sum")'
            if common
            else "a smaller batch_size"
        )
        raise ValueError(
            f"a batch of {capacity} records is too large to be summed with a proven bound. Fix: "
            f"{fix}."
        )
    return share


def consecutive_groups(rows: int) -> Groups:
    """Groups for neighbours that keep every other record in its place."""
    whole, rest = divmod(rows, GROUP_ROWS)
    sizes = [GROUP_ROWS] * whole + [rest] * (rest > 0)
    return [sizes[i : i + BLOCK_GROUPS] for i in range(0, len(sizes), BLOCK_GROUPS)]


def slices(groups: Groups) -> Iterator[list[slice]]:
    """The rows of each group, block by block."""
    start = 0
    for block in groups:
        parts = []
        for rows in block:
            parts.append(slice(start, start + rows))
            start += rows
        yield parts


def side_by_side(g: Tensor, weights: Tensor) -> Tensor:
    """Rows of g (R, p) times each of their weights (R, k): (R, k p), for one product."""
    if weights.shape[1] == 1:
        return g * weights
    return (g[:, None] * weights[:, :, None]).contiguous().flatten(1)


def add_weighted_outer(sums: Sums, g: Tensor, a: Tensor, weights: Tensor, groups: Groups) -> None:
    """Add ``sum_r weights[j, r] * outer(g[r], a[r])`` to the j-th of ``sums``, shaped (p, d).

    Args:
        g, a: the gradients' dtype, shapes (R, p) and (R, d); finite.
        weights: float64, shape (k, R); zero where a row does not count.
        groups: that the rows are summed in; they add up to R.
    """
    if weights.shape[0] == 1 or not g.is_cpu or g.shape[1] * a.shape[1] <= SMALL_RESULT:
        add_products(sums, g, a, weights, groups)
        return
    for rows, block, direction in populations(sums.directions, weights, groups):
        of_rows = weights[:, rows] if direction is None else weights[:1, rows]
        # One layout, whether or not rows had to be picked: that depends on who else is there.
        add_products(sums, g[rows].contiguous(), a[rows].contiguous(), of_rows, [block], direction)


def populations(
    directions: Directions, weights: Tensor, groups: Groups
) -> Iterator[tuple[slice | Tensor, list[int], tuple[float, ...] | None]]:
    """Each block's rows sorted by direction: which rows, how many a group, the direction or None.

    A direction is that of a row's own weights, so no row is sorted differently beside others.
    (What rows of different directions add is multiplied, and added up in float32, apart: errors as
    of shorter groups.)
    """
    known, start = weights.cpu().numpy(), 0
    for block in groups:
        of_block = known[:, start : start + sum(block)]
        left = np.ones(of_block.shape[1], dtype=bool)
        for direction in (*directions, None):
            chosen = left.copy()
            for j, times in enumerate(direction or ()):
                # Rounding apart: 2^-40 is little beside the 2^-22 that factors are below their
                # bounds (`clipping`).
                chosen &= np.abs(of_block[j] - times * of_block[0]) <= 2.0**-40 * of_block[0]
            left &= ~chosen
            index = chosen.nonzero()[0]
            if len(index) == len(left):
                yield slice(start, start + len(left)), list(block), direction
            elif len(index):
                upto = np.searchsorted(index, np.cumsum(block))
                yield (
                    torch.from_numpy(index + start).to(weights.device),
                    np.diff(upto, prepend=0).tolist(),
                    direction,
                )
        start += len(left)


def add_products(
    sums: Sums,
    g: Tensor,
    a: Tensor,
    weights: Tensor,
    groups: Groups,
    direction: Sequence[float] | None = None,
) -> None:
    """As `add_weighted_outer`; with a direction, one row of weights is for all: see `Sums.add`."""
    weights = weights.reshape(-1, 1) if len(weights) == 1 else weights.T.contiguous()
    if g.dtype == torch.float64:
        sums.add(exact_product(g, a, weights, rows_at_once=WIDE_ROWS), direction)
        return
    narrow = weights.to(g.dtype)
    start = 0
    if len(groups) > LEAST_BATCHED and g.shape[1] * a.shape[1] <= SMALL_RESULT:
        start = equal_groups(groups)
        for first in range(0, start, BATCHED_ROWS):
            rows = slice(first, min(first + BATCHED_ROWS, start))
            left = side_by_side(g[rows], narrow[rows])
            left = left.view(-1, GROUP_ROWS, left.shape[1])
            right = aligned(a[rows]).view(-1, GROUP_ROWS, a.shape[1])
            sums.add(torch.bmm(left.transpose(1, 2), right).sum(0, dtype=torch.float64), direction)
        groups = groups[start // (BLOCK_GROUPS * GROUP_ROWS) :]
    by_onednn = onednn_multiplies(g, g.shape[1] * weights.shape[1], a.shape[1])
    weighted = (  # few numbers: all rows are weighted at once
        side_by_side(g, narrow)
        if g.is_cpu
        and g.is_contiguous()  # so that a group's rows lie alike however many others there are
        and g.numel() * weights.shape[1] <= WEIGHTED_AT_ONCE
        else None
    )

    def product(part: slice, room: Tensor | None) -> Tensor:
        part = slice(part.start + start, part.stop + start)
        if part.stop - part.start > GROUP_ROWS:
            return exact_product(g[part], a[part], weights[part], rows_at_once=FLOAT64_ROWS)
        left = side_by_side(g[part], narrow[part]) if weighted is None else aligned(weighted[part])
        right = aligned(a[part])
        if by_onednn:
            return transposed_product(left, right)
        room = room if room is not None and room.dtype == g.dtype else None
        return torch.mm(left.t(), right, out=room)

    add_groups(sums, product, groups, direction, in_room=not by_onednn)


def exact_product(g: Tensor, a: Tensor, weights: Tensor, *, rows_at_once: int) -> Tensor:
    """``sum_r weights[r, j] * outer(g[r], a[r])`` in float64, one below the other: (k p, d).

    Args:
        g, a, weights: (R, p), (R, d) and (R, k).
    """
    exact = g.new_zeros(g.shape[1] * weights.shape[1], a.shape[1], dtype=torch.float64)
    for first in range(0, len(g), rows_at_once):
        rows = slice(first, first + rows_at_once)
        exact.addmm_(side_by_side(g[rows].double(), weights[rows]).T, a[rows].double())
    return exact


def equal_groups(groups: Groups) -> int:
    """Rows in leading blocks of full groups, of `consecutive_groups`: one batched product."""
    full = [GROUP_ROWS] * BLOCK_GROUPS
    blocks = next((i for i, block in enumerate(groups) if list(block) != full), len(groups))
    return blocks * BLOCK_GROUPS * GROUP_ROWS


def add_weighted_rows(sums: Sums, values: Tensor, weights: Tensor, groups: Groups) -> None:
    """Add ``sum_r weights[j, r] * values[r]`` to the j-th sum: (R, N), and float64 (k, R)."""
    if values.stride(1) != 1 or values.stride(0) < values.shape[1]:
        # another layout has another kernel, and who is left out decides whether it is copied
        values = values.contiguous()
    if values.shape[1] <= NARROW:
        sums.add(exact_weighted_rows(values, weights))
        return
    narrow = None if values.dtype == torch.float64 else weights.to(values.dtype)

    def product(part: slice, room: Tensor | None) -> Tensor:
        if narrow is not None and part.stop - part.start <= GROUP_ROWS:
            if room is None or room.dtype != values.dtype:
                room = values.new_empty(len(weights), values.shape[1])
            rows = aligned(values[part]).T
            for each, out in zip(narrow, room, strict=True):
                torch.mv(rows, each[part], out=out)
            return room
        return exact_weighted_rows(values[part], weights[:, part])

    add_groups(sums, product, groups)


def exact_weighted_rows(values: Tensor, weights: Tensor) -> Tensor:
    """``weights @ values`` in float64: (R, N), (k, R) -> (k, N)."""
    if values.is_cpu and 0 < values.numel() <= FLOAT64_ENTRIES:
        return torch.mm(weights, values.double())
    total = values.new_zeros(len(weights), values.shape[1], dtype=torch.float64)
    converted = values.is_cpu and values.dtype != torch.float64
    at_a_time = max(1, FLOAT64_ENTRIES // max(1, values.shape[1])) if converted else FLOAT64_ROWS
    for start in range(0, len(values), at_a_time):
        part = slice(start, start + at_a_time)
        total.addmm_(weights[:, part], values[part].double())
    return total


def add_groups(
    sums: Sums,
    product: Callable[[slice, Tensor | None], Tensor],
    groups: Groups,
    direction: Sequence[float] | None = None,
    *,
    in_room: bool = True,
) -> None:
    """Add the groups' products to ``sums``: those of a block in their own dtype first.

    Args:
        product: of the rows of a group, for all sums; in the given memory, if its dtype allows.
            Fresh pages cost as much as an addition.
        in_room: whether it ever takes the given memory; else none is kept for it.
    """
    room: Tensor | None = None
    for block in slices(groups):
        of_block: Tensor | None = None
        for part in block:
            if part.stop == part.start:
                continue
            term = product(part, None if of_block is None else room)
            if of_block is None:
                of_block = term
            elif term.dtype == of_block.dtype:
                of_block += term
                room = term if in_room else None
            else:
                sums.add(term, direction)
            del term
        if of_block is not None:
            sums.add(of_block, direction)
