"""The engine gives what whole-model vmap(grad) gives, for every layer, reduction, clipping rule,
shape and dtype.
"""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.arithmetic.batch_invariant import ALIGNMENT
from dpoptim.gradients.layers import convolution as convolution_module
from dpoptim.gradients.layers import kernels as kernels_module
from dpoptim.gradients.layers.convolution import (
    Convolution,
    ConvolutionRule,
    formed_by_groups,
    formed_by_patches,
    grouped_weight_gradient,
)
from dpoptim.gradients.layers.kernels import AFewAtOnce, ByPatches
from dpoptim.gradients.per_sample.ghost_norms import ghost_squared_norms
from dpoptim.gradients.per_sample.lazy import Lazy
from dpoptim.gradients.per_sample.per_sample_grads import zero_outside
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter
from support import (
    CASES,
    Case,
    by_engine,
    clipped,
    joint_norm,
    pairs,
    record_loss,
    vmap_gradients,
)

ROWS = 8  # unlike every other axis of the cases


def problem(case: Case, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = case.build().to(dtype)
    return model, *case.inputs(ROWS, dtype)


def median_norm(gradients: list[torch.Tensor]) -> float:
    return float(
        torch.stack([g.reshape(len(g), -1).square().sum(1) for g in gradients])
        .sum(0)
        .sqrt()
        .median()
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("case", "reduction", "style", "dtype"),
    pairs(CASES, ["mean", "sum"], ["flat", "automatic"], [torch.float32, torch.float64]),
    ids=str,
)
def test_equals_whole_model_vmap(
    case: Case, reduction: str, style: str, dtype: torch.dtype
) -> None:
    model, x, target = problem(case, dtype)
    truth = vmap_gradients(model, x, target)
    clipping = Clipping(median_norm(truth), style)  # half of the records are clipped
    expected = clipped(truth, clipping, ROWS, reduction)
    tolerance = joint_norm(expected) * (3e-5 if dtype == torch.float32 else 1e-7)
    for microbatches in (1, 3):
        sums = by_engine(
            model,
            x,
            target,
            clipping,
            capacity=ROWS,
            reduction=reduction,
            microbatches=microbatches,
        )
        assert all(s.dtype == torch.float64 for s in sums)
        assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) <= tolerance


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_infinite_clip_norm_gives_the_plain_gradient(case: Case) -> None:
    model, x, target = problem(case, torch.float32)
    plain = torch.autograd.grad(record_loss(model(x), target).sum(), list(model.parameters()))
    sums = by_engine(model, x, target, Clipping(float("inf")), capacity=ROWS)
    assert joint_norm([a - b for a, b in zip(sums, plain, strict=True)]) <= 1e-6 * joint_norm(
        list(plain)
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_detaching_restores_the_model(case: Case) -> None:
    model, x, target = problem(case, torch.float32)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    keys, kind = list(model.state_dict()), type(model)
    by_engine(model, x, target, Clipping(1.0), capacity=ROWS)
    assert list(model.state_dict()) == keys
    assert type(model) is kind
    for name, module in model.named_modules():
        assert "forward" not in vars(module)
        assert vars(module).keys() == before[name].keys()
        assert not module._forward_pre_hooks
    assert all(not p._backward_hooks for p in model.parameters())


def test_an_error_while_attaching_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: nn.Module) -> None:
        raise ValueError("an attribute that cannot be read")

    monkeypatch.setattr("dpoptim.gradients.watch.model_watch.PlainAttributes", fails)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    with pytest.raises(ValueError, match="cannot be read"):
        by_engine(model, torch.randn(ROWS, 7), torch.randn(ROWS), Clipping(1.0), capacity=ROWS)
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_pre_hooks
    assert all(not p._backward_hooks for p in model.parameters())
    model(torch.randn(3, 7)).sum().backward()  # which no engine closes
    assert model[0].weight.grad is not None


