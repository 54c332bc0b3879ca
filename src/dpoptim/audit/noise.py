"""Noise audit: is what the live gate adds fresh, independent, normal, and as large as planned?

The noise is read off a run through the public API whose gradients are all zero. Every check is a
p-value; the result is refuted when one of them is below ``failure / checks`` (Bonferroni), so a
right implementation is refuted with probability at most ``failure``, up to the accuracy of the
normal approximation in the correlations.

Some weaknesses leave no trace in a million draws and have checks of their own. float32 generators
never exceed 5.8 sigma: `tail_pvalues` asks the sampler for draws beyond 4 sigma only. Draws made in
float32 sit on a coarse grid: `resolution` counts values that float32 holds exactly. And a sampler
that takes places at its layers' ends for draws, unsettled, is wrong in one of 500: `edge_pvalues`
looks at many draws, where the two laws differ most.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import bdtrc, log_ndtr, ndtr
from scipy.stats import kstest
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpoptim.audit.bounds import Floats
from dpoptim.audit.finding import Checks, binomial_pvalue, chi_square_pvalue, normal_pvalue
from dpoptim.gradients.accumulation.sums import LARGE
from dpoptim.methods import DPFTRL, DPSGD
from dpoptim.noise import fill_standard_normal, ziggurat, ziggurat_layers
from dpoptim.noise.correlated import RedrawnToeplitz
from dpoptim.noise.stream import KeyStream, key_stream
from dpoptim.plan import Plan
from dpoptim.training.attach import attach

# equal sizes among them, so that a copied stream would show
SHAPES = ((120, 200), (200,), (1, 24_000))
REDRAWN_STEPS = 12
COLUMNS, LOOKED_UP, TABLE_STEPS = 16, 20, 2
CLIP_NORM, NOISE_MULTIPLIER = 2.0, 1.0  # powers of two, which keep a float32 draw's grid visible


@dataclass(frozen=True)
class NoiseResult(Checks):
    """The checks of ``draws`` noise values."""

    draws: int


class Weights(nn.Module):
    """Linear layers of the given weight shapes; the loss of the audit gives them no gradient."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.inputs = [shape[-1] for shape in shapes]
        layers = [
            nn.Linear(shape[-1], math.prod(shape[:-1]), bias=False, dtype=torch.float64)
            for shape in shapes
        ]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [
            layer(x.expand(-1, size)).sum(1)
            for layer, size in zip(self.layers, self.inputs, strict=True)
        ]
        return torch.stack(outputs).sum(0)


def audit_noise(
    *, steps: int = 12, failure: float = 1e-6, noise_seed: int | None = None
) -> NoiseResult:
    """Look at the live gate's noise in some steps, at its tail, and at effects of global seeds.

    Args:
        steps: at least 2.
        failure: probability of a false alarm, at most.
        noise_seed: as for ``attach``; it cannot be given to the check that the noise of two runs
            differs.

    Returns:
        the finding, with a verdict.

    Raises:
        ValueError: fewer than 2 steps.
    """
    if steps < 2:
        raise ValueError(f"steps must be at least 2, so that steps can be compared, got {steps!r}.")
    noise = gate_noise(steps, noise_seed=noise_seed)
    pvalues = noise_pvalues(noise)
    pvalues |= tail_pvalues(key_stream(noise_seed, "audit of the tail"))
    pvalues |= edge_pvalues(key_stream(noise_seed, "audit of the layers' edges"))
    pvalues["rows that nobody looked up"] = untouched_rows_pvalue(noise_seed=noise_seed)
    pvalues["global seeds do not reach the noise"] = freshness_pvalue()
    return NoiseResult(pvalues, failure, draws=sum(tensor.size for tensor in noise))


def audit_redrawn_noise(*, failure: float = 1e-6, noise_seed: int | None = None) -> NoiseResult:
    """Look at draws that later steps make again, to take them back: are they those of one step?

    The strategy matrix undoes what the live gate adds in a run of ``DPFTRL(buffers=0)``, and what
    is left has to be fresh noise. Arguments and result are those of `audit_noise`.
    """
    method = DPFTRL(clip_norm=CLIP_NORM, buffers=0)
    plan = method.plan(
        n=REDRAWN_STEPS,
        batch_size=1,
        epochs=1,
        noise_multiplier=NOISE_MULTIPLIER,
        delta=1e-6,
        neighboring="zero-out",
    )
    strategy = method.mechanism.made_for(plan.shape)
    assert isinstance(strategy, RedrawnToeplitz)
    drawn = CLIP_NORM * NOISE_MULTIPLIER * strategy.sensitivity(REDRAWN_STEPS)
    undo = strategy.inverse_matrix(REDRAWN_STEPS) * drawn
    released = gradientless_run(plan, noise_seed=noise_seed)
    noise: list[Floats] = [np.linalg.solve(undo, each).astype(np.float64) for each in released]
    return NoiseResult(noise_pvalues(noise), failure, draws=sum(z.size for z in noise))


