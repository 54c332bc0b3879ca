"""Value clipping: the bound is never below the norm, the sums are the clipped ones, and what has
no proof is refused.
"""

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.clipping import Clipping
from dpoptim.gradients.trained_parameters import TrainedParameters
from dpoptim.gradients.value_clipping.feed_forward import (
    SpectralNorms,
    layers_of,
    propagated,
    spectral_norm,
    squared_gradient_bounds,
)
from dpoptim.gradients.value_clipping.value_engine import ValueEngine
from spies import worlds_of_queries

ACTIVATIONS = [
    nn.ReLU(),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.GELU(),
    nn.SiLU(),
    nn.LeakyReLU(1.5),
    nn.ELU(2.0),
    nn.Hardtanh(),
]


def net(
    widths: list[int],
    activations: list[int],
    *,
    bias: bool = True,
    seed: int = 0,
    scale: float = 1.0,
) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for (a, b), chosen in zip(
        itertools.pairwise(widths), itertools.cycle(activations), strict=False
    ):
        linear = nn.Linear(a, b, bias=bias)
        with torch.no_grad():
            for p in linear.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * scale)
        layers += [linear, ACTIVATIONS[chosen]]
    return nn.Sequential(*layers[:-1])


def true_norms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Per-record gradient norms in float64, by vmap(grad)."""
    parameters = {
        name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad
    }

    def loss(parameters: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (a[None],)), b[None])

    gradients = vmap(grad(loss), (None, 0, 0))(parameters, x.double(), y)
    return torch.cat([g.flatten(1) for g in gradients.values()], 1).norm(dim=1)


def bounds(model: nn.Sequential, x: Tensor, y: Tensor, *, paper: bool) -> Tensor:
    layers = layers_of(model)
    inputs: list[Tensor] = []
    hooks = [
        layer.linear.register_forward_pre_hook(
            lambda _, args: inputs.append(args[0].detach().square().sum(1))
        )
        for layer in layers
    ]
    output = model(x)
    for hook in hooks:
        hook.remove()
    losses = F.cross_entropy(output, y, reduction="none")
    norms = [spectral_norm(layer.linear.weight) for layer in layers]
    trained = {id(p) for p in model.parameters()}
    if not paper:
        (slopes,) = torch.autograd.grad(losses.sum(), output)
        measured = slopes.double().norm(dim=1)
        return squared_gradient_bounds(layers, inputs, measured, norms, trained).sqrt()
    slopes = 2 * (2 * losses.detach().double()).clamp(0, 1).sqrt()
    return squared_gradient_bounds(
        layers, propagated(layers, x.square().sum(1), norms), slopes, norms, trained
    ).sqrt()


@settings(max_examples=150)
@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    activations=st.lists(st.integers(0, len(ACTIVATIONS) - 1), min_size=4, max_size=4),
    bias=st.booleans(),
    seed=st.integers(0, 10**6),
    size=st.sampled_from([0.0, 0.1, 1.0, 10.0, 1000.0]),
    scale=st.sampled_from([0.1, 1.0, 3.0]),
    paper=st.booleans(),
)
def test_the_bound_is_never_below_the_norm(
    widths: list[int],
    activations: list[int],
    bias: bool,
    seed: int,
    size: float,
    scale: float,
    paper: bool,
) -> None:
    widths = [*widths, 3]
    model = net(widths, activations, bias=bias, seed=seed, scale=scale).double()
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(5, widths[0], generator=generator, dtype=torch.float64) * size
    y = torch.randint(0, 3, (5,), generator=generator)
    assert bool(
        (true_norms(model, x, y) <= bounds(model, x, y, paper=paper) * (1 + 1e-9) + 1e-12).all()
    )


def test_for_linear_models_the_bound_is_the_norm() -> None:
    model = net([4, 3], [0]).double()
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(0, 3, (20,))
    torch.testing.assert_close(
        bounds(model, x, y, paper=False), true_norms(model, x, y), rtol=1e-5, atol=0
    )
    assert bool((bounds(model, x, y, paper=True) > true_norms(model, x, y)).all())


def test_without_biases_the_papers_bound_is_false() -> None:
    """What the paper prints: 4 |x|^2 sum_i prod_{j != i} |W_j|^2 min(1, 2 f), for a net that has
    biases.
    """
    model = net([3, 4, 3], [0], seed=1).double()
    x, y = torch.full((1, 3), 1e-3, dtype=torch.float64), torch.tensor([0])
    first, second = (spectral_norm(layer.linear.weight) for layer in layers_of(model))
    loss = float(F.cross_entropy(model(x), y).detach())
    printed = 2 * float(x.norm()) * math.sqrt((first**2 + second**2) * min(1.0, 2 * loss))
    assert float(true_norms(model, x, y)) > 2 * printed
    assert float(true_norms(model, x, y)) <= float(bounds(model, x, y, paper=True))


@settings(max_examples=60)
@given(
    rows=st.integers(1, 120),
    columns=st.integers(1, 120),
    seed=st.integers(0, 1000),
    rank_one=st.booleans(),
)
def test_spectral_norms_are_bounded_from_above(
    rows: int, columns: int, seed: int, rank_one: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if rank_one:
        matrix = torch.outer(matrix[:, 0], matrix[0])
    true = float(torch.linalg.matrix_norm(matrix, 2))
    assert true <= spectral_norm(matrix) <= 1.06 * true
    assert spectral_norm(torch.zeros(3, 3)) == 0
    assert spectral_norm(torch.full((2, 2), math.nan)) == math.inf


def test_norms_of_moving_weights_stay_above() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 90, generator=generator)
    norms = SpectralNorms([weight])
    for step in range(60):
        weight += torch.randn(80, 90, generator=generator) * (0.001 if step % 20 else 1.0)
        true = float(torch.linalg.matrix_norm(weight.double(), 2))
        assert true <= norms[0] <= 1.2 * true


def sums_of(
    model: nn.Module, x: Tensor, y: Tensor, *, norm: float, paper: bool = False
) -> list[Tensor]:
    engine = ValueEngine(model, Clipping(norm), capacity=len(x), paper=paper)
    engine.attach()
    engine.begin_microbatch(len(x))
    engine.backward(F.cross_entropy(model(x), y, reduction="none"))
    engine.detach()
    return [total.clone() for total in engine.split(engine.take())]


def test_without_clipping_the_sums_are_autograds() -> None:
    model = net([6, 8, 3], [1])
    x, y = torch.randn(30, 6), torch.randint(0, 3, (30,))
    sums = sums_of(model, x, y, norm=1e6)
    F.cross_entropy(model(x), y, reduction="sum").backward()
    for total, p in zip(sums, model.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(total.float(), p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("paper", [False, True])
def test_every_record_is_clipped_by_its_bound(paper: bool) -> None:
    model = net([6, 8, 3], [1]).double()
    x, y = torch.randn(30, 6, dtype=torch.float64), torch.randint(0, 3, (30,))
    for i in range(30):
        one = torch.cat(
            [
                total.flatten()
                for total in sums_of(model, x[i : i + 1], y[i : i + 1], norm=0.5, paper=paper)
            ]
        )
        assert float(one.norm()) <= 0.5
        factor = min(1.0, 0.5 / float(bounds(model, x[i : i + 1], y[i : i + 1], paper=paper)))
        assert float(one.norm()) == pytest.approx(
            factor * float(true_norms(model, x[i : i + 1], y[i : i + 1])), rel=1e-3
        )


def test_frozen_layers_are_left_out() -> None:
    model = net([6, 8, 3], [1]).double()
    model[0].requires_grad_(False)
    x, y = torch.randn(10, 6, dtype=torch.float64), torch.randint(0, 3, (10,))
    assert bool((bounds(model, x, y, paper=False) >= true_norms(model, x, y) * (1 - 1e-9)).all())
    assert [total.shape for total in sums_of(model, x, y, norm=1.0)] == [(3, 8), (3,)]


def digits() -> TensorDataset:
    x, y = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(x / 16 - 0.3, dtype=torch.float32), torch.tensor(y))


def train(
    plan: dpoptim.Plan, data: TensorDataset, model: nn.Module, spoil: str = "", lr: float = 2.0
) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with dpoptim.attach(plan, model, optimizer, data, noise_seed=0) as private:
        for x, y in private.batches():
            losses = F.cross_entropy(model(x), y, reduction="none")
            if spoil == "penalty inside":
                losses = losses + sum(p.square().sum() for p in model.parameters()) * 1e3
            private.backward(losses)
            optimizer.step()
    return model


@pytest.mark.parametrize("bound", ["sharp", "paper"])
def test_it_learns_through_attach(bound: Any) -> None:
    data = digits()
    plan = dpoptim.ValueClippedSGD(2.0, bound=bound).plan(
        n=1797, batch_size=600, epochs=20, epsilon=4, delta=1e-5
    )
    assert dpoptim.Plan.from_json(plan.to_json()) == plan
    assert "bounds on gradients are proved" in plan.describe()
    torch.manual_seed(0)
    model = train(plan, data, nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)))
    x, y = data.tensors
    assert float((model(x).argmax(1) == y).double().mean()) > (0.8 if bound == "sharp" else 0.5)


@pytest.mark.parametrize("spoil", ["penalty inside"])
def test_what_is_done_to_the_loss_changes_nothing(spoil: str) -> None:
    """Only the slope by the model's output counts, times the engine's own factor."""
    plan = dpoptim.ValueClippedSGD(1.0).plan(n=1797, batch_size=600, steps=3, epsilon=4, delta=1e-5)
    models = []
    for how in ("", spoil):
        torch.manual_seed(0)
        models.append(train(plan, digits(), nn.Linear(64, 10), how))
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize("hostile", [1e3, 1e30, -3e38, math.nan, math.inf])
def test_one_record_moves_every_sum_by_at_most_the_clip_norm(
    hostile: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = worlds_of_queries(monkeypatch, 1.0)
    plan = dpoptim.ValueClippedSGD(0.7).plan(
        n=200, batch_size=200, steps=4, noise_multiplier=1.0, delta=1e-5, neighboring="replace-one"
    )
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(200, 6, generator=generator) * 30,
        torch.randint(0, 3, (200,), generator=generator),
    )
    for value in (0.0, hostile):
        changed = x.clone()
        changed[17] = value
        worlds.append([])
        train(plan, TensorDataset(changed, y), net([6, 8, 3], [0], seed=3), lr=0.01)
    moved = [float((a - b).norm()) for a, b in zip(*worlds, strict=True)]
    assert len(moved) == 4
    assert 0 < max(moved) <= 2 * 0.7
    assert all(bool(torch.isfinite(total).all()) for total in worlds[1])


Attack = Callable[[nn.Module, Tensor, Tensor], Tensor]


def squared_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y[:, None]).square().sum(1)


def scaled_in_place(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output = model(x)
    output *= 100
    return output.square().sum(1)


def hooked_output(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output = model(x)
    output.register_hook(lambda g: g * 100)
    return output.square().sum(1)


def model_of_model(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(model(x) * 10) - 1).square().sum(1)


def under_autocast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    return output.float().square().sum(1)


def moved(
    model: nn.Module,
    losses: Attack = squared_error,
    change: Any = None,
    *,
    rows: int = 60,
    paper: bool = False,
    last: Any = 1.0,
) -> float:
    """How far the sum moves, in clip norms, when the last record (of ``last``s) is left out: a
    zero in the loss.
    """
    x, y = torch.ones(rows, 6), torch.ones(rows)
    x[-1] = last
    engine = ValueEngine(model, Clipping(1.0), capacity=rows, paper=paper)
    engine.attach()
    if change is not None:
        change(model)
    sums = []
    for present in (1.0, 0.0):
        engine.begin_microbatch(rows)
        keep = torch.ones(rows)
        keep[-1] = present
        engine.backward(losses(model, x, y) * keep)
        sums.append([total.clone() for total in engine.take()])
    engine.detach()
    return float(torch.stack([(a - b).norm() for a, b in zip(*sums, strict=True)]).norm())


def hooked_graph(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Whoever holds a node of the model's graph can change gradients inside it."""
    output = model(x)
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        node.register_prehook(lambda gradients: tuple(100 * g for g in gradients))
        waiting += [following for following, _ in node.next_functions if following is not None]
    return output.square().sum(1)


