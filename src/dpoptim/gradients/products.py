"""Weighted sums over records whose rounding error is bounded, so that clipping bounds what is really computed.

Clipping promises that one record moves the sum by at most C. Arithmetic in float32 breaks the promise: adding a record
changes how every other record's term is rounded, and those errors grow with the batch (9,194 bounded records, added in
order, moved by 1.49 C). So a batch is summed in *groups*: each group is one float32 product, and the groups' sums are
added in float64. A record's group is chosen without looking at the other records, so one record touches the rounding of
its own group (and of the few that are added up with it), and that error fits into a small margin: records are clipped to
``C (1 - margin)``.

**Theorem.** Let u be the unit roundoff of the books' dtype and B at least the number of records in a physical batch. Let
two batches differ in one record, and suppose that

1. every other record has the same rows in both: the loss is a sum over records;
2. each clip factor c_i and each stored gradient G_i is computed from record i's rows alone, with c_i |G_i| at most
   C (1 - margin);
3. every other record belongs to the same group in both, in the same order, and the product of a group is a function of
   its rows (they start on 64-byte boundaries, so that the kernel finds them aligned alike);
4. a float32 product sums at most k = `GROUP_ROWS` rows (larger groups are multiplied in float64), and only the at most
   m = `BLOCK_GROUPS` groups of a *block*, always the same ones, are added in float32.

Then the computed sums differ by at most C if ``margin >= 2^-8 + 2^-32 B``.

*Proof.* What does not contain the record is equal in both. The product of a group of s <= k rows has, in whatever order
it is summed, an error of at most gamma_{s+2} times the sum of the absolute values of its terms (Higham 2002, section
3.1; the two extra roundings are those of c_i and of c_i g_i). Its terms are the entries of the c_i G_i themselves, one
row to a record, so nothing cancels inside a record, and the error is at most (k + 2) u' k C with u' = u / (1 - (k + 2)
u). Adding m groups errs by at most (m - 1) u' m k C in either world. Both worlds together: 2 ((k + 2) k + (m - 1) m k)
u' C, which is 0.85 * 2^-8 C for k = 160, m = 4. Adding these sums in float64 costs a relative 2^-53 for each addition
of at most B, in both worlds less than 2^-32 B C. The differing record itself adds at most C (1 - margin). QED.
(tests/privacy/test_clipped_sum_sensitivity.py tries to falsify it.)

`Groups` are written as blocks of group sizes, e.g. ((112, 98, 120, 105), (110, 99)).

Under zero-out and replace-one, neighbours have equally many rows: consecutive groups of k rows satisfy condition 3. Under
add-or-remove-one a removed record shifts all that follow it, so there the sampler draws each record's group with a coin
of its own (`sampling.into_groups`); with the coins coupled, condition 3 holds.

**Under a mean** condition 1 fails, and nothing is proved: 1/B against 1/(B + 1) rounds every gradient anew. The margin
gives up 42 u B more (u that of float32), which is what the records of one layer need whose gradients do not cancel
inside: at most 4 u for the gradient, 36 u for its norm (`row_squared_norms` errs by 18 u, another way in each world),
and less than u for the `taper`, because of which no factor jumps. But the products of all groups round anew as well (by
2 (k + 2) u B C in the worst case; 55 u B C were seen, a half of it from norms in longer blocks), and so does every
operation of the backward pass (a thousand multiplications moved a sum of 100,000 records by 1.15 C); a gradient that
cancels inside down to that rounding moves as a whole (106 records by 106 C), as does one that leaves float32's range on
the way. `attach` lists this among what is trusted. Sums cost nothing.

What this does not cover, and no per-sample clipping in floating point can: that forward and backward pass round record
j differently in the company of record i (other kernels for other batch sizes, other padding). Nor, for layers without a
rule, that torch.func does. That other products round a record alike wherever it lies is arranged (aligned operands, a
fixed number of records in a convolution) and tested, not proved: kernels are the vendor's. Nor that a record runs
through other formulas in other company: how often a layer is used, and on how many axes, is taken as public. Under
torch.autocast those roundings are of 8 or 11 bits. The books widen what was saved to float32 before anything is
measured or summed, where products of two bfloat16 numbers are exact, so the theorem holds with float32's u; the loss
must be a sum (condition 1).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Groups = Sequence[Sequence[int]]

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
SUM_MARGIN = 2.0**-8  # of float32 sums
GROUP_ROWS = 160  # k of the theorem
BLOCK_GROUPS = 4  # m of the theorem
FLOAT64_ROWS = 1024  # rows converted to float64 at a time: they stay in cache
ALIGNMENT = 64  # bytes
NARROW = 512  # columns up to which one float64 product is as fast as a float32 product for each group
SMALL_RESULT = 1 << 12  # entries up to which groups are multiplied in one batched product
LEAST_BATCHED = 8  # blocks
BATCHED_ROWS = 64 * GROUP_ROWS  # rows of one batched product
NORM_BLOCK = 32  # entries whose squares are added in float32
COMMON_FACTOR_ERROR = 42 * 2.0**-24  # that a mean gives up for each record: see above
SMALLEST_SQUARE = 2.0**-126  # what the square of one float32 entry may lose to underflow
SMALLEST_SQUARE_64, SMALLEST_SUM = 2.0**-1022, 2.0**-900  # the same for float64, and a sum for which it might matter
SAFE_SQUARES = (2.0**-60, 2.0**120)  # squared norms that float32 can add up; others are added in float64


def margin(dtype: torch.dtype, capacity: int, *, common_factor: bool = True) -> float:
    """Share of the clip norm that is given up to rounding: by the theorem, and with a common factor by what is said there.

    Args:
        dtype: dtype of the books (float32 or float64).
        capacity: B of the theorem, records in a batch, at least 1.
        common_factor: whether all gradients carry a factor that depends on how many there are, such as a mean's.

    Returns:
        2^-8 + capacity * 42 * 2^-24 for float32 (without a common factor: capacity * 2^-32 instead, for adding up the
        groups); for float64 2^-20, growing as capacity * 2^-32 beyond 4,096 records, and the same for a common factor, since
        losses may be computed in float32.

    Raises:
        ValueError: a float32 batch so large that rounding could eat most of the bound.
    """
    common = COMMON_FACTOR_ERROR * capacity if common_factor else 0.0
    if dtype != torch.float32:
        share = max(2.0**-20, capacity * 2.0**-32) + common
    else:
        share = SUM_MARGIN + (common or 2.0**-32 * capacity)
    if share > 0.5:
        fix = 'a smaller batch_size, or a summed loss (reduction="sum")' if common else "a smaller batch_size"
        raise ValueError(f"a batch of {capacity} records is too large to be summed with a proven bound. Fix: {fix}.")
    return share


TAPER_OCTAVES = 8


def taper(squared_lengths: Tensor) -> Tensor:
    """What a clip factor is multiplied by: 1 for lengths up to 2^54, and from there to 2^62 down to 0, without a jump.

    Lengths beyond cannot be told from infinite ones everywhere. Under a mean all of them are rounded with its factor, which
    depends on how many records there are: a threshold would let one record decide whether all others count.

    Args:
        squared_lengths: float64, not negative; NaN stays NaN.
    """
    return ((62.0 - squared_lengths.log2() / 2) / TAPER_OCTAVES).clamp(0.0, 1.0)


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


def aligned(x: Tensor) -> Tensor:
    """``x``, or a copy of it that starts on a 64-byte boundary."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def matrices(records: int, rows: int, columns: int, like: Tensor) -> Tensor:
    """Room for a (rows, columns) matrix of each record, each on a 64-byte boundary."""
    step = ALIGNMENT // like.element_size()
    stride = -(-rows * columns // step) * step
    room = like.new_empty(records * stride)
    return room.as_strided((records, rows, columns), (stride, columns, 1))


def aligned_records(x: Tensor) -> Tensor:
    """``x`` (B, T, d), or a copy of it, with every record on a 64-byte boundary."""
    size = x.element_size()
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    if dense and x.data_ptr() % ALIGNMENT == 0 and (len(x) == 1 or x.stride(0) * size % ALIGNMENT == 0):
        return x
    return matrices(len(x), x.shape[1], x.shape[2], like=x).copy_(x)


def record_products(g: Tensor, a: Tensor, out: Tensor | None = None) -> Tensor:
    """``sum_t outer(g[i, t], a[i, t])`` for each record: g of shape (B, T, p), a of shape (B, T, d) -> (B, p, d).

    Every record's operands and result lie alike in memory. A kernel may round by how they are aligned, and what cancels
    inside a record is all rounding: the result would depend on the record's place, hence on who else is there.
    """
    g, a = aligned_records(g), aligned_records(a)
    if out is None:
        out = matrices(len(g), g.shape[2], a.shape[2], like=g)
    return torch.bmm(g.transpose(1, 2), a, out=out)


class Sum:
    """A sum in float64 whose first term is written, not added: what the memory held before does not matter.

    Attributes:
        total: float64, the place of the sum; read it only after `settle`.
    """

    def __init__(self, total: Tensor) -> None:
        self.total = total
        self._empty = True

    def restart(self) -> None:
        self._empty = True

    def settle(self) -> Tensor:
        """The sum so far: zeros if there was no term."""
        if self._empty:
            self.total.zero_()
            self._empty = False
        return self.total

    def add(self, term: Tensor) -> None:
        """Add a term of any float dtype and of any shape with as many entries."""
        term = term.view(self.total.shape)
        if self._empty:
            self.total.copy_(term)
            self._empty = False
        else:
            self.total.add_(term)


def add_weighted_outer(total: Sum, g: Tensor, a: Tensor, weights: Tensor, groups: Groups) -> None:
    """Add ``sum_r weights[r] * outer(g[r], a[r])`` to ``total``, as if of shape (p, d).

    Args:
        g, a: the books' dtype, shapes (R, p) and (R, d); finite.
        weights: float64, shape (R,); zero where a row does not count.
        groups: that the rows are summed in; they add up to R.
    """
    narrow = None if g.dtype == torch.float64 else weights.to(g.dtype)[:, None]
    start = 0
    if narrow is not None and len(groups) > LEAST_BATCHED and total.total.numel() <= SMALL_RESULT:
        start = equal_groups(groups)
        for first in range(0, start, BATCHED_ROWS):
            rows = slice(first, min(first + BATCHED_ROWS, start))
            left = (g[rows] * narrow[rows]).view(-1, GROUP_ROWS, g.shape[1])
            right = aligned(a[rows]).view(-1, GROUP_ROWS, a.shape[1])
            total.add(torch.bmm(left.transpose(1, 2), right).sum(0, dtype=torch.float64))
        groups = groups[start // (BLOCK_GROUPS * GROUP_ROWS) :]

    def product(part: slice, room: Tensor | None) -> Tensor:
        part = slice(part.start + start, part.stop + start)
        if narrow is not None and part.stop - part.start <= GROUP_ROWS:
            return torch.mm((g[part] * narrow[part]).T, aligned(a[part]), out=room)
        exact = g.new_zeros(g.shape[1], a.shape[1], dtype=torch.float64)
        for first in range(part.start, part.stop, FLOAT64_ROWS):
            rows = slice(first, min(first + FLOAT64_ROWS, part.stop))
            exact.addmm_((g[rows].double() * weights[rows, None]).T, a[rows].double())
        return exact

    add_groups(total, product, groups)


def equal_groups(groups: Groups) -> int:
    """Rows in leading blocks of full groups, as `consecutive_groups` makes them: one batched product does them all."""
    full = [GROUP_ROWS] * BLOCK_GROUPS
    blocks = next((i for i, block in enumerate(groups) if list(block) != full), len(groups))
    return blocks * BLOCK_GROUPS * GROUP_ROWS


def add_weighted_rows(total: Sum, values: Tensor, weights: Tensor, groups: Groups) -> None:
    """Add ``sum_r weights[r] * values[r]`` to ``total``: values of shape (R, N)."""
    if values.stride(1) != 1 or values.stride(0) < values.shape[1]:
        values = values.contiguous()  # another layout has another kernel, and who is left out decides whether it is copied
    if values.shape[1] <= NARROW:
        total.add(values.double().T @ weights)
        return
    narrow = None if values.dtype == torch.float64 else weights.to(values.dtype)

    def product(part: slice, room: Tensor | None) -> Tensor:
        if narrow is not None and part.stop - part.start <= GROUP_ROWS:
            return torch.mv(aligned(values[part]).T, narrow[part], out=room)
        exact = values.new_zeros(values.shape[1], dtype=torch.float64)
        for start in range(part.start, part.stop, FLOAT64_ROWS):
            rows = slice(start, min(start + FLOAT64_ROWS, part.stop))
            exact.addmv_(values[rows].double().T, weights[rows])
        return exact

    add_groups(total, product, groups)


def add_groups(total: Sum, product: Callable[[slice, Tensor | None], Tensor], groups: Groups) -> None:
    """Add the groups' products to ``total``: those of a block in their own dtype first.

    Args:
        product: of the rows of a group; in the given memory, if its dtype allows. Fresh pages cost as much as an addition.
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
                room = term
            else:
                total.add(term)
        if of_block is not None:
            total.add(of_block)


def row_squared_norms(x: Tensor) -> Tensor:
    """At least the squared Euclidean norm of each record, and hardly more: shape (B, ...) -> (B,), float64.

    float32 would read long rows low (5e-3 at eight million entries), and lose what is below 1e-19; both break the bound.
    So blocks of 32 squares are added in float32, blocks in float64, and the result is raised by the most that this
    can have lost: (N + 4) 2^-24 of the square for blocks of N entries, and 2^-126 for each entry. Records whose squares
    leave float32's range are measured in float64, so zero is zero, and only what is not finite has no finite norm.
    """
    rows = x.reshape(x.shape[0], -1) if x.dim() > 1 else x[:, None]
    if rows.dtype == torch.float64:
        squared = torch.linalg.vecdot(rows, rows)
        tiny = squared < SMALLEST_SUM
        if bool(tiny.any()):
            squared[tiny] += SMALLEST_SQUARE_64 * (rows[tiny] != 0).sum(1, dtype=torch.float64)
        return squared
    if rows.is_cuda:  # bound by memory; and asking for extremes would wait for the device
        return in_float64(rows)
    entries = rows.shape[1]
    if entries <= NORM_BLOCK:
        squared = torch.linalg.vector_norm(rows, dim=1).double().square_()
    else:
        whole = entries - entries % NORM_BLOCK
        blocks = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, NORM_BLOCK)), dim=2)
        squared = blocks.double().square_().sum(1)
        if whole < entries:
            squared += torch.linalg.vector_norm(rows[:, whole:], dim=1).double().square_()
    # A square, N - 1 additions of non-negative terms, and the root, which counts twice: each errs by at most 2^-24.
    raised = 1 + (min(entries, NORM_BLOCK) + 4) * UNIT_ROUNDOFF[torch.float32]
    squared.mul_(raised).add_(entries * SMALLEST_SQUARE)
    extreme = ~((squared > SAFE_SQUARES[0]) & (squared < SAFE_SQUARES[1]))
    if bool(extreme.any()):
        squared[extreme] = in_float64(rows[extreme])
    return squared


def in_float64(rows: Tensor) -> Tensor:
    """Squared norms of rows of float32, raised by what 2^22 additions in float64 can lose."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_().mul_(1 + 2.0**-30)
