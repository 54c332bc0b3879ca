"""nn.Embedding: the gradient touches only the rows that a record looked up."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.layers.rule import LayerRule, PerSampleGrads, Saved
from dpoptim.gradients.per_sample.sparse import Rows


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

    def prepare(self, module: nn.Embedding, name: str, x: Tensor, rows: int | None) -> Tensor:
        if x.dim() == 0:
            raise PrivacyError(
                f"layer {name!r} (Embedding) got a single index without a record axis. Fix: keep "
                "the batch axis first."
            )
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
