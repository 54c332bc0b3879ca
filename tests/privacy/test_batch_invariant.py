"""What cancels inside a record is all rounding, and clipping makes it C long: no record may turn
that of the others.

Tries to falsify ``|sum(D) - sum(D')| <= C`` by the place of records in memory, and by how many
they are.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping, SplitClipping
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.batch_invariant import record_products
from dpoptim.gradients.arithmetic.norms import LONG_BLOCK, NORM_BLOCK, row_squared_norms
from dpoptim.gradients.arithmetic.position_sums import sum_positions
from dpoptim.gradients.arithmetic.products import add_weighted_outer, add_weighted_rows
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.layers.normalisation import GroupNormRule
from dpoptim.gradients.per_sample.ghost_norms import ghost_squared_norms
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter
from support import LIBRARIES, pairs


def in_both_libraries(test: Callable[..., None]) -> Callable[..., None]:
    """Not for what takes batched products alone, which both leave as they are."""
    library = pytest.mark.parametrize("library", LIBRARIES, indirect=True)
    return library(pytest.mark.usefixtures("library")(test))


def cancelling(T: int, p: int, seed: int, size: float = 1e7) -> Tensor:
    """Gradients of T positions that add up to nothing but rounding: shape (T, p)."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(T // 2, p, generator=generator)
    return torch.cat([half, -half])[torch.randperm(T, generator=generator)] * size