def test_frozen_parameters_stay_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    x, target = torch.randn(ROWS, 7), torch.randn(ROWS)
    expected = clipped(vmap_gradients(model, x, target), Clipping(0.1), ROWS)
    sums = by_engine(model, x, target, Clipping(0.1), capacity=ROWS)
    assert [tuple(s.shape) for s in sums] == [(5,)]
    assert joint_norm([sums[0] - expected[0]]) < 1e-6


def test_parameters_without_entries_are_summed_like_others() -> None:
    """As MobileBERT has them where two widths are equal."""

    class Hollow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.full, self.narrow = nn.Linear(7, 3), nn.Linear(0, 3)
            self.bare = nn.Parameter(torch.zeros(2, 0))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.full(x) + self.narrow(x[:, :0]) + self.bare.sum()
            return out

    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):  # from initialising nothing
        model = Hollow()
    x, target = torch.randn(ROWS, 7), torch.randn(ROWS)
    expected = clipped(vmap_gradients(model, x, target), Clipping(0.1), ROWS)
    sums = by_engine(model, x, target, Clipping(0.1), capacity=ROWS)
    assert [s.shape for s in sums] == [p.shape for p in model.parameters()]
    assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) < 1e-6


def test_a_large_batch_goes_through_short_products_and_float64() -> None:
    """Capacity decides how a product is cut; the answer does not depend on it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    x, target = torch.randn(700, 7), torch.randn(700)
    for capacity in (700, 20_000):  # chunks of rows; float64 from the start
        expected = clipped(vmap_gradients(model, x, target), Clipping(0.5), capacity)
        sums = by_engine(model, x, target, Clipping(0.5), capacity=capacity)
        assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) < 1e-5 * joint_norm(
            expected
        )


def test_rows_beyond_capacity_are_summed_in_float64() -> None:
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    x, target = torch.randn(300, 7), torch.randn(300)
    expected = clipped(vmap_gradients(model, x, target), Clipping(0.5), 16)
    sums = by_engine(model, x, target, Clipping(0.5), capacity=16, microbatches=3)
    assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) < 1e-5 * joint_norm(
        expected
    )


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_that_start_from_zero_by_themselves(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = kind(5, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(x)[0][:, -1])

    model, x, target = Last(), torch.randn(ROWS, 6, 5), torch.randn(ROWS)
    plain = torch.autograd.grad(record_loss(model(x), target).sum(), list(model.parameters()))
    sums = by_engine(model, x, target, Clipping(float("inf")), capacity=ROWS)
    assert joint_norm([a - b for a, b in zip(sums, plain, strict=True)]) <= 1e-5 * joint_norm(
        list(plain)
    )


def as_from_a_loss(g: torch.Tensor, transposed: bool) -> torch.Tensor:
    """As losses of logits in shape (B, classes, T) send it back; records left out leave it so."""
    if not transposed:
        return g
    turned = g.transpose(1, 2).contiguous().transpose(1, 2)
    kept = zero_outside(turned, torch.ones(len(g), dtype=torch.bool))
    assert kept.stride() == turned.stride()
    return kept


CONVOLUTIONS = [
    nn.Conv1d(4, 6, 3, 2, 2, 2, groups=2),
    nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), groups=2),
]
CONVOLUTIONS += [
    nn.Conv1d(1, 4, 3, 2, 2, 2),
    nn.Conv2d(1, 5, (3, 2), (3, 1), (1, 0), (1, 3)),
    nn.Conv3d(1, 2, 2, 3),
]
CONVOLUTIONS += [
    nn.Conv3d(4, 6, (3, 2, 1), (2, 1, 3), (1, 2, 0), (1, 2, 1)),
    nn.Conv3d(2, 4, 2, groups=2),
]


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_convolutions_form_each_record_s_gradient(layer: nn.Module) -> None:
    x = torch.randn(ROWS, layer.in_channels, *(8, 9, 7)[: len(layer.kernel_size)])
    g = torch.randn_like(layer(x)).detach()
    truth = [
        torch.autograd.grad(layer(x[i : i + 1]), layer.weight, g[i : i + 1])[0] for i in range(ROWS)
    ]
    for form in (formed_by_groups, formed_by_patches):  # on a CPU, on an accelerator
        torch.testing.assert_close(
            form(layer, x, g, slice(0, ROWS), ROWS),
            torch.stack(truth).flatten(1),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize(
    "shape", [(16, 7, 5), (12, 5, 7), (8, 5, 17), (12, 7, 5), (8, 65, 3), (1, 3, 3), (64, 32, 16)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_record_s_gradient_does_not_depend_on_its_place(
    shape: tuple[int, int, int], dtype: torch.dtype, transposed: bool
) -> None:
    """To the last bit: what cancels inside a record is all rounding, and clipping makes it C
    long.
    """
    T, d, p = shape
    torch.manual_seed(0)
    a, g = torch.randn(1, T, d, dtype=dtype), torch.randn(1, T, p, dtype=dtype)
    for records in (1, 2, 5, 33):
        many = as_from_a_loss(g.repeat(records, 1, 1), transposed)
        together = SequenceOuter(many, a.repeat(records, 1, 1))
        together.squared_norms([[records]])
        alone = SequenceOuter(as_from_a_loss(g, transposed), a).materialise(slice(0, 1))
        for i in range(records):
            assert torch.equal(together.materialise(slice(i, i + 1)), alone)
            formed_again = SequenceOuter(many, a.repeat(records, 1, 1)).materialise(slice(i, i + 1))
            assert torch.equal(formed_again, alone)


PLACES = [
    (nn.Conv2d(90, 260, 3), (6, 7)),  # fewer at once
    (nn.Conv2d(150, 250, 3), (6, 7)),  # one at a time
    (nn.Conv2d(3, 5, 3), (6, 7)),
    (nn.Conv2d(1, 5, 3, 2), (6, 7)),
    (nn.Conv2d(1, 16, 5, padding=2), (6, 7)),
    (nn.Conv2d(4, 6, 2, groups=2), (6, 7)),
    (nn.Conv2d(4, 6, 1, groups=2), (6, 7)),
    (nn.Conv2d(3, 5, 1), (6, 7)),
    (nn.Conv2d(3, 7, 3, 3), (21, 21)),
    (nn.Conv1d(6, 9, 3, 3), (255,)),
    (nn.Conv1d(3, 7, 5, 5), (145,)),
    (nn.Conv2d(4, 3, 2), (16, 16)),
    (nn.Conv1d(5, 6, 2, 2), (86,)),
    (nn.Conv3d(2, 1, (3, 1, 1)), (9, 9, 9)),
    (nn.Conv3d(2, 5, (3, 1, 1), padding=(1, 0, 0)), (7, 9, 6)),
    (nn.Conv3d(2, 3, (1, 3, 3)), (3, 7, 9)),
]


def one_by_one(weight: Lazy) -> torch.Tensor:
    """All gradients, formed one after the other."""
    (chunk,) = weight.singly.one_by_one()
    formed = [chunk.form(record) for record in range(weight.records)]
    assert all(each.data_ptr() % ALIGNMENT == 0 for each in formed)
    return weight.singly.in_order(torch.stack(formed))


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize(
    ("dtype", "onednn", "library"),
    [
        (torch.float32, True, "MKL"),
        (torch.float32, True, "oneDNN"),  # float64 or without oneDNN, the library does not matter
        (torch.float32, False, "MKL"),
        (torch.float64, True, "MKL"),
        (torch.float64, False, "MKL"),
    ],
    indirect=["library"],
)
@pytest.mark.parametrize("patches", [True, False], ids=["patches", "as chosen"])
@pytest.mark.parametrize(("layer", "size"), PLACES, ids=str)
@pytest.mark.thinned(4)
def test_a_convolution_s_gradient_does_not_depend_on_the_record_s_place(
    layer: Convolution,
    size: tuple[int, ...],
    dtype: torch.dtype,
    onednn: bool,
    patches: bool,
    library: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Matrix products inside grouped convolutions lie anywhere: up to 78 C."""
    if patches:
        monkeypatch.setattr(convolution_module, "WORTH_PATCHES", 0)
    torch.manual_seed(0)
    layer = copy.deepcopy(layer).to(dtype)
    x = torch.randn(1, layer.in_channels, *size, dtype=dtype)
    g = torch.randn_like(layer(x)).detach()

    def formed(records: int, most: int) -> torch.Tensor:
        given, slopes = (t.expand(records, *t.shape[1:]).contiguous() for t in (x, g))
        weight = ConvolutionRule().per_sample_grads(layer, (given,), slopes)["weight"]
        weight.most = most
        if most == 0:
            return one_by_one(weight)
        weight.squared_norms([[records]])
        return weight.materialise(slice(0, records))

    with torch.backends.mkldnn.flags(enabled=onednn):
        singly = ConvolutionRule().per_sample_grads(layer, (x,), g)["weight"].singly
        for most in (1, 200) if singly is None else (0, 1, 200):  # public; 0: record by record
            alone = formed(1, most)
            assert all(
                torch.equal(row, alone[0])
                for records in (2, 7, 33)
                for row in formed(records, most)
            )