@pytest.mark.parametrize("losses", [scaled_in_place, hooked_output, hooked_graph])
def test_what_is_done_to_the_output_belongs_to_the_loss(losses: Attack) -> None:
    assert 0.5 < moved(net([6, 8, 3], [0]), losses) <= 1


def with_other_saved_tensors(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 100 * t):
        return squared_error(model, x, y)


def checkpointed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    return (output - y[:, None]).square().sum(1)


def overwritten_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = squared_error(model, x, y)
    x.numpy()[:] *= 100
    return losses


FORBIDDEN = [
    (model_of_model, "requires a gradient"),
    (under_autocast, "autocast"),
    (with_other_saved_tensors, "saved_tensors_hooks"),
    (checkpointed, "checkpoint"),
    (overwritten_batch, "overwritten"),
]


@pytest.mark.parametrize(("losses", "said"), FORBIDDEN)
def test_passes_that_the_bound_does_not_cover_are_refused(losses: Attack, said: str) -> None:
    with pytest.raises(dpoptim.PrivacyError, match=said):
        moved(net([6, 8, 6], [0]), losses, rows=1400)


def weight_replaced_between(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = squared_error(model, x, y)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone(), requires_grad=False)
    return losses


def weight_scaled_between(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model[2].weight.data.fill_(0.1)
    losses = squared_error(model, x, y)
    model[2].weight.data.mul_(100)  # behind autograd's back, which uses what it finds
    return losses


def test_weights_that_change_between_forward_and_backward_pass() -> None:
    with pytest.raises(dpoptim.PrivacyError, match="after attaching"):
        moved(net([6, 8, 3], [0]), weight_replaced_between)
    assert 0 < moved(net([6, 8, 3], [0], scale=0.3), weight_scaled_between) <= 1


@pytest.mark.parametrize("scale", [1.0, 10.0, 1000.0])
@pytest.mark.parametrize("target", [1e20, 5e37, 1e38])
def test_a_record_of_zeros_with_a_huge_slope_is_finite(scale: float, target: float) -> None:
    """Its gradient is zero, the slope inside is not: infinity times 0 was everybody's NaN."""

    def steep(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        targets = torch.ones(60, 1)
        targets[-1] = target
        return ((model(x) - targets) * targets).sum(1)

    assert moved(net([6, 8, 3], [0], bias=False, scale=scale), steep, last=0.0) <= 1


CHANGES: list[Any] = [
    lambda model: model[0].weight.register_hook(lambda g: g * 100),
    lambda model: model[2].register_forward_pre_hook(lambda module, args: (args[0] * 100,)),
    lambda model: model[1].register_forward_hook(lambda module, args, output: output * 100),
    lambda model: model[1].register_full_backward_hook(
        lambda module, inner, outer: (inner[0] * 100,)
    ),
    lambda model: setattr(model[1], "negative_slope", 100.0),
    lambda model: setattr(model[1], "negative_slope", math.nan),
    lambda model: setattr(model[1], "forward", lambda h: h * 100),
    lambda model: setattr(
        model[2], "weight", nn.Parameter(model[2].weight.detach() * 100, requires_grad=False)
    ),
    lambda model: model.double(),
    lambda model: for_one_pass(
        model[2].register_forward_pre_hook, lambda module, args: (args[0] * 100,)
    ),
    lambda model: for_one_pass(
        model[1].register_forward_hook, lambda module, args, output: output * 100
    ),
]


def for_one_pass(register: Any, hook: Any) -> None:
    """A hook that takes itself off, so that it is gone when the pass is over."""

    def once(*args: Any) -> Any:
        handle.remove()
        return hook(*args)

    handle = register(once)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_model_after_attaching_is_refused(change: Any) -> None:
    with pytest.raises(
        dpoptim.PrivacyError,
        match="has hooks|after attaching|forward pass of its own|no bound on gradients",
    ):
        moved(nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.1), nn.Linear(8, 3)), change=change)