def clipped_sum(layer: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    engine = Engine(layer, Clipping(1.0), capacity=100, reduction="sum")
    engine.attach()
    engine.begin_microbatch(len(x), groups=[[len(x)]])
    loss(layer(x)).backward()
    total = torch.cat([part.clone() for part in engine.take()])
    engine.detach()
    return total


class BatchFirst(nn.Module):
    """Self-attention whose own inputs have time first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.layer(x, x, x)[0].transpose(0, 1)


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "linear bias": lambda p: nn.Linear(1, p),
    "layer norm": nn.LayerNorm,
    "rms norm": nn.RMSNorm,
    "conv bias": lambda p: nn.Conv1d(1, p, 1),
    "group norm": lambda p: nn.GroupNorm(1, p),
    "attention": BatchFirst,
}


@in_both_libraries
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("T", "p"), [(16, 2), (32, 2), (16, 40)])
@pytest.mark.thinned(3)
def test_sums_over_positions_do_not_depend_on_place(kind: str, T: int, p: int) -> None:
    """Losses that take time first send gradients in that order back, and kernels then run across
    records: 31 C.
    """
    torch.manual_seed(0)
    layer = LAYERS[kind](p)
    for seed in range(4):
        g = cancelling(T, p, seed)
        row = torch.randn(p, generator=torch.Generator().manual_seed(seed))

        def run(rows: int, g: Tensor = g, row: Tensor = row) -> Tensor:
            if kind == "linear bias":
                x = torch.zeros(rows, T, 1)
                return clipped_sum(
                    layer, x, lambda out: (out.transpose(0, 1).contiguous() * g[:, None]).sum()
                )
            if kind in ("conv bias", "group norm"):
                x = (
                    torch.zeros(rows, 1, T)
                    if kind == "conv bias"
                    else row[:, None].expand(rows, p, T)
                )
                return clipped_sum(
                    layer, x, lambda out: (out.permute(2, 1, 0).contiguous() * g[:, :, None]).sum()
                )
            x = row.expand(T, rows, p).contiguous().transpose(0, 1)  # time first in memory
            return clipped_sum(layer, x, lambda out: (out * g).sum())

        for rows in (2, 9, 41, 80):
            assert float((run(rows) - run(rows - 1)).norm()) <= 1.0


@pytest.mark.parametrize("positions", [1, 7, 64, 1024])
@pytest.mark.parametrize("threads", [1, 4], indirect=True)
def test_gradients_in_groups_are_functions_of_a_record_alone(positions: int, threads: None) -> None:
    """To the last bit, wherever it is and whatever the others are, numbers or not.

    PyTorch's function adds up all that it takes for a batch; here no record is in one with others.
    """
    torch.manual_seed(0)
    rule, layer, batch = GroupNormRule(), nn.GroupNorm(4, 12), (2, 3, 9, 40)
    nn.init.normal_(layer.weight)
    half = torch.randn(1, 12, -(-positions // 2)) * 1e7
    cancelling = torch.cat([half, -half], 2)[..., :positions]
    one, slope = torch.randn(1, 12, positions), cancelling.contiguous()

    def gradients(x: Tensor, g: Tensor, place: int) -> list[Tensor]:
        saved = rule.forward(layer, x)[1]
        x_gradient, formed = rule.all_gradients(layer, saved, g)
        apart = rule.per_sample_grads(layer, saved, g)
        for name, each in apart.items():
            assert torch.equal(each.values[place], formed[name].values[place])
        alone = rule.input_gradient(layer, saved, g)
        assert torch.equal(alone[place], x_gradient[place])
        return [x_gradient[place], *(each.values[place] for each in formed.values())]

    with torch.no_grad():
        expected = gradients(one, slope, 0)
        for rows in batch:
            x, g = (torch.randn(rows, 12, positions) for _ in range(2))
            x[0], g[-1] = torch.inf, torch.nan
            for place in (0, rows // 2, rows - 1):
                kept = x[place].clone(), g[place].clone()
                x[place], g[place] = one[0], slope[0]
                # also where records lie channels last
                for given in (g, g.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
                    found = gradients(x, given, place)
                    assert all(map(torch.equal, found, expected))
                x[place], g[place] = kept


class Uses(nn.Module):
    """A parameter that its module uses itself, on all positions."""

    def __init__(self, shape: tuple[int, ...], use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.p, self.use = nn.Parameter(torch.ones(shape)), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.p)


USES: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "scale": ((8,), lambda x, p: x * p),
    "number": ((), lambda x, p: x * p),
    "one for each head": (
        (4, 1, 1),
        lambda x, p: (x.unflatten(2, (4, 2)).transpose(1, 2) * p).transpose(1, 2).flatten(2),
    ),
    "one for each position": ((64, 1), lambda x, p: x * p),
    "all positions": ((1, 64, 8), lambda x, p: x * p),
    "spread before": ((8,), lambda x, p: x * (p * 2).expand(64, 8)),
    "two at once": ((8,), lambda x, p: torch.addcmul(x, x, p)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("use", "order", "library", "threads"),
    pairs(list(USES), [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0)], LIBRARIES, [1, 4]),
    indirect=["library", "threads"],
)
def test_bare_parameters_add_up_alike_in_any_company(
    use: str, order: tuple[int, int, int], library: str, threads: None
) -> None:
    """Autograd adds up positions as they lie, and other records decide that: 2 C."""
    T, d = 64, 8
    model = Uses(*USES[use])
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        half, factors = (
            torch.randn(T // 2, d, generator=generator),
            torch.randn(1, d, generator=generator),
        )
        places = torch.randperm(T, generator=generator)
        x = torch.cat([half, half])[places] * 1e7
        g = (torch.cat([torch.ones(T // 2, d), -torch.ones(T // 2, d)]) * factors)[places]
        sums = []
        for rows, place in ((1, 0), (2, 0), (2, 1), (3, 1), (9, 8), (17, 4)):
            inputs, slopes = torch.zeros(rows, T, d), torch.zeros(rows, T, d)
            inputs[place], slopes[place] = x, g

            def loss(output: Tensor, slopes: Tensor = slopes) -> Tensor:
                return (
                    output.permute(order).contiguous() * slopes.permute(order).contiguous()
                ).sum()

            sums.append(clipped_sum(model, inputs, loss))
        assert 0.9 < float(sums[0].norm()) <= 1.0  # nothing but rounding, as long as it may be
        assert all(torch.equal(other, sums[0]) for other in sums[1:])


@in_both_libraries
def test_rms_norm_does_not_depend_on_the_layout_of_its_input() -> None:
    """Features first: the means of one record were rounded otherwise than those of two, 2.3 C."""
    T, p = 16, 33
    torch.manual_seed(0)
    layer = nn.RMSNorm(p)
    for seed in range(6):
        g, row = (
            cancelling(T, p, seed),
            torch.randn(p, generator=torch.Generator().manual_seed(seed)),
        )
        sums = []
        for rows in (2, 1):
            x = row.expand(rows, T, p).permute(2, 0, 1).contiguous().permute(1, 2, 0)
            sums.append(clipped_sum(layer, x, lambda out, g=g: (out * g).sum()))  # type: ignore[misc]
        assert float((sums[0] - sums[1]).norm()) <= 1.0


ORDERS = {"rows": (0, 1, 2), "transposed": (0, 2, 1), "features first": (2, 0, 1)}


SHAPES = [(30, 16, 1), (64, 16, 1), (16, 48, 1), (100, 7, 50), (100, 5, 33), (42, 33, 34)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("case", "library", "threads"),
    pairs(list(product(SHAPES, ORDERS)), LIBRARIES, [1, 4]),
    indirect=["library", "threads"],
    ids=str,
)
def test_a_record_alone_is_rounded_as_in_company(
    case: tuple[tuple[int, int, int], str], library: str, threads: None
) -> None:
    """Kernels for one matrix are others than those for several, and strides of a single record are
    ambiguous: 2.7 C.
    """
    (T, d, p), layout = case
    order = ORDERS[layout]
    back = [order.index(axis) for axis in range(3)]
    layer = nn.Linear(d, p, bias=False)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        half = torch.randn(T // 2, d, generator=generator)
        other = torch.randn(T // 2, p, generator=generator)
        places = torch.randperm(T, generator=generator)
        a, g = torch.cat([half, half])[places] * 1e4, torch.cat([other, -other])[places] * 1e4
        sums = []
        for rows in (3, 2, 1):
            x = a.expand(rows, T, d).permute(order).contiguous().permute(back)
            w = g.expand(rows, T, p).permute(order)
            sums.append(
                clipped_sum(layer, x, lambda out, w=w: (out.permute(order).contiguous() * w).sum())
            )  # type: ignore[misc]
        assert float((sums[0] - sums[1]).norm()) <= 1.0
        assert float((sums[1] - sums[2]).norm()) <= 1.0


SIZES = [(7, 5, 3), (33, 64, 128), (128, 1024, 48), (64, 192, 768), (1000, 32, 80), (1500, 64, 192)]


@pytest.mark.parametrize(
    ("sizes", "threads", "records", "dtype"),
    pairs(SIZES, [1, 2, 4], [1, 2, 3], [torch.float32, torch.float64]),
    indirect=["threads"],
)
def test_products_do_not_depend_on_their_operands_layout(
    sizes: tuple[int, int, int], records: int, dtype: torch.dtype, threads: None
) -> None:
    """To the last bit. Where operands are left as they lie, on Intel's processors those of 1,500
    positions fail; elsewhere the small ones.
    """
    torch.manual_seed(0)
    T, p, d = sizes
    g, a = torch.randn(records, T, p, dtype=dtype), torch.randn(records, T, d, dtype=dtype)
    turned_g, turned_a = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (g, a))
    expected = record_products(g, a)
    for left, right in ((turned_g, a), (g, turned_a), (turned_g, turned_a)):
        assert torch.equal(record_products(left, right), expected)
    for claimed, again in zip(
        ghost_squared_norms(g, a), ghost_squared_norms(turned_g, turned_a), strict=True
    ):
        assert torch.equal(claimed, again)


@pytest.mark.parametrize(
    "sizes", [(64, 5, 64), (17, 32, 65), (8, 16, 65), (48, 512, 17), (100, 65, 33), (512, 7, 32)]
)
@pytest.mark.parametrize("threads", [1, 2, 4, 8, 16], indirect=True)
def test_products_and_claims_of_few_records_are_those_of_many(
    sizes: tuple[int, int, int], threads: None
) -> None:
    """To the last bit: threads divide few matrices among them, and so add up their products
    otherwise.
    """
    torch.manual_seed(0)
    T, p, d = sizes
    for _ in range(2):  # one is enough: without care, no values come out the same
        g, a = torch.randn(17, T, p), torch.randn(17, T, d)
        together, (claims, _) = record_products(g, a), ghost_squared_norms(g, a)
        for records in (1, 2, 3, 5, 8):
            assert torch.equal(record_products(g[:records], a[:records]), together[:records])
            assert torch.equal(ghost_squared_norms(g[:records], a[:records])[0], claims[:records])


@in_both_libraries
@pytest.mark.parametrize("channels", [1, 15])
def test_a_last_part_of_one_record_is_rounded_as_a_longer_one(channels: int) -> None:
    """Patches of wide images are formed a few records at a time: 2.5 C."""
    T, d = 3136, 64
    generator = torch.Generator().manual_seed(0)
    half, other = (
        torch.randn(d, T // 2, generator=generator),
        torch.randn(channels, T // 2, generator=generator),
    )
    places = torch.randperm(T, generator=generator)
    a, g = (
        torch.cat([half, half], 1)[:, places] * 1e3,
        torch.cat([other, -other], 1)[:, places] * 1e4,
    )
    layer = nn.Conv1d(d, channels, 1, bias=False)
    sums = [
        clipped_sum(layer, a.expand(rows, d, T).contiguous(), lambda out: (out * g).sum())
        for rows in (7, 6)
    ]
    assert float((sums[0] - sums[1]).norm()) <= 1.0


@pytest.mark.parametrize("threads", [1, 2, 16], indirect=True)
def test_one_long_sum_is_rounded_as_in_company(threads: None) -> None:
    """Several threads take a single sum of many entries in two passes: another sign, 2 C."""
    x = cancelling(40_000, 1, seed=0)[None]
    assert torch.equal(sum_positions(x), sum_positions(x.expand(3, -1, -1))[:1])


@in_both_libraries
@pytest.mark.parametrize("block", [[200, 200, 100], [170, 170, 170, 5], [5, 200, 3, 300]])
def test_long_and_short_groups_share_a_block(block: list[int]) -> None:
    torch.manual_seed(0)
    rows = sum(block)
    g, a, weights = (
        torch.randn(rows, 70),
        torch.randn(rows, 65),
        torch.rand(1, rows, dtype=torch.float64),
    )
    values = torch.randn(rows, 600)
    total, outer = (
        Sums([600]),
        Sums([70, 65]),
    )
    add_weighted_rows(total, values, weights, [block])
    add_weighted_outer(outer, g, a, weights, [block])
    torch.testing.assert_close(
        total.settle()[0], weights[0] @ values.double(), rtol=1e-4, atol=1e-4
    )
    expected = torch.einsum("r,rp,rd->pd", weights[0], g.double(), a.double())
    torch.testing.assert_close(outer.settle()[0], expected, rtol=1e-4, atol=1e-4)


def test_without_a_residual_the_second_sum_is_zero() -> None:
    factors = SplitClipping(1.0, 1.0).factors(torch.logspace(-20, 40, 10_000).double(), 2.0**-8)
    assert not factors[1].any()


@in_both_libraries
def test_a_record_longer_than_it_claims_is_shortened_and_changes_no_other() -> None:
    """All are formed again because of it, and some of them because of one that is left out."""
    torch.manual_seed(0)
    records, T, p, d = 12, 24, 6, 40
    g, a = torch.randn(records, T, p), torch.randn(records, T, d)
    g[:, :, 0] = 0
    g[5] = 0
    g[5, :, 0] = cancelling(T, 1, seed=1)[:, 0]  # alone in the first row of the weight
    a[5] = a[5, :1]
    sums = []
    for weight, counts in ((0.0, True), (1.0, True), (1.0, False)):
        claims = SequenceOuter(g, a, ghost_norms=True)
        claimed = claims.squared_norms([[records]], LONG_BLOCK)
        claimed[5] = 1e-6  # a claim that errs
        if not counts:
            claims = claims.without(torch.arange(records) != 2)
        weights = torch.linspace(0.5, 1.0, records, dtype=torch.float64)
        weights[2] *= counts
        weights[5] = weight
        total = Sums([p * d])
        claims.add_weighted_sums(total, weights[None], [[records]])
        sums.append(total.settle()[0].view(p, d).clone())
    without, shortened, apart = sums
    assert torch.equal(without[1:], shortened[1:])
    assert not without[0].any()
    assert 0.99e-3 < float(shortened[0].norm()) <= 1e-3
    assert torch.equal(apart[0], shortened[0])


@pytest.mark.parametrize("block", [NORM_BLOCK, LONG_BLOCK])
@pytest.mark.parametrize("threads", [1, 4], indirect=True)
def test_norms_of_few_records_are_read_as_those_of_many(block: int, threads: None) -> None:
    """To the last bit: every factor of a large batch would move with it."""
    torch.manual_seed(0)
    for entries in (1, 7, 32, 33, 1000, 1024, 1025, 5000, 70_000):
        rows = torch.randn(40, entries)
        together = row_squared_norms(rows, block=block)
        assert bool((together >= rows.double().square().sum(1)).all())
        for records in (1, 2, 3, 9):
            assert torch.equal(
                row_squared_norms(rows[7 : 7 + records], block=block), together[7 : 7 + records]
            )
            assert torch.equal(
                row_squared_norms(rows[7 : 7 + records].clone(), block=block),
                together[7 : 7 + records],
            )
