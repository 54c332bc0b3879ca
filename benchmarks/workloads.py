"""What is timed: models that people train, each with a batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH = 8192, 128


@dataclass(frozen=True)
class Workload:
    """A model, its batch and its loss.

    Attributes:
        loss: of outputs and targets, the mean over records of one term each; also per record,
            shape (B,), with ``reduction="none"``.
        looked_up: builds the same model without a bag, for peers that have no rule for bags.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    targets: Callable[[], Tensor]
    loss: Callable[[Tensor, Tensor, str], Tensor]
    huge_table: bool = False
    looked_up: Callable[[], nn.Module] | None = None

    def data(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return self.inputs(), self.targets()


def classes(output: Tensor, target: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(output, target, reduction=reduction)


def tokens(output: Tensor, target: Tensor, reduction: str) -> Tensor:
    losses = F.cross_entropy(output.transpose(1, 2), target, reduction="none").mean(1)
    return losses.mean() if reduction == "mean" else losses


class Attention(nn.Module):
    """Self-attention; with fewer heads for keys and values (grouped queries) and rotary positions
    where asked.
    """

    def __init__(
        self, width: int, heads: int, key_heads: int, *, causal: bool, rotary: bool, bias: bool
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.causal, self.rotary = heads, key_heads, causal, rotary
        self.size = width // heads
        self.queries = nn.Linear(width, width, bias=bias)
        self.keys_and_values = nn.Linear(width, 2 * key_heads * self.size, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        B, T, width = x.shape
        q = self.queries(x).view(B, T, self.heads, self.size).transpose(1, 2)
        k, v = (
            self.keys_and_values(x).view(B, T, 2, self.key_heads, self.size).permute(2, 0, 3, 1, 4)
        )
        if self.rotary:
            q, k = rotated(q), rotated(k)
        if self.key_heads < self.heads:
            k, v = (part.repeat_interleave(self.heads // self.key_heads, 1) for part in (k, v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(h.transpose(1, 2).reshape(B, T, width))


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    steps, places = (torch.arange(count, device=x.device) for count in (half, x.shape[-2]))
    angles = torch.outer(places, 10_000.0 ** -(steps / half))
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    """Pre-norm: attention, then two layers."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, heads, causal=causal, rotary=False, bias=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


class LlamaBlock(nn.Module):
    """Pre-norm with RMSNorm, grouped queries, rotary positions and a gated unit."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, key_heads, causal=True, rotary=True, bias=False)
        self.gate, self.up = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(width, hidden, bias=False),
        )
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LanguageModel(nn.Module):
    def __init__(
        self,
        blocks: list[nn.Module],
        norm: nn.Module,
        width: int,
        *,
        vocabulary: int,
        places: int | None,
        tied: bool,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = None if places is None else nn.Embedding(places, width)
        self.blocks, self.norm = nn.ModuleList(blocks), norm
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        if self.places is not None:
            h = h + self.places(torch.arange(x.shape[1], device=x.device).repeat(len(x), 1))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def gpt(
    width: int = 256,
    depth: int = 4,
    heads: int = 4,
    *,
    vocabulary: int = VOCABULARY,
    length: int = LENGTH,
    tied: bool = False,
) -> nn.Module:
    blocks: list[nn.Module] = [Block(width, heads, causal=True) for _ in range(depth)]
    return LanguageModel(
        blocks, nn.LayerNorm(width), width, vocabulary=vocabulary, places=length, tied=tied
    )


def llama(
    width: int = 256,
    depth: int = 4,
    heads: int = 8,
    key_heads: int = 2,
    *,
    hidden: int = 682,
    vocabulary: int = VOCABULARY,
    tied: bool = False,
) -> nn.Module:
    blocks: list[nn.Module] = [LlamaBlock(width, heads, key_heads, hidden) for _ in range(depth)]
    norm = nn.RMSNorm(width)
    return LanguageModel(blocks, norm, width, vocabulary=vocabulary, places=None, tied=tied)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank update (LoRA, rank 8)."""

    def __init__(self, linear: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        narrow = torch.is_autocast_enabled(x.device.type)
        wide = x if narrow else x.to(self.down.weight.dtype)  # which a model may be stored below
        return self.linear(x) + self.up(self.down(wide)).to(x.dtype)


def adapted(model: nn.Module) -> nn.Module:
    """The model, frozen, with low-rank updates of all linear layers inside of blocks."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(module, Attention | Block | LlamaBlock) and isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child))
    return model


class VisionTransformer(nn.Module):
    """On so many patches of so many numbers each; 6 layers of width 192 on 64 of 48 unless told
    otherwise.
    """

    def __init__(
        self,
        width: int = 192,
        depth: int = 6,
        heads: int = 3,
        *,
        patches: int = 64,
        numbers: int = 48,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(numbers, width)
        self.places = nn.Embedding(patches, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.places(torch.arange(x.shape[1], device=x.device).repeat(len(x), 1))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean(1))


class FeedForward(nn.Module):
    """Two layers with the GELU of GPT-2, written out as there: something for torch.compile to
    fuse.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return x + self.down(h)


class FeedForwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = (
            nn.Sequential(*(FeedForward(128) for _ in range(3))),
            nn.Linear(128, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean(1))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)])
        self.short = (
            nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            if stride > 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(h)) + self.short(x))


def resnet(width: int = 32) -> nn.Module:
    """A small ResNet with group normalisation for 3 x 32 x 32."""
    stages = [
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 4 * width, 2),
    ]
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.GroupNorm(8, width), nn.ReLU()]
    return nn.Sequential(
        *stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)
    )


class RecurrentClassifier(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.words, self.steps, self.head = (
            nn.Embedding(5000, 64),
            kind(64, 128, batch_first=True),
            nn.Linear(128, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.steps(self.words(x))[0][:, -1])


class Bag(nn.Module):
    """A bag of words from a vocabulary of a million."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(1_000_000, 16, mode="mean"), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


class LookedUp(nn.Module):
    """`Bag` with a plain table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(1_000_000, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(1))


def mnist_net() -> nn.Module:
    """Opacus' MNIST example."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten()),
        *(nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def image(batch: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(batch, *shape)


def labels(batch: int, count: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, count, (batch, *shape))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


words = labels(16, VOCABULARY, LENGTH)
WORKLOADS = {
    work.name: work
    for work in (
        Workload(
            "softmax 785-10", lambda: nn.Linear(784, 10), image(500, 784), labels(500, 10), classes
        ),
        Workload(
            "softmax 513-257",
            lambda: nn.Linear(512, 257),
            image(500, 512),
            labels(500, 257),
            classes,
        ),
        Workload("MLP 784-256-10", mlp, image(256, 784), labels(256, 10), classes),
        Workload("small CNN", mnist_net, image(256, 1, 28, 28), labels(256, 10), classes),
        Workload("GPT", gpt, words, words, tokens),
        Workload(
            "small GPT",
            lambda: gpt(64, vocabulary=500, length=32),
            labels(32, 500, 32),
            labels(32, 500, 32),
            tokens,
        ),
        Workload("GPT, tied", lambda: gpt(tied=True), words, words, tokens),
        Workload("GPT, LoRA", lambda: adapted(gpt()), words, words, tokens),
        Workload("Llama-like", llama, words, words, tokens),
        Workload("ViT", VisionTransformer, image(64, 64, 48), labels(64, 10), classes),
        Workload("GELU written out", FeedForwards, image(64, 64, 128), labels(64, 10), classes),
        Workload("ResNet, GroupNorm", resnet, image(64, 3, 32, 32), labels(64, 10), classes),
        Workload("ResNet, wide", lambda: resnet(64), image(64, 3, 32, 32), labels(64, 10), classes),
        *(
            Workload(
                kind.__name__,
                partial(RecurrentClassifier, kind),
                labels(64, 5000, 50),
                labels(64, 2),
                classes,
            )
            for kind in (nn.LSTM, nn.GRU)
        ),
        Workload(
            "embedding bag",
            Bag,
            labels(4096, 1_000_000, 20),
            labels(4096, 10),
            classes,
            huge_table=True,
            looked_up=LookedUp,
        ),
    )
}
