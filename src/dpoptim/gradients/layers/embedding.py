"""nn.Embedding and nn.EmbeddingBag: the gradient touches only the rows that a record looked up."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.backward_pass import BackwardRecorder
from dpoptim.gradients.layers.rule import LayerRule, PerSampleGrads, Saved
from dpoptim.gradients.layers.runner import Use, holder, tap
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad
from dpoptim.gradients.per_sample.sparse import Rows, SparseOuter


def refuse_options(module: nn.Embedding | nn.EmbeddingBag, name: str) -> None:
    for option, reason in (
        ("max_norm", "it rewrites the table from private inputs during the forward pass"),
        ("scale_grad_by_freq", "it makes a record's gradient depend on the rest of the batch"),
        (
            "sparse",
            "a sparse gradient shows which rows were looked up, and noise must reach every row",
        ),
    ):
        if getattr(module, option):
            raise PrivacyError(
                f"layer {name!r} ({type(module).__name__}) has {option}={getattr(module, option)}: "
                f"{reason}. Fix: build it without {option}."
            )


class EmbeddingRule(LayerRule[nn.Embedding]):
    def check(self, module: nn.Embedding, name: str) -> None:
        refuse_options(module, name)

    def axes(self, module: nn.Embedding) -> int:
        return 1

    def prepare(self, module: nn.Embedding, name: str, x: Tensor, rows: int | None) -> Tensor:
        x = super().prepare(module, name, x, rows)
        if x.dim() >= 2 and x.shape[0] == 1 and rows is not None and rows > 1:
            # Position indices shared by all records: every record gets its own lookup, hence its
            # own gradient.
            return x.expand(rows, *x.shape[1:])
        return x

    def forward(self, module: nn.Embedding, x: Tensor) -> tuple[Tensor, Saved]:
        return F.embedding(x, module.weight, module.padding_idx), (x,)

    def input_gradient(self, module: nn.Embedding, saved: Saved, g: Tensor) -> None:
        return None  # indices have no gradient

    def per_sample_grads(self, module: nn.Embedding, saved: Saved, g: Tensor) -> PerSampleGrads:
        index = saved[0].reshape(g.shape[0], -1)
        g = g.reshape(index.shape[0], index.shape[1], module.embedding_dim)
        if module.padding_idx is not None:
            zero = torch.zeros((), dtype=g.dtype, device=g.device)
            g = torch.where((index == module.padding_idx)[:, :, None], zero, g)
        return {"weight": Rows(index, g, module.num_embeddings)}


def is_embedding_bag(module: nn.Module) -> bool:
    own = isinstance(module, nn.EmbeddingBag) and type(module).forward is nn.EmbeddingBag.forward
    return own and "weight" in module._parameters


class EmbeddingBagLayer:
    """Runs ``nn.EmbeddingBag`` in all its modes, on a 2-D input or on bags given by offsets.

    Weights of looked-up rows (``per_sample_weights``) count as data: they may not depend on
    trainable parameters.
    """

    hooks_children = False

    def __init__(self, recorder: BackwardRecorder, module: nn.EmbeddingBag, label: str) -> None:
        refuse_options(module, label)
        self.recorder, self.module, self.label = recorder, module, label
        self.held = holder({"weight": module.weight})

    def __call__(self, rows: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        module = self.module
        given = dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)) | kwargs
        index, weights = given["input"], given.get("per_sample_weights")
        if weights is not None and weights.requires_grad:
            raise PrivacyError(
                f"layer {self.label!r} (EmbeddingBag) got per_sample_weights that are trained. "
                "Fix: look the rows up with nn.Embedding and sum them, weighted, over the second "
                "axis."
            )
        flat, offsets = self._bags(index, given.get("offsets"))
        weights = None if weights is None else weights.reshape(-1)
        mode = ("sum", "mean", "max").index(module.mode)
        table = module.weight.detach()
        output, _, sizes, largest = torch.embedding_bag(
            table,
            flat,
            offsets,
            False,
            mode,
            False,
            weights,
            module.include_last_offset,
            module.padding_idx,
        )
        bags = len(output)
        last = offsets.new_tensor([] if module.include_last_offset else [len(flat)])
        ends = torch.cat([offsets[1:], last])

        def per_sample_grads(saved: tuple[Tensor, ...], g: Tensor) -> Mapping[str, PerSampleGrad]:
            if module.mode == "max":
                return {"weight": self._largest(largest, sizes, g)}
            looked_up, starts, ends = saved[:3]
            flat = looked_up[starts[0] : ends[-1]]
            record = torch.arange(bags, device=flat.device).repeat_interleave(ends - starts)
            counted = (
                torch.ones_like(flat, dtype=torch.bool)
                if module.padding_idx is None
                else flat != module.padding_idx
            )
            weight = counted.to(torch.float64)
            if module.mode == "mean":
                counts = torch.zeros(bags, dtype=torch.float64, device=flat.device).index_add_(
                    0, record, weight
                )
                weight = weight / counts[record].clamp(min=1)
            elif len(saved) > 3:
                weight = weight * saved[3][starts[0] : ends[-1]].double()
            return {"weight": SparseOuter.of(record, flat, weight, g, module.num_embeddings)}

        use = Use(self.recorder, self.label, self.held, per_sample_grads)
        return tap(use, output, flat, offsets[:bags], ends, *([] if weights is None else [weights]))

    def _bags(self, index: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        """All indices in one row, and where each bag starts."""
        if index.dim() == 2:
            if offsets is not None:
                raise ValueError(
                    f"layer {self.label!r}: offsets must be None when the input is 2-D; each row "
                    "is a bag."
                )
            bags = index.shape[0] + self.module.include_last_offset
            return index.reshape(-1), torch.arange(bags, device=index.device) * index.shape[1]
        if index.dim() != 1 or offsets is None:
            raise ValueError(
                f"layer {self.label!r} (EmbeddingBag) takes a 2-D input, or a 1-D input with "
                f"offsets, got {index.dim()} axes{'' if offsets is None else ' with offsets'}."
            )
        return index, offsets

    def _largest(self, largest: Tensor, sizes: Tensor, g: Tensor) -> Rows:
        """Mode max: entry k of the gradient goes to the row that had the largest entry k."""
        d = self.module.embedding_dim
        column = torch.arange(d, device=g.device)
        g = torch.where((sizes > 0)[:, None], g, torch.zeros((), dtype=g.dtype, device=g.device))
        return Rows(
            largest.clamp(min=0).long() * d + column, g[:, :, None], self.module.num_embeddings * d
        )