def gate_noise(
    steps: int, *, noise_seed: int | None = None, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> list[Floats]:
    """A gradientless run's noise, in planned deviations: one (steps, size) a tensor."""
    plan = DPSGD(clip_norm=CLIP_NORM).plan(
        n=1, batch_size=1, steps=steps, noise_multiplier=NOISE_MULTIPLIER, delta=1e-6
    )
    released = gradientless_run(plan, noise_seed=noise_seed, shapes=shapes)
    return [noise / (CLIP_NORM * NOISE_MULTIPLIER) for noise in released]


def gradientless_run(
    plan: Plan, *, noise_seed: int | None = None, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> list[Floats]:
    """Numbers that the gate releases where all gradients are zero: one (steps, size) a tensor."""
    model = Weights(shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    released: list[list[Floats]] = [[] for _ in shapes]
    zero(model)
    data = TensorDataset(torch.ones(plan.n, 1).double())
    with attach(plan, model, optimizer, data, noise_seed=noise_seed) as private:
        for (x,) in private.batches():
            private.backward((0 * model(x)).mean())
            optimizer.step()
            for kept, p in zip(released, model.parameters(), strict=True):
                kept.append(-plan.batch_size * p.detach().flatten().numpy())
            zero(model)
    return [np.stack(kept) for kept in released]


@torch.no_grad()
def zero(model: torch.nn.Module) -> None:
    """So that the next step leaves the noise itself, to the last bit."""
    for p in model.parameters():
        p.zero_()


def noise_pvalues(noise: list[Floats]) -> dict[str, float]:
    """p-values of standard normal, independent noise: a (steps, size) array a tensor."""
    pvalues: dict[str, float] = {}
    for i, z in enumerate(noise):
        pvalues[f"tensor {i}: standard deviation"] = chi_square_pvalue((z**2).sum(), z.size)
        pvalues[f"tensor {i}: mean"] = normal_pvalue(z.sum() / math.sqrt(z.size))
        pvalues[f"tensor {i}: steps are independent"] = correlation_pvalue(
            z[:-1].ravel(), z[1:].ravel()
        )
        pvalues[f"tensor {i}: any two steps are independent"] = min(
            1.0,
            len(z)
            * (len(z) - 1)
            / 2
            * min(correlation_pvalue(z[s], z[t]) for t in range(len(z)) for s in range(t)),
        )
        pvalues[f"tensor {i}: entries are independent"] = correlation_pvalue(
            z[:, :-1].ravel(), z[:, 1:].ravel()
        )
        for j, other in enumerate(noise[:i]):
            size = min(z.shape[1], other.shape[1])
            pvalues[f"tensors {j} and {i} are independent"] = correlation_pvalue(
                z[:, :size].ravel(), other[:, :size].ravel()
            )
    pvalues["no stretch is repeated"] = repetition_pvalue(np.concatenate(noise, axis=1))
    every = np.concatenate([z.ravel() for z in noise])
    pvalues["law"] = float(kstest(every, ndtr).pvalue)
    for edge in (3.0, 4.0):
        count, rate = float((np.abs(every) > edge).sum()), 2 * float(ndtr(-edge))
        pvalues[f"draws beyond {edge:g} sigma"] = binomial_pvalue(count, every.size, rate)
    pvalues["resolution"] = resolution_pvalue(every)
    return pvalues


def tail_pvalues(stream: KeyStream, draws: int = 400_000) -> dict[str, float]:
    """The sampler's tail: |Z| > 4.04, of which 1.5e-4 lie beyond float32 generators' edge."""
    start = ziggurat_layers.TAIL_START
    z = np.abs(ziggurat.settle(stream, np.full(draws, start), np.zeros(draws, dtype=np.int64)))
    edge = 5.768
    rate = float(np.exp(log_ndtr(-edge) - log_ndtr(-start)))
    count = float((z > edge).sum())
    survival = np.exp(log_ndtr(-z) - log_ndtr(-start))  # uniform on (0, 1)
    return {
        "tail: law given |z| > 4.04": float(kstest(survival, "uniform").pvalue),
        "tail: draws beyond 5.77 sigma": binomial_pvalue(count, draws, rate),
    }


def edge_pvalues(stream: KeyStream, draws: int = 1 << 24) -> dict[str, float]:
    """The sampler's draws at the ends of its layers: is what lies above the curve thrown out?

    The places of a layer are uniform, so without it a draw between two layers' ends is uniform
    there, and none is beyond the last end, 4.27. The second p-value adds up how deep draws lie
    between two ends, as the normal law counts, in (-1/2, 1/2) and times the density's fall from one
    end to the other: the likelihood ratio's first order. Uniform depths are sub-Gaussian with their
    variance, 1/12, so 2 exp(-t^2 / 2) bounds it for any number of draws.
    """
    last, inner = float(ziggurat_layers.EDGES[0]), ziggurat_layers.INNER
    upper = inner[inner > 3.0]
    lower = inner[1 : len(upper) + 1]
    block, far = torch.empty(1 << 20, dtype=torch.float64, device="cpu"), list[Floats]()
    for start in range(0, draws, len(block)):
        some = block[: draws - start]
        fill_standard_normal(stream, some)
        far.append(some[some.abs() > lower[-1]].abs().numpy())
    z = np.concatenate(far)
    beyond, rate = float((z > last).sum()), 2 * float(ndtr(-last))
    z = z[z < upper[0]]
    strip = len(upper) - np.searchsorted(upper[::-1], z, side="right") - 1
    above, below = ndtr(-upper), ndtr(-lower)
    depth = ((ndtr(-z) - above[strip]) / (below - above)[strip]) - 0.5
    fall = -np.expm1((lower**2 - upper**2) / 2)[strip]
    t = float(fall @ depth) / math.sqrt(max(float(fall @ fall), 1.0) / 12)
    return {
        "edges: draws beyond the last layer's end": binomial_pvalue(beyond, draws, rate),
        "edges: depth between layers' ends": min(1.0, 2 * math.exp(-(t**2) / 2)),
    }


def untouched_rows_pvalue(*, noise_seed: int | None = None) -> float:
    """p-value of the standard deviation of what is released of rows that nobody looked up.

    The rows that a record looked up are summed alone where they are few (`RowTerms`), and a gate
    that gave noise to these alone would tell, by the others, who was there.
    """
    rows = LARGE // COLUMNS + 1
    model = nn.EmbeddingBag(rows, COLUMNS, mode="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    looked_up = torch.arange(LOOKED_UP) * (rows // LOOKED_UP)
    plan = DPSGD(clip_norm=CLIP_NORM).plan(
        n=1, batch_size=1, steps=TABLE_STEPS, noise_multiplier=NOISE_MULTIPLIER, delta=1e-6
    )
    untouched = torch.ones(rows, dtype=torch.bool)
    untouched[looked_up] = False
    squares, entries = 0.0, 0
    with attach(
        plan, model, optimizer, TensorDataset(looked_up[None]), noise_seed=noise_seed
    ) as private:
        for (x,) in private.batches():
            before = model.weight.detach().clone()
            private.backward(model(x).sum(1))
            optimizer.step()
            found = (model.weight.detach() - before)[untouched].double()
            squares += float((found / (CLIP_NORM * NOISE_MULTIPLIER)).square().sum())
            entries += found.numel()
    return chi_square_pvalue(squares, entries)


def resolution_pvalue(z: Floats) -> float:
    """Probability that so many float64 draws are float32 numbers by chance: 2^-29 each."""
    count = float((z.astype(np.float32).astype(np.float64) == z).sum())
    return float(bdtrc(count - 1, z.size, 2.0**-28)) if count else 1.0


def freshness_pvalue() -> float:
    """0 if two runs of equal global seeds drew equal noise, known to who knows the seeds."""
    state = torch.random.get_rng_state()
    runs = []
    try:
        for _ in range(2):
            torch.manual_seed(0)
            runs.append(gate_noise(1, shapes=((1, 16),))[0])
    finally:
        torch.random.set_rng_state(state)
    return (
        0.0 if np.array_equal(runs[0], runs[1]) else 1.0
    )  # 16 float64 normals agree by chance with probability below 1e-200


def correlation_pvalue(x: Floats, y: Floats) -> float:
    """p-value of the correlation of paired standard normals of mean 0: normal of variance 1/n."""
    return normal_pvalue(float(x @ y) / math.sqrt(len(x)))


def repetition_pvalue(noise: Floats) -> float:
    """p-value of the largest circular autocorrelation, rows summed: finds copies anywhere."""
    steps, size = noise.shape
    power = (np.abs(np.fft.rfft(noise, axis=1)) ** 2).sum(0)
    lags = np.fft.irfft(power, n=size)[1 : size // 2 + 1]
    # At lag size/2 each pair counts twice; elsewhere the variance is the number of pairs.
    deviation = np.full(len(lags), math.sqrt(steps * size))
    if size % 2 == 0:
        deviation[-1] *= math.sqrt(2)
    return min(1.0, len(lags) * normal_pvalue(float(np.abs(lags / deviation).max())))
