"""nn.MultiheadAttention and the transformer layers: outputs as torch gives them, sums as
micro-batches of one give them.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.layers.rewritten import attention
from support import mismatch

ROWS, L, S, E, HEADS = 7, 5, 3, 8, 2

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "extra-positions": {"add_bias_kv": True, "add_zero_attn": True},
    "zero-position": {"add_zero_attn": True},
    "other-widths": {"kdim": 6, "vdim": 4},
    "other-widths-extra": {"kdim": 6, "vdim": 4, "add_bias_kv": True},
}


def causal(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


SELF_CALLS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "weights": lambda pad: {},
    "no-weights": lambda pad: {"need_weights": False},
    "weights-of-heads": lambda pad: {"average_attn_weights": False},
    "float-mask": lambda pad: {"attn_mask": causal(L), "need_weights": False},
    "bool-mask": lambda pad: {"attn_mask": causal(L).isinf()},
    "causal": lambda pad: {"attn_mask": causal(L), "is_causal": True, "need_weights": False},
    "mask-per-head": lambda pad: {
        "attn_mask": causal(L).isinf().expand(len(pad) * HEADS, L, L),
        "need_weights": False,
    },
    "padding": lambda pad: {"key_padding_mask": pad, "need_weights": False},
    "padding-and-causal": lambda pad: {
        "key_padding_mask": torch.zeros(pad.shape).masked_fill(pad, -torch.inf),
        "attn_mask": causal(L),
        "is_causal": True,
    },
}


class Attention(nn.Module):
    """Attention between linear layers; the loss sees weights, too."""

    def __init__(self, call: str, *, cross: bool, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.call, self.cross, self.batch_first = call, cross, batch_first
        self.first = nn.Linear(E, E)
        self.key, self.value = (
            nn.Linear(E, options.get("kdim", E)),
            nn.Linear(E, options.get("vdim", E)),
        )
        self.attention = nn.MultiheadAttention(E, HEADS, batch_first=batch_first, **options)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        q = k = v = torch.tanh(self.first(x))
        if self.cross:
            k, v = self.key(x[:, :S]), self.value(x[:, :S])
        if not self.batch_first:
            q, k, v = (
                (q.transpose(0, 1),) * 3
                if not self.cross
                else (t.transpose(0, 1) for t in (q, k, v))
            )
        call = SELF_CALLS[self.call](pad)
        output, weights = self.attention(q, k, v, **call)
        output = output if self.batch_first else output.transpose(0, 1)
        return (
            output.flatten(1)
            if weights is None
            else torch.cat([output.flatten(1), weights.flatten(1)], 1)
        )


def hooked(model: nn.Module, *inputs: Tensor) -> Tensor:
    engine = Engine(model, Clipping(1.0), capacity=len(inputs[0]))
    engine.attach()
    try:
        return model(*inputs)
    finally:
        engine.detach()


def inputs(dtype: torch.dtype, length: int = L) -> tuple[Tensor, Tensor]:
    pad = torch.arange(length) >= torch.tensor([length, 2, 3, 1, length, 4, 2])[:, None]
    return torch.randn(ROWS, length, E, dtype=dtype), pad


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "time-first"])
@pytest.mark.parametrize("call", SELF_CALLS)
@pytest.mark.parametrize("option", [name for name in OPTIONS if "kdim" not in OPTIONS[name]])
@pytest.mark.thinned(2)
def test_self_attention(option: str, call: str, batch_first: bool) -> None:
    torch.manual_seed(0)
    model = Attention(call, cross=False, batch_first=batch_first, **OPTIONS[option])
    x, pad = inputs(torch.float32)
    torch.testing.assert_close(hooked(model, x, pad), model(x, pad), rtol=1e-5, atol=1e-6)
    assert mismatch(model, (x, pad, torch.randn(ROWS))) < 3e-5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "time-first"])
@pytest.mark.parametrize("call", ["weights", "no-weights"])
@pytest.mark.parametrize("option", OPTIONS)
def test_cross_attention(option: str, call: str, batch_first: bool) -> None:
    torch.manual_seed(0)
    model = Attention(call, cross=True, batch_first=batch_first, **OPTIONS[option]).double()
    x, pad = inputs(torch.float64)
    torch.testing.assert_close(hooked(model, x, pad), model(x, pad))
    assert mismatch(model, (x, pad, torch.randn(ROWS, dtype=torch.float64))) < 1e-7


class Encoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(E, HEADS, 16, dropout=0.0, batch_first=True, **options)
        self.layers, self.last = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(E, 3),
        )

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        return self.last(self.layers(x, src_key_padding_mask=pad)).masked_fill(pad[:, :, None], 0)


class EncoderDecoder(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.inner = nn.Transformer(E, HEADS, 1, 1, 16, dropout=0.0, batch_first=batch_first)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        source, target = (
            (x, x[:, :S]) if self.batch_first else (x.transpose(0, 1), x[:, :S].transpose(0, 1))
        )
        out = self.inner(source, target, tgt_mask=causal(S).to(x.dtype), tgt_is_causal=True)
        return out if self.batch_first else out.transpose(0, 1)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "build",
    [Encoder, lambda: Encoder(norm_first=True), lambda: EncoderDecoder(True)],
    ids=["encoder", "encoder-norm-first", "decoder"],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_transformer_layers(build: Callable[[], nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    model = build().train(training)
    x, pad = inputs(torch.float32)
    pad = pad.float().masked_fill(pad, -torch.inf).isinf()
    torch.testing.assert_close(hooked(model, x, pad), model(x, pad), rtol=1e-4, atol=1e-5)
    assert mismatch(model, (x, pad, torch.randn(ROWS))) < 3e-5


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_time_first_transformers_are_refused() -> None:
    """Their linear layers see positions where records should be."""
    model = EncoderDecoder(False)
    engine = Engine(model, Clipping(1.0), capacity=ROWS)
    engine.attach()
    engine.begin_microbatch(ROWS)
    with pytest.raises(PrivacyError, match="saw different numbers of rows"):
        model(*inputs(torch.float32)).sum().backward()


def test_evaluation_without_gradients_may_use_the_fused_path() -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    x, pad = inputs(torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(hooked(model, x, pad), model(x, pad), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused() -> None:
    """A frozen first layer in evaluation mode lets torch pack the batch without padding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, HEADS, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    model.layers[0].requires_grad_(False)
    x, pad = inputs(torch.float32)
    engine = Engine(model, Clipping(1.0), capacity=ROWS)
    engine.attach()
    with pytest.raises(PrivacyError, match="nested"):
        model(x, src_key_padding_mask=pad)


