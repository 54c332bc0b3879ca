"""Small networks of many families, written the usual way: what they are made of, and the shape of
a record.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

T, D = 4, 6  # positions and features of most sequences
Shape = Sequence[int]
Build = Callable[[], nn.Module]


class Apply(nn.Module):
    """Layers, and what a forward pass does with them: ``use(self, x)``."""

    def __init__(
        self, use: Callable[[Any, Tensor], Any], **layers: nn.Module | nn.Parameter
    ) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.use = use

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        return self.use(self, x, *others)


def net(*layers: nn.Module) -> Build:
    return lambda: nn.Sequential(*layers)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(7, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.down(x))
        return self.out(torch.cat([x, self.up(h + self.middle(h))], 1))


class Experts(nn.Module):
    """A mixture of experts; every token takes the best of them, weighed by a gate."""

    def __init__(self, *, gathered: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 3), nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.gathered = gathered

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        best = weights.argmax(-1)
        if not self.gathered:
            return sum(
                (weights[..., i] * (best == i))[..., None] * e(x)
                for i, e in enumerate(self.experts)
            )  # type: ignore[return-value]
        flat, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(best.flatten() == i)
            out = out.index_add(0, rows, expert(flat[rows]) * weights.flatten(0, 1)[rows, i, None])
        return out.view_as(x)


class Graph(nn.Module):
    """Message passing on dense graphs: features in front of the adjacency matrix of each
    record.
    """

    def __init__(self, *, attention: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)
        self.score = nn.Parameter(torch.randn(2 * D)) if attention else None

    def forward(self, x: Tensor) -> Tensor:
        nodes, edges = x[..., :D], x[..., D:].sigmoid()
        h = self.first(nodes)
        if self.score is not None:
            pairs = torch.cat(
                [h[:, :, None].expand(-1, -1, T, -1), h[:, None].expand(-1, T, -1, -1)], -1
            )
            edges = edges * (pairs @ self.score).softmax(-1)
        return self.second(F.relu(edges @ h)).mean(1)


class VQ(nn.Module):
    """A vector-quantised autoencoder with a straight-through gradient, its codes trained by the
    loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes, self.decode = nn.Linear(D, D), nn.Embedding(7, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        z = self.encode(x)
        nearest = (z[..., None, :] - self.codes.weight.detach()).square().sum(-1).argmin(-1)
        q = self.codes(nearest)
        return self.decode(z + (q - z).detach()), (q - z.detach()).square().mean(-1)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        mean, spread = self.encode(x).chunk(2, -1)
        return self.decode(mean + spread.tanh().exp() * torch.randn_like(mean)), mean


class Diffusion(nn.Module):
    """Draws a time and noise for each record, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.net = (
            nn.Embedding(10, D),
            nn.Sequential(nn.Linear(D, 8), nn.SiLU(), nn.Linear(8, D)),
        )

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 10, (x.shape[0],), device=x.device)
        noisy = x + torch.randn_like(x) * (t[:, None] / 10)
        return self.net(noisy + self.time(t))


class CLIP(nn.Module):
    """Two towers; a record's image and text are compared with each other only."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(D, 5), nn.Linear(D, 5)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.normalize(self.image(x[:, 0]), dim=-1), F.normalize(self.text(x[:, 1]), dim=-1)
        return self.scale.exp() * (a * b).sum(-1, keepdim=True)


class DeepSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.whole = nn.Linear(D, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(F.relu(self.each(x)).amax(1))


class Hyper(nn.Module):
    """One network makes the weights of another, for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.head = nn.Linear(D, D * D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.maker(x).view(-1, D, D) @ x[..., None])[..., 0])


class KAN(nn.Module):
    """Edges with learned functions: radial bases, a coefficient each."""

    def __init__(self) -> None:
        super().__init__()
        self.coefficients = parameter(D, 3, 5)
        self.register_buffer("centres", torch.linspace(-2, 2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(
            "bdk,dok->bo", torch.exp(-((x[..., None] - self.centres) ** 2)), self.coefficients
        )


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels, self.norm = nn.Linear(T, T), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm(x))


class SSM(nn.Module):
    """A diagonal state space model, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.inp, self.out = parameter(8), nn.Linear(D, 8), nn.Linear(8, D)

    def forward(self, x: Tensor) -> Tensor:
        h, outs = torch.zeros(x.shape[0], 8, dtype=x.dtype), []
        for step in self.inp(x).unbind(1):
            h = h * self.decay.sigmoid() + step
            outs.append(self.out(h))
        return torch.stack(outs, 1)


class Router(nn.Module):
    """A linear layer of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class InARow(nn.Module):
    """Hands the tokens of all records in a row to a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class AllExperts(nn.Module):
    """Several layers at once, added up, in an operation that tells no record from another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.act = parameter(3, D, D), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(torch.einsum("sd,edp->sp", x, self.weight))


class Offset(nn.Embedding):
    """A table of positions with a forward pass of its own, as Blenderbot's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1)


class Decoder(nn.Module):
    """A language model with learned positions, of one way or another."""

    def __init__(
        self,
        positions: Callable[[Tensor], Tensor],
        *,
        tied: bool = False,
        table: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, D), table or nn.Embedding(9, D)
        self.block = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(D, 11, bias=False)
        self.positions = positions
        if tied:
            self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], dtype=self.token.weight.dtype
        )
        return self.head(self.block(self.token(x) + self.position(self.positions(x)), mask))