PATCHED = [
    (nn.Conv2d(3, 5, 3, padding=1), (9, 7)),
    (nn.Conv2d(6, 4, (3, 2), (2, 1), (0, 2), (1, 3)), (11, 12)),
    (nn.Conv2d(7, 5, 1, 2), (6, 5)),
    (nn.Conv1d(4, 6, 5, 3, 2, 2), (40,)),
    (nn.Conv3d(2, 3, (2, 1, 3), (1, 2, 1), (1, 0, 1)), (5, 6, 7)),
]


@pytest.mark.parametrize("library", ["oneDNN"], indirect=True)
@pytest.mark.parametrize("entries", [1, 500, 1 << 21])
@pytest.mark.parametrize(("layer", "size"), PATCHED, ids=str)
def test_kernels_by_patches_are_those_of_the_batch(
    layer: Convolution,
    size: tuple[int, ...],
    entries: int,
    library: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many patches are multiplied at once, and however images lie."""
    monkeypatch.setattr(convolution_module, "WORTH_PATCHES", 0)
    monkeypatch.setattr(kernels_module, "PATCH_ENTRIES", entries)
    torch.manual_seed(0)
    x = torch.randn(3, layer.in_channels, *size)
    g = torch.randn_like(layer(x)).detach()
    expected = formed_by_patches(layer, x, g, slice(0, 3), 3)
    turned = x.movedim(1, -1).contiguous().movedim(-1, 1)
    found = []
    for image, slopes in ((x, g), (turned, g.movedim(1, -1).contiguous().movedim(-1, 1))):
        weight = ConvolutionRule().per_sample_grads(layer, (image,), slopes)["weight"]
        assert isinstance(weight.singly, ByPatches)
        found.append(one_by_one(weight))
        torch.testing.assert_close(found[-1], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(*found)


def spied_convolutions(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """How many records they convolved at once."""
    seen = set()

    def spied(module: Convolution, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        seen.add(len(x))
        return grouped_weight_gradient(module, x, g)

    monkeypatch.setattr(convolution_module, "grouped_weight_gradient", spied)
    return seen


@pytest.mark.parametrize(("most", "together"), [(1, 8), (64, 16), (1000, 32)])
def test_records_are_convolved_together_by_public_numbers(
    most: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many whatever the batch, and few where passes are small: the rest of a convolution is
    zeros.
    """
    seen = spied_convolutions(monkeypatch)
    layer = nn.Conv2d(2, 3, 3)
    for records in (1, 8, 40):
        x, g = torch.randn(records, 2, 5, 5), torch.randn(records, 3, 3, 3)
        formed = formed_by_groups(layer, x, g, slice(0, records), most)
        torch.testing.assert_close(formed, formed_by_patches(layer, x, g, slice(0, records), most))
        assert seen == {together}


def test_records_one_by_one_are_convolved_a_few_at_once_whatever_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = spied_convolutions(monkeypatch)
    layer = nn.Conv2d(2, 3, 3)
    for records in (1, 8, 200):
        x, g = torch.randn(records, 2, 5, 5), torch.randn(records, 3, 3, 3)
        weight = ConvolutionRule().per_sample_grads(layer, (x,), g)["weight"]
        torch.testing.assert_close(
            one_by_one(weight), formed_by_patches(layer, x, g, slice(0, records), records)
        )
        assert isinstance(weight.singly, AFewAtOnce)
        assert seen == {weight.singly.few}


@pytest.mark.parametrize("kind", ["norm", "lstm", "rnn", "attention"])
def test_a_parameter_that_stands_twice_in_one_layer(kind: str) -> None:
    """Both uses count, with their cross terms."""
    torch.manual_seed(0)
    if kind == "norm":
        layer: nn.Module = nn.LayerNorm(5)
        layer.bias = layer.weight
    elif kind == "attention":
        layer = nn.MultiheadAttention(4, 2, kdim=5, vdim=5, batch_first=True)
        layer.v_proj_weight = layer.k_proj_weight
    else:
        layer = (nn.LSTM if kind == "lstm" else nn.RNN)(5, 5, batch_first=True)
        layer.bias_ih_l0 = layer.bias_hh_l0

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.query = layer, nn.Linear(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kind == "attention":
                return self.layer(self.query(x), x, x, need_weights=False)[0]
            return self.layer(x) if kind == "norm" else self.layer(x)[0]

    model = Twice()
    if kind != "attention":
        del model.query
    x, target = torch.randn(ROWS, 6, 5), torch.randn(ROWS)
    plain = torch.autograd.grad(record_loss(model(x), target).sum(), list(model.parameters()))
    sums = by_engine(model, x, target, Clipping(float("inf")), capacity=ROWS)
    assert joint_norm([a - b for a, b in zip(sums, plain, strict=True)]) <= 1e-5 * joint_norm(
        list(plain)
    )


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_what_a_recurrent_layer_returns_may_be_changed_in_place(kind: type[nn.RNNBase]) -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(5, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0].relu_()

    torch.manual_seed(0)
    model, x, target = Clipped(), torch.randn(ROWS, 6, 5), torch.randn(ROWS)
    reference = Clipped()
    reference.load_state_dict(model.state_dict())
    plain = torch.autograd.grad(
        record_loss(reference.layer(x)[0].relu(), target).sum(), list(reference.parameters())
    )
    sums = by_engine(model, x, target, Clipping(float("inf")), capacity=ROWS)
    assert joint_norm([a - b for a, b in zip(sums, plain, strict=True)]) <= 1e-5 * joint_norm(
        list(plain)
    )


@pytest.mark.parametrize(
    "shape", [(7, 33, 35), (6, 33, 35), (65, 131, 133), (129, 131, 133), (8, 32, 32)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_record_s_ghost_norm_does_not_depend_on_its_place(
    shape: tuple[int, int, int], transposed: bool
) -> None:
    """What cancels leaves rounding, on which the claim, and so the clip factor, then depends: 6.3
    C.
    """
    T, d, p = shape
    torch.manual_seed(0)
    a, g = torch.randn(1, T, d), torch.randn(1, T, p)
    half = T // 2
    a[:, half : 2 * half], g[:, half : 2 * half] = a[:, :half], -g[:, :half]
    alone, longest = ghost_squared_norms(as_from_a_loss(g, transposed), a)
    for records in (2, 5, 33):
        many = as_from_a_loss(g.repeat(records, 1, 1), transposed)
        together, each = ghost_squared_norms(many, a.repeat(records, 1, 1))
        assert torch.equal(together, alone.expand(records))
        assert torch.equal(each, longest.expand(records))