def test_hooks_on_all_modules_are_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, inner, outer: None)
    try:
        with pytest.raises(dpoptim.PrivacyError, match="hooks on all modules"):
            moved(net([6, 8, 3], [0]))
    finally:
        handle.remove()


def test_hardtanh_of_large_constants_stays_within_the_papers_bound() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Hardtanh(50.0, 60.0), nn.Linear(8, 3))
    assert (
        0
        < moved(
            model, lambda m, x, y: F.cross_entropy(m(x), y.long(), reduction="none"), paper=True
        )
        <= 1
    )


@pytest.mark.parametrize("kind", [nn.GELU("tanh"), nn.GELU(), nn.Softsign(), nn.ReLU()])
@pytest.mark.parametrize("scale", [1e9, 1e28, math.inf, math.nan])
def test_weights_beyond_the_float32_range_count_every_record_as_zero(
    kind: nn.Module, scale: float
) -> None:
    """A record of size 1e11 would make a NaN inside, and the NaN everybody's gradient."""

    def blow_up(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p *= scale

    assert (
        moved(nn.Sequential(nn.Linear(6, 8), kind, nn.Linear(8, 3)), change=blow_up, last=1e11) == 0
    )


def test_tiny_weights_have_a_norm() -> None:
    assert spectral_norm(torch.full((2, 2), 1e-200, dtype=torch.float64)) == pytest.approx(2e-200)


def test_copies_of_the_model_carry_nothing() -> None:
    model = net([6, 8, 3], [0])
    engine = ValueEngine(model, Clipping(1.0), capacity=4, paper=False)
    engine.attach()
    engine.begin_microbatch(4)
    output = model(torch.ones(4, 6))
    average = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    average(torch.ones(9, 6))  # does not disturb the pass that is open
    engine.backward(output.square().sum(1))
    copies = [hook for module in average.modules() for hook in module._forward_hooks.values()]
    assert all(hook.told is None for hook in copies)
    engine.detach()


class Cubes(nn.LeakyReLU):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


def shared() -> nn.Sequential:
    one = nn.Linear(6, 6)
    return nn.Sequential(one, nn.ReLU(), one)


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model


def weight_normed() -> nn.Sequential:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.Conv1d(1, 2, 3)), "module '0' is a Conv1d"),
        (
            nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
            "module '1' is a LayerNorm",
        ),
        (nn.Sequential(nn.Linear(6, 6), nn.Sequential(Residual())), "module '1.0' is a Residual"),
        (nn.Sequential(nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, 3)), "PReLU"),
        (shared(), "used twice"),
        (tied(), "share parameters"),
        (weight_normed(), "parametrisations"),
        (nn.Sequential(nn.ReLU()), "no nn.Linear"),
        (nn.Sequential(nn.Linear(6, 6), Cubes(), nn.Linear(6, 3)), "module '1' is a Cubes"),
    ],
)
def test_what_has_no_proof_is_refused_by_name(model: nn.Module, said: str) -> None:
    with pytest.raises(dpoptim.PrivacyError, match=said):
        ValueEngine(model, Clipping(1.0), capacity=10, paper=False)