def test_inputs_without_a_record_axis_are_refused() -> None:
    model = nn.MultiheadAttention(E, HEADS)
    with pytest.raises(PrivacyError, match="keep the batch axis"):
        hooked(model, *[torch.randn(L, E)] * 3)


def test_frozen_parts_stay_out() -> None:
    torch.manual_seed(0)
    model = Attention("no-weights", cross=False, batch_first=True)
    model.attention.in_proj_weight.requires_grad_(False)
    model.attention.out_proj.bias.requires_grad_(False)
    x, pad = inputs(torch.float32)
    model.key.requires_grad_(False)
    model.value.requires_grad_(False)
    assert mismatch(model, (x, pad, torch.randn(ROWS))) < 3e-5


class Pooling(nn.Module):
    """A learned query and a learned bias on the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.bias = nn.Parameter(torch.randn(1, 1, E)), nn.Parameter(torch.randn(1, L))
        self.first, self.attention = (
            nn.Linear(E, E),
            nn.MultiheadAttention(E, HEADS, batch_first=True),
        )

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        h = self.first(x)
        return self.attention(
            self.query.expand(len(x), -1, -1), h, h, attn_mask=self.bias, need_weights=False
        )[0]


def test_learned_queries_and_biases() -> None:
    torch.manual_seed(0)
    x, pad = inputs(torch.float32)
    assert mismatch(Pooling(), (x, pad, torch.randn(ROWS))) < 3e-5


@pytest.mark.parametrize("weights", [True, False])
def test_a_record_that_sees_nothing_is_what_torchs_function_makes_of_it(weights: bool) -> None:
    q, joint, out = torch.randn(5, 3, 8), torch.randn(24, 8), torch.randn(8, 8)
    hidden = torch.zeros(3, 5, dtype=torch.bool)
    hidden[0], hidden[1, 3:] = True, True
    args = (q, q, q, 8, 2, joint, torch.randn(24), None, None, False, 0.0, out, torch.randn(8))
    options = {"key_padding_mask": hidden, "need_weights": weights}
    call: Any = SimpleNamespace(name="multi_head_attention_forward", args=args, kwargs=options)
    found, expected = attention(call), F.multi_head_attention_forward(*args, **options)
    assert found is not None
    torch.testing.assert_close(found[0], expected[0], equal_nan=True)
