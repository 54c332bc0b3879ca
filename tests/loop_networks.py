"""Networks of ordinary loops: some keep records apart, some let them meet."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

FEATURES, CLASSES = 5, 3


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


class Keeps(nn.Module):
    """A perceptron that may keep things."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.kept = perceptron(), {"list": [], "tensor": torch.zeros(CLASSES)}

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Recurrent(nn.Module):
    """Characters, of which as many count as there are."""

    def __init__(self, *, packed: bool) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(10, 6), nn.LSTM(6, 7, batch_first=True)
        self.out, self.packed = nn.Linear(7, CLASSES), packed

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if not self.packed:
            return self.out(self.layer(self.embedding(x))[0][torch.arange(len(x)), lengths - 1])
        x = pack_padded_sequence(self.embedding(x), lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.layer(x)[1][0][-1])


class Translator(nn.Module):
    """Predicts three tokens, from the true ones before or from its own."""

    def __init__(self, *, forced: bool) -> None:
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(10, 6), nn.GRU(6, 7, batch_first=True)
        self.cell, self.out, self.forced = nn.GRUCell(6, 7), nn.Linear(7, 10), forced

    def forward(self, x: Tensor) -> Tensor:
        state, token, scores = self.encoder(self.embedding(x))[1][0], x[:, 0], []
        for place in range(1, 4):
            state = self.cell(self.embedding(token), state)
            scores.append(self.out(state))
            token = x[:, place] if self.forced else scores[-1].argmax(1)
        return torch.stack(scores, 2)


class Graph(nn.Module):
    """Two rounds of messages, in one large graph of all records or in one of each."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        self.a, self.b, self.together = nn.Linear(5, 6), nn.Linear(6, CLASSES), together

    def forward(self, edges: Tensor, x: Tensor) -> Tensor:
        records = len(edges)
        if self.together:
            edges, x = torch.block_diag(*edges), x.flatten(0, 1)
        degree = edges.sum(-1, keepdim=True).clamp(min=1)
        x = self.b(edges @ self.a(edges @ x / degree).relu() / degree)
        return x.reshape(records, -1, CLASSES).mean(1)


class Autoencoder(nn.Module):
    """Variational; keeps its posterior, whose scale torch validates."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, 4), nn.Linear(2, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_scale = self.encoder(x).chunk(2, 1)
        self.posterior = Normal(mean, log_scale.exp())
        z = self.posterior.loc + self.posterior.scale
        return self.decoder(z), mean.square().sum(1) + (2 * log_scale).exp().sum(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(FEATURES, 3), nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.encoder(x).tanh(), self.encoder.weight.t(), self.bias)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 3)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.shares = self.gate(x).softmax(1)
        scores = torch.stack([expert(x) for expert in self.experts], 1)
        return (self.shares[:, :, None] * scores).sum(1)


class Saves(Keeps):
    """Gradient checkpointing."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_() if self.reentrant else x
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


class MasksChannels(Keeps):
    """Drops what is small in the mean over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[1](self.layers[0](x))
        means = hidden.detach().mean(0)
        return self.layers[2](hidden * (means > means.median()))


class MixesFeatures(Keeps):
    """CutMix in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.cat([x.flip(0)[:, :2], x[:, 2:]], 1))


class Remembers(Keeps):
    """Adds what it saw last."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layers(x)
        found, self.kept["tensor"] = scores + self.kept["tensor"], scores.detach().mean(0)
        return found