def test_mistakes_in_the_loop_are_named() -> None:
    data = digits()
    plan = dpoptim.ValueClippedSGD(1.0).plan(n=1797, batch_size=100, steps=3, epsilon=4, delta=1e-5)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with dpoptim.attach(plan, model, optimizer, data) as private:
        for x, y in private.batches():
            with pytest.raises(dpoptim.PrivacyError, match='reduction="none"'):
                private.backward(F.cross_entropy(model(x), y))
            losses = F.cross_entropy(model(x), y, reduction="none")
            model(x)
            with pytest.raises(dpoptim.PrivacyError, match="earlier output"):
                private.backward(losses)
            F.cross_entropy(model(x), y).backward()
            with pytest.raises(dpoptim.PrivacyError, match=r"private\.backward\(losses\)"):
                optimizer.step()
            break
    with pytest.raises(ValueError, match="bound must be one of 'sharp', 'paper'"):
        dpoptim.ValueClippedSGD(1.0, bound="exact")  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [500, 1200, 8000])
def test_batches_of_any_size_leave_next_to_nothing_to_rounding(rows: int) -> None:
    engine = ValueEngine(net([784, 32, 10], [0]), Clipping(1.0), capacity=rows, paper=False)
    assert engine.sum_margin() < 0.005
    model, x = net([6, 8, 3], [0], seed=2), torch.full((rows, 6), 0.3)
    assert 0.99 < moved(nn.Linear(6, 3), rows=rows, last=20.0) <= 1
    inplace = nn.Sequential(model[0], nn.ReLU(inplace=True), model[2])
    sums = [sums_of(each, x, torch.zeros(rows).long(), norm=1.0) for each in (model, inplace)]
    for plain, other in zip(*sums, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-6, atol=1e-9)


def test_layers_too_wide_for_float32_are_refused_with_the_fix() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(40_000, 40_000) for _ in range(2)])
    engine = object.__new__(ValueEngine)
    engine._layers, engine.parameters = layers_of(model), list(model.parameters())
    engine.reduction, engine.capacity = "sum", 100
    engine._trained = TrainedParameters(model, {})
    with pytest.raises(dpoptim.PrivacyError, match=r"model\.double\(\)"):
        engine.sum_margin()
