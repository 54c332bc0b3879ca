"""nn.MultiheadAttention, which uses weights functionally, as a whole: projections under hooks."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.arithmetic.batch_invariant import record_products
from dpoptim.gradients.arithmetic.multiplication import linear_of_constants
from dpoptim.gradients.arithmetic.position_sums import sum_positions
from dpoptim.gradients.backward_pass import BackwardRecorder, RuleFunction
from dpoptim.gradients.layers.bare import for_records
from dpoptim.gradients.layers.linear import LinearRule
from dpoptim.gradients.layers.runner import Use, holder, tap
from dpoptim.gradients.layers.shared import SharedParameter
from dpoptim.gradients.per_sample.lazy import Lazy
from dpoptim.gradients.per_sample.per_sample_grads import Dense, PerSampleGrad
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter

ARGUMENTS = (
    "query",
    "key",
    "value",
    "key_padding_mask",
    "need_weights",
    "attn_mask",
    "average_attn_weights",
    "is_causal",
)


def is_attention(module: nn.Module) -> bool:
    """Whether the module is torch's attention, with the forward pass and parameters it has."""
    if (
        not isinstance(module, nn.MultiheadAttention)
        or type(module).forward is not nn.MultiheadAttention.forward
    ):
        return False
    return not list(module.out_proj.children()) and [
        name for name, _ in module.named_children()
    ] == ["out_proj"]