class Repeated(Decoder):
    def forward(self, x: Tensor) -> Tensor:
        positions = self.position(torch.arange(x.shape[1])[None]).repeat(x.shape[0], 1, 1)
        return self.head(self.block(self.token(x) + positions))


class Windows(nn.Module):
    """Attention in shifted windows, which are folded into the batch, with a bias for each offset
    and a scale for each head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.bias = linear(), linear(), parameter(3, 2)
        self.scale, self.index = parameter(2, 1, 1), torch.tensor([[1, 0], [2, 1]])

    def forward(self, x: Tensor) -> Tensor:
        folded = x.roll(-1, 1).view(-1, 2, D)  # windows of two positions
        q, k, v = (
            y.view(-1, 2, 2, D // 2).transpose(1, 2)
            for y in (self.q(folded), self.k(folded), folded)
        )
        bias = self.bias[self.index.view(-1)].view(2, 2, 2).permute(2, 0, 1)
        weights = q @ k.transpose(2, 3) * self.scale.exp() + 16 * bias[None].sigmoid()
        mixed = torch.softmax(weights, -1) @ v
        return mixed.transpose(1, 2).reshape_as(x).roll(1, 1)


class Disentangled(nn.Module):
    """Attention to positions in a table that is read outside of its layer, through the layer that
    also sees the records, copied for each record and head.
    """

    def __init__(self, *, by_layer: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, D), nn.Embedding(2 * T, D)
        self.norm, self.key, self.by_layer = nn.LayerNorm(D), linear(), by_layer
        self.drop = nn.Dropout(0.3)

    def heads(self, x: Tensor) -> Tensor:
        return (
            x.unflatten(-1, (2, -1)).permute(0, 2, 1, 3).contiguous().view(-1, x.shape[1], D // 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        table = self.drop(self.norm(self.places.weight))[: 2 * x.shape[1]].unsqueeze(0)
        places = self.heads(self.key(table))
        if self.by_layer:
            places /= 2
            scores = self.heads(h) @ places.repeat(len(x), 1, 1).transpose(1, 2)
        else:
            scores = torch.bmm(self.heads(h), places.repeat(len(x), 1, 1).transpose(-1, -2))
        index = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1]) + x.shape[1]
        scores = scores.gather(-1, index.expand(len(scores), -1, -1))
        mixed = torch.softmax(scores + torch.bmm(self.heads(self.key(h)), self.heads(h).mT), -1)
        return h + (mixed @ self.heads(h)).view(len(x), 2, x.shape[1], -1).transpose(1, 2).flatten(
            2
        )


class Queries(nn.Module):
    """Learnt queries of a table, repeated for each record beside zeros, as DETR's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.query, self.head = nn.Embedding(3, D), linear(), linear()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        places = self.table.weight.unsqueeze(0).repeat(len(x), 1, 1)
        found = torch.zeros_like(places)
        for _ in range(2):
            query = self.query(found + places)
            found = found + self.attention(query, x, x)[0]
        return self.head(found)