class AttentionLayer:
    """Runs ``nn.MultiheadAttention`` with the arguments of its ``forward``, all options too."""

    hooks_children = False

    def __init__(
        self, recorder: BackwardRecorder, module: nn.MultiheadAttention, label: str
    ) -> None:
        self.recorder, self.module, self.label = recorder, module, label
        names = (
            ["in_proj_weight"]
            if module._qkv_same_embed_dim
            else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
        )
        self.projection = holder({name: getattr(module, name) for name in (*names, "in_proj_bias")})
        self.extra = {name: holder({name: getattr(module, name)}) for name in ("bias_k", "bias_v")}

    def __call__(
        self, rows: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        inputs = [given[name] for name in ("query", "key", "value")]
        same = inputs[0] is inputs[1] is inputs[2]
        inputs = [self._records_first(x, rows) for x in (inputs[:1] if same else inputs)]
        q, k, v = self._project_together(inputs[0]) if same else self._project_apart(*inputs)
        output, weights = self._attend(q, k, v, given)
        output = RuleFunction.apply(
            self.recorder,
            LinearRule(),
            self.module.out_proj,
            f"{self.label}.out_proj",
            output,
            *self.module.out_proj.parameters(),
        )
        return (output if self.module.batch_first else output.transpose(0, 1)), weights

    def _records_first(self, x: Tensor, rows: int | None) -> Tensor:
        if x.is_nested or x.dim() != 3:
            raise PrivacyError(
                f"layer {self.label!r} (MultiheadAttention) got "
                f"{'a nested tensor' if x.is_nested else 'an input'} of {x.dim()} axes, expected "
                "three: records, positions and features. Fix: keep the batch axis, and build "
                "nn.TransformerEncoder with enable_nested_tensor=False."
            )
        if self.module.batch_first:
            return for_records(x, rows)
        return x.transpose(0, 1)

    # ---- projections ----------------------------------------------------------------------------

    def _project_together(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Self-attention: one linear map makes queries, keys and values."""
        module = self.module
        if not module._qkv_same_embed_dim:
            return self._project_apart(x, x, x)

        def per_sample_grads(saved: tuple[Tensor, ...], g: Tensor) -> Mapping[str, PerSampleGrad]:
            return {
                "in_proj_weight": SequenceOuter(g, saved[0]),
                "in_proj_bias": Dense(sum_positions(g)),
            }

        z = linear_of_constants(x, detached(module.in_proj_weight), detached(module.in_proj_bias))
        q, k, v = tap(
            Use(self.recorder, self.label, self.projection, per_sample_grads), z, x
        ).chunk(3, -1)
        return q, k, v

    def _project_apart(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One linear map each for queries, keys and values."""
        module = self.module
        if module._qkv_same_embed_dim:
            matrices = list(module.in_proj_weight.detach().chunk(3))
        else:
            matrices = [
                detached(w)
                for w in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            ]
        biases = (
            [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.detach().chunk(3)
        )
        inputs = (query, key, value)
        lengths = [x.shape[1] for x in inputs]

        def per_sample_grads(saved: tuple[Tensor, ...], g: Tensor) -> Mapping[str, PerSampleGrad]:
            gradients = g.split(lengths, 1)
            found: dict[str, PerSampleGrad] = {
                "in_proj_bias": Dense(torch.cat([sum_positions(part) for part in gradients], 1))
            }
            if not module._qkv_same_embed_dim:
                for name, left, x in zip(
                    ("q_proj_weight", "k_proj_weight", "v_proj_weight"),
                    gradients,
                    saved,
                    strict=True,
                ):
                    found[name] = SequenceOuter(left, x)
                return found

            def form(part: slice, most: int) -> Tensor:
                blocks = [
                    record_products(left[part], x[part])
                    for left, x in zip(gradients, saved, strict=True)
                ]
                return torch.cat(blocks, 1).flatten(1)

            entries = module.in_proj_weight.numel()
            return found | {"in_proj_weight": Lazy(form, len(g), entries, 2 * entries)}

        z = torch.cat(
            [
                linear_of_constants(x, w, b)
                for x, w, b in zip(inputs, matrices, biases, strict=True)
            ],
            1,
        )
        q, k, v = tap(
            Use(self.recorder, self.label, self.projection, per_sample_grads), z, *inputs
        ).split(lengths, 1)
        return q, k, v

    def _append(self, x: Tensor, name: str) -> Tensor:
        """``x`` (B, S, E) with the learned extra position at its end."""
        parameter = getattr(self.module, name)
        if parameter is None:
            return x
        use = Use(
            self.recorder,
            self.label,
            self.extra[name],
            lambda saved, g: {name: Dense(g.flatten(1))},
        )
        return torch.cat([x, tap(use, parameter.detach().expand(len(x), 1, -1))], 1)

    # ---- attention itself -----------------------------------------------------------------------

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Softmax attention of queries (B, L, E), keys, values (B, S, E); its weights if wanted."""
        module, wants_weights = self.module, given.get("need_weights", True)
        k, v = self._append(k, "bias_k"), self._append(v, "bias_v")
        q, k, v = (x.unflatten(2, (module.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        if module.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        mask, causal = self._whole_mask(q, k, given)
        dropout = module.dropout if module.training else 0.0
        if not wants_weights:
            output = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
            return output.transpose(1, 2).flatten(2), None
        scores = (q * math.sqrt(1 / q.shape[3])) @ k.transpose(2, 3)
        weights = F.dropout(
            (scores if mask is None else scores + mask).softmax(-1), dropout, dropout > 0
        )
        output = (weights @ v).transpose(1, 2).flatten(2)
        return output, weights.mean(1) if given.get("average_attn_weights", True) else weights

    def _whole_mask(
        self, q: Tensor, k: Tensor, given: Mapping[str, Any]
    ) -> tuple[Tensor | None, bool]:
        """The mask that is added to scores (B, heads, L, S), and whether later keys are masked."""
        padding = given.get("key_padding_mask")
        mask = self._mask(given.get("attn_mask"), q)
        if given.get("is_causal", False):
            if mask is None:
                raise ValueError(
                    "is_causal is a hint about attn_mask, so attn_mask must be given with it."
                )
            if padding is None and not given.get("need_weights", True):
                return None, True  # the kernel makes it
        masks = [
            mask,
            None if padding is None else additive_mask(padding, q.dtype)[:, None, None, :],
        ]
        # learned and zero positions are masked for nobody
        padded = [F.pad(m, (0, k.shape[2] - m.shape[3])) for m in masks if m is not None]
        return sum(padded[1:], start=padded[0]) if padded else None, False

    def _mask(self, mask: Any, q: Tensor) -> Tensor | None:
        """The attention mask to add: shape (B or 1, heads or 1, L, S)."""
        if mask is None:
            return None
        if isinstance(mask, SharedParameter):  # a learned bias
            return mask.per_record(len(q), 4)
        mask = additive_mask(mask, q.dtype)
        return (
            mask[None, None]
            if mask.dim() == 2
            else mask.unflatten(0, (len(q), self.module.num_heads))
        )


def detached(parameter: Tensor | None) -> Any:
    return None if parameter is None else parameter.detach()


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as torch adds it to scores: minus infinity where a boolean mask is true."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -math.inf)