class Clamped(nn.Module):
    """Reads a layer's weight outside of the layer, and clamps it first, as Gemma 3n does."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.linear(x, self.mix.weight.clamp(-0.2, 0.2), self.mix.bias)
        return self.head(mixed.tanh()) @ self.head.weight.T


class Slots(nn.Module):
    """Slots with a learnt first state that a recurrent cell updates, all slots in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spread = parameter(1, 1, D), parameter(1, 3, D)
        self.query, self.cell, self.norm = linear(), nn.GRUCell(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        slots = (self.first + self.spread).expand(len(x), -1, -1)
        for _ in range(2):
            share = (x @ self.query(self.norm(slots)).mT).softmax(-1)
            update = (share / share.sum(1, keepdim=True)).mT @ x
            slots = self.cell(update.reshape(-1, D), slots.reshape(-1, D)).view(len(x), 3, D)
        return slots


class FunctionalAttention(nn.Module):
    """Attention by torch's function of several layers' parameters, positions first, as in WavLM."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (linear() for _ in range(4))
        self.bias = parameter(T, T)

    def forward(self, x: Tensor) -> Any:
        x, later = x.transpose(0, 1), torch.ones(T, T, dtype=torch.bool).triu(1)
        biases = torch.cat([self.query.bias, self.key.bias, self.value.bias])
        for mask in (self.bias, later):
            x, weights = F.multi_head_attention_forward(
                *(x, x, x, D, 2, None, biases, None, None, False, 0.0),
                *(self.out.weight, self.out.bias),
                attn_mask=mask,
                use_separate_proj_weight=True,
                q_proj_weight=self.query.weight,
                k_proj_weight=self.key.weight,
                v_proj_weight=self.value.weight,
            )
        return x.transpose(0, 1), weights


class CategoriesInFloats(nn.Module):
    """A table of floats, of which some columns are categories, as in DeepCTR."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tables = linear(), nn.ModuleList(nn.Embedding(3, 2) for _ in range(2))
        self.head = nn.Linear(2 * 2 + D, 1)

    def forward(self, x: Tensor) -> Tensor:
        looked_up = [table(x[:, i].long()) for i, table in enumerate(self.tables)]
        return self.head(torch.cat([*looked_up, self.first(x).relu()], 1))


class Reader(nn.Module):
    """Columns of an image read in turn, positions first in what is returned, as CTC takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Conv2d(1, 2, 3, padding=1)
        self.read, self.head = nn.LSTM(2 * D, 4, bidirectional=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.columns(x).relu().flatten(1, 2).permute(2, 0, 1)
        return self.head(self.read(columns)[0]).log_softmax(-1)


class Pointers(nn.Module):
    """Points at positions in turn: a recurrent cell with a learnt first input."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.cell = nn.LSTM(D, D, batch_first=True), nn.LSTMCell(D, D)
        self.start, self.key = parameter(D), linear()

    def forward(self, x: Tensor) -> Tensor:
        seen, (h, c) = self.read(x)
        state, given, found = (h[0], c[0]), self.start.expand(len(x), -1), []
        for _ in range(2):
            state = self.cell(given, state)
            found.append((self.key(seen) * state[0][:, None]).sum(-1).log_softmax(-1))
            given = x[torch.arange(len(x)), found[-1].argmax(-1)]
        return torch.stack(found, 1)


class Transitions(nn.Module):
    """A conditional random field's scores of the labels that records bring."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.head = nn.LSTM(D, 4, batch_first=True), nn.Linear(4, 3)
        self.start, self.step = parameter(3), parameter(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores, labels = self.head(self.read(x)[0]), x[..., :3].argmax(-1)
        alpha = self.start + scores[:, 0]
        for t in range(1, T):
            alpha = (alpha[:, :, None] + self.step).logsumexp(1) + scores[:, t]
        own = self.start[labels[:, 0]] + self.step[labels[:, :-1], labels[:, 1:]].sum(1)
        return alpha.logsumexp(1) - own - scores.gather(2, labels[..., None]).sum((1, 2))


class Relative(nn.Module):
    """Attention of Transformer-XL: keys of positions meet queries in an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.place, self.content = linear(), linear(), parameter(D)
        self.register_buffer("waves", torch.linspace(-1, 1, T * D).view(T, D))

    def forward(self, x: Tensor) -> Tensor:
        places = self.place(self.waves)
        scores = torch.einsum("bid,jd->bij", self.query(x) + self.content, places)
        return torch.einsum("bij,bjd->bid", scores.softmax(-1), x)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(D, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((x.shape[0],), T)
        out, _ = self.lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.head(pad_packed_sequence(out, batch_first=True)[0])


def recurrent(layer: nn.RNNBase, width: int) -> nn.Module:
    return Apply(lambda m, x: m.head(m.layer(x)[0]), layer=layer, head=nn.Linear(width, 2))


def attention(**options: Any) -> nn.Module:
    layer = nn.MultiheadAttention(D, 2, batch_first=True, **options)
    return Apply(lambda m, x: m.head(m.layer(x, x, x)[0]), layer=layer, head=nn.Linear(D, 2))


def two(*shape: int) -> nn.Parameter:
    return parameter(*shape)


linear = lambda: nn.Linear(D, D)  # noqa: E731

# Name: how it is built, and the shape of a record's input; a number in its place is a vocabulary
# for T tokens.
NETWORKS: dict[str, tuple[Build, Shape | int]] = {
    "logistic regression": (lambda: nn.Linear(D, 3), (D,)),
    "mlp": (lambda: nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, 3)), (D,)),
    "mlp with dropout": (
        lambda: nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 3)),
        (D,),
    ),
    "residual mlp": (
        lambda: nn.Sequential(Residual(nn.Sequential(linear(), nn.Tanh())), nn.Linear(D, 3)),
        (D,),
    ),
    "selu mlp": (
        lambda: nn.Sequential(nn.Linear(D, 8), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(8, 3)),
        (D,),
    ),
    "prelu mlp": (lambda: nn.Sequential(nn.Linear(D, 8), nn.PReLU(8), nn.Linear(8, 3)), (D,)),
    "maxout": (lambda: Apply(lambda m, x: m.l(x).view(-1, 4, 2).amax(-1), l=nn.Linear(D, 8)), (D,)),
    "gated linear units": (lambda: nn.Sequential(nn.Linear(D, 8), nn.GLU(), nn.Linear(4, 3)), (D,)),
    "highway": (
        lambda: Apply(
            lambda m, x: m.t(x).sigmoid() * m.h(x).tanh() + (1 - m.t(x).sigmoid()) * x,
            t=linear(),
            h=linear(),
        ),
        (D,),
    ),
    "siamese": (
        lambda: Apply(lambda m, x: (m.e(x[:, 0]) - m.e(x[:, 1])).square(), e=linear()),
        (2, D),
    ),
    "autoencoder": (lambda: nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, D)), (D,)),
    "tied autoencoder": (
        lambda: Apply(lambda m, x: F.linear(torch.tanh(m.e(x)), m.e.weight.t()), e=nn.Linear(D, 3)),
        (D,),
    ),
    "vae": (VAE, (D,)),
    "vq-vae": (VQ, (T, D)),
    "diffusion": (Diffusion, (D,)),
    "normalising flow": (
        lambda: Apply(
            lambda m, x: (
                torch.cat([x[:, :3], x[:, 3:] * m.s(x[:, :3]).tanh().exp()], 1) * m.g.exp() + m.b
            ),
            s=nn.Linear(3, 3),
            g=parameter(D),
            b=parameter(D),
        ),
        (D,),
    ),
    "deep set": (DeepSet, (T, D)),
    "hypernetwork": (Hyper, (D,)),
    "kolmogorov-arnold": (KAN, (D,)),
    "bilinear": (lambda: Apply(lambda m, x: m.b(x, x.sin()), b=nn.Bilinear(D, D, 3)), (D,)),
    "factorisation machine": (
        lambda: Apply(
            lambda m, x: m.l(x) + ((x @ m.v).square() - x.square() @ m.v.square()),
            l=nn.Linear(D, 3),
            v=two(D, 3),
        ),
        (D,),
    ),
    "mixture of experts, dense": (lambda: Experts(gathered=False), (T, D)),
    "mixture of experts, gathered": (lambda: Experts(gathered=True), (T, D)),
    "graph convolution": (lambda: Graph(attention=False), (T, D + T)),
    "graph attention": (lambda: Graph(attention=True), (T, D + T)),
    "clip, each record by itself": (CLIP, (2, D)),
    "physics-informed": (lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), (2,)),
    "fourier features": (
        lambda: Apply(
            lambda m, x: m.h(torch.cat([(x @ m.w).sin(), (x @ m.w).cos()], -1)),
            w=two(D, 4),
            h=nn.Linear(8, 2),
        ),
        (D,),
    ),
    "spectral norm": (
        lambda: nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(D, D)), nn.ReLU(), nn.Linear(D, 2)
        ),
        (D,),
    ),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(linear()), nn.Tanh(), nn.Linear(D, 2)),
        (D,),
    ),
    "weight norm by a hook": (
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(D, D)), nn.Tanh(), nn.Linear(D, 2)),
        (D,),
    ),
    "spectral norm by a hook": (
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(D, D)), nn.ReLU(), nn.Linear(D, 2)),
        (D,),
    ),
    "orthogonal": (
        lambda: nn.Sequential(parametrizations.orthogonal(linear()), nn.Tanh(), nn.Linear(D, 2)),
        (D,),
    ),
    "dropout in a layer of one's own": (
        lambda: Apply(
            lambda m, x: F.dropout(torch.einsum("bi,ij->bj", x, m.w), 0.5, m.training), w=two(D, 3)
        ),
        (D,),
    ),
    # ---- convolutions
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
        (3, 6, 6),
    ),
    "cnn with group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()),
        (3, 6, 6),
    ),
    "frozen batch norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)),
        (3, 6, 6),
    ),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)),
        (3, 6, 6),
    ),
    "depthwise separable": (
        lambda: nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.Conv2d(3, 5, 1)),
        (3, 6, 6),
    ),
    "dilated": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3, dilation=2), nn.ReLU(), nn.Conv1d(4, 2, 1)),
        (3, 9),
    ),
    "causal convolutions": (
        lambda: Apply(
            lambda m, x: m.b(F.pad(F.relu(m.a(F.pad(x, (2, 0)))), (2, 0))),
            a=nn.Conv1d(3, 4, 3),
            b=nn.Conv1d(4, 2, 3),
        ),
        (3, 8),
    ),
    "u-net": (UNet, (3, 6, 6)),
    "squeeze and excitation": (
        lambda: Apply(
            lambda m, x: (h := m.c(x)) * m.s(h.mean((2, 3))).sigmoid()[..., None, None],
            c=nn.Conv2d(3, 4, 3),
            s=nn.Linear(4, 4),
        ),
        (3, 6, 6),
    ),
    "residual block": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 1),
            Residual(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(1, 4))),
        ),
        (3, 5, 5),
    ),
    "densely connected": (
        lambda: Apply(
            lambda m, x: m.b(torch.cat([x, m.a(x)], 1)),
            a=nn.Conv2d(3, 2, 3, padding=1),
            b=nn.Conv2d(5, 2, 1),
        ),
        (3, 5, 5),
    ),
    "transposed convolution": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, 2), nn.Conv2d(4, 2, 1)),
        (3, 4, 4),
    ),
    "pixel shuffle": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.PixelShuffle(2)),
        (3, 4, 4),
    ),
    "volumes": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.ReLU(), nn.Conv3d(3, 2, 1)),
        (2, 3, 4, 3),
    ),
    "local response norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.LocalResponseNorm(2), nn.Conv2d(4, 2, 1)),
        (3, 5, 5),
    ),
    "adaptive pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)
        ),
        (3, 7, 7),
    ),
    "unfolded patches": (
        lambda: Apply(
            lambda m, x: m.l(F.unfold(x, 2, stride=2).transpose(1, 2)).mean(1), l=nn.Linear(12, 3)
        ),
        (3, 6, 6),
    ),
    "spatial transformer": (
        lambda: Apply(
            lambda m, x: m.c(
                F.grid_sample(
                    x,
                    F.affine_grid(m.l(x.flatten(1)).view(-1, 2, 3), x.shape, False),
                    align_corners=False,
                )
            ),
            l=nn.Linear(48, 6),
            c=nn.Conv2d(3, 2, 1),
        ),
        (3, 4, 4),
    ),
    # ---- recurrence
    "lstm": (lambda: recurrent(nn.LSTM(D, 5, batch_first=True), 5), (T, D)),
    "deep lstm both ways": (
        lambda: recurrent(nn.LSTM(D, 5, 2, batch_first=True, bidirectional=True, dropout=0.1), 10),
        (T, D),
    ),
    "gru": (lambda: recurrent(nn.GRU(D, 5, batch_first=True), 5), (T, D)),
    "elman": (lambda: recurrent(nn.RNN(D, 5, batch_first=True), 5), (T, D)),
    "projected lstm": (lambda: recurrent(nn.LSTM(D, 5, batch_first=True, proj_size=3), 3), (T, D)),
    "packed lstm": (Packed, (T, D)),
    "time-first lstm": (lambda: recurrent(nn.LSTM(D, 5), 5), (T, D)),
    "time-first gru": (lambda: recurrent(nn.GRU(D, 5), 5), (T, D)),
    "lstm turned inside": (
        lambda: Apply(
            lambda m, x: m.h(m.l(x.transpose(0, 1))[0].transpose(0, 1)),
            l=nn.LSTM(D, 5),
            h=nn.Linear(5, 2),
        ),
        (T, D),
    ),
    "lstm cell": (
        lambda: Apply(
            lambda m, x: m.h(m.c(x[:, 1], m.c(x[:, 0]))[0]), c=nn.LSTMCell(D, 5), h=nn.Linear(5, 2)
        ),
        (2, D),
    ),
    "gru cell": (
        lambda: Apply(lambda m, x: m.c(x[:, 1], m.c(x[:, 0])), c=nn.GRUCell(D, 5)),
        (2, D),
    ),
    "char rnn": (
        lambda: Apply(
            lambda m, x: m.h(m.l(m.e(x))[0]),
            e=nn.Embedding(11, D),
            l=nn.LSTM(D, 5, batch_first=True),
            h=nn.Linear(5, 11),
        ),
        11,
    ),
    "state space": (SSM, (T, D)),
    # ---- attention
    "attention": (attention, (T, D)),
    "attention with learned keys": (lambda: attention(add_bias_kv=True), (T, D)),
    "attention pooling": (
        lambda: Apply(
            lambda m, x: (torch.softmax(m.k(x) @ m.q, 1)[..., None] * m.v(x)).sum(1),
            k=linear(),
            v=linear(),
            q=parameter(D),
        ),
        (T, D),
    ),
    "learned queries": (
        lambda: Apply(
            lambda m, x: m.a(m.q.expand(x.shape[0], -1, -1), x, x)[0],
            q=parameter(1, 2, D),
            a=nn.MultiheadAttention(D, 2, batch_first=True),
        ),
        (T, D),
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(D, 2, 8, batch_first=True), (T, D)),
    "encoder, norm first": (
        lambda: nn.TransformerEncoderLayer(D, 2, 8, batch_first=True, norm_first=True),
        (T, D),
    ),
    "time-first encoder": (lambda: nn.TransformerEncoderLayer(D, 2, 8), (T, D)),
    "time-first transformer": (
        lambda: Apply(lambda m, x: m.t(x, x.cos()), t=nn.Transformer(D, 2, 1, 1, 8)),
        (T, D),
    ),
    "transformer": (
        lambda: Apply(
            lambda m, x: m.t(x, x.cos()), t=nn.Transformer(D, 2, 1, 1, 8, batch_first=True)
        ),
        (T, D),
    ),
    "mlp-mixer": (Mixer, (T, D)),
    "relative position bias": (
        lambda: Apply(
            lambda m, x: (
                torch.softmax(m.q(x) @ m.k(x).transpose(1, 2) + m.b(m.index).squeeze(-1), -1) @ x
            ),
            q=linear(),
            k=linear(),
            b=nn.Embedding(7, 1),
            index=nn.Buffer((torch.arange(T)[:, None] - torch.arange(T)) + 3),
        ),
        (T, D),
    ),
    "positions of one row": (lambda: Decoder(lambda x: torch.arange(x.shape[1])[None]), 11),
    "positions of one axis": (lambda: Decoder(lambda x: torch.arange(x.shape[1])), 11),
    "positions in a layer of their own": (
        lambda: Decoder(lambda x: torch.arange(x.shape[1]), table=Offset(9, D)),
        11,
    ),
    "positions for each record": (
        lambda: Decoder(lambda x: torch.arange(x.shape[1])[None].expand_as(x)),
        11,
    ),
    "positions repeated": (lambda: Repeated(lambda x: x), 11),
    "tied head": (lambda: Decoder(lambda x: torch.arange(x.shape[1])[None], tied=True), 11),
    "bag of words": (lambda: nn.Sequential(nn.EmbeddingBag(11, D), nn.Linear(D, 2)), 11),
    "fasttext": (
        lambda: Apply(
            lambda m, x: m.h(m.e(x).mean(1)),
            e=nn.Embedding(11, D, padding_idx=0),
            h=nn.Linear(D, 2),
        ),
        11,
    ),
    "text cnn": (
        lambda: Apply(
            lambda m, x: F.relu(m.c(m.e(x).transpose(1, 2))).amax(2),
            e=nn.Embedding(11, D),
            c=nn.Conv1d(D, 5, 2),
        ),
        11,
    ),
    "windows folded into records": (Windows, (T, D)),
    "a table read outside of its layer": (lambda: Disentangled(by_layer=False), 11),
    "a table changed where it is read": (lambda: Disentangled(by_layer=True), 11),
    "a router of tokens in a row": (
        lambda: Apply(lambda m, x: m.h(x * m.r(x).softmax(-1)), r=InARow(Router()), h=linear()),
        (T, D),
    ),
    "experts beside a convolution's weight": (
        lambda: Apply(
            lambda m, x: m.e(
                F.conv1d(x.mT, m.c.weight.squeeze(1).unsqueeze(1), padding=1, groups=D).mT[:, :T]
            ),
            c=nn.Conv1d(D, D, 2, groups=D, bias=False),
            e=InARow(AllExperts()),
        ),
        (T, D),
    ),
    "records folded into positions": (
        lambda: Apply(lambda m, x: m.b(m.a(x).flatten(0, 1)).view_as(x), a=linear(), b=linear()),
        (T, D),
    ),
    "tokens folded into what is returned": (
        lambda: Apply(
            lambda m, x: m.h(m.r(m.e(x))[0].flatten(0, 1)),
            e=nn.Embedding(11, D),
            r=nn.LSTM(D, 5, batch_first=True),
            h=nn.Linear(5, 11),
        ),
        11,
    ),
    "tokens before records in what is returned": (
        lambda: Apply(
            lambda m, x: m.h(m.e(x.t()).flatten(0, 1)),
            e=nn.Embedding(11, D),
            h=nn.Linear(D, 11),
        ),
        11,
    ),
    "frames of a video folded into records": (
        lambda: Apply(
            lambda m, x: m.h(
                m.r(m.n(m.c(x.flatten(0, 1))).tanh().flatten(1).unflatten(0, (len(x), -1)))[0][
                    :, -1
                ]
            ),
            c=nn.Conv2d(1, 4, 3),
            n=nn.GroupNorm(2, 4),
            r=nn.GRU(36, 5, batch_first=True),
            h=nn.Linear(5, 3),
        ),
        (T, 1, 5, 5),
    ),
    "decides by numbers": (
        lambda: Apply(
            lambda m, x: m.a(x) * (2.0 if float(x.detach().sum()) > 1e9 else 1.0),
            a=nn.Linear(D, 3),
        ),
        (D,),
    ),
    "queries repeated beside zeros": (Queries, (T, D)),
    "weights clamped where they are read": (Clamped, (T, D)),
    "slot attention": (Slots, (T, D)),
    "pointer network": (Pointers, (T, D)),
    "categories in a table of floats": (CategoriesInFloats, (D,)),
    "text in images, positions first": (Reader, (1, D, 7)),
    "frames folded into records, and transposed convolution": (
        lambda: Apply(
            lambda m, x: m.up(m.c(x.flatten(0, 1)).relu()).unflatten(0, x.shape[:2]),
            c=nn.Conv1d(2, 4, 3, padding=1),
            up=nn.ConvTranspose1d(4, 2, 2, 2),
        ),
        (T, 2, D),
    ),
    "attention by torch's function": (FunctionalAttention, (T, D)),
    "conditional random field": (Transitions, (T, D)),
    "positions in an einsum": (Relative, (T, D)),
}
