"""Whatever would escape clipping is refused, by a message that names the place and the fix."""

import copy
import gc
import pickle
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.training.refusals import refuse_model
from support import Positions, ScaleLayer, by_engine, clipped, vmap_gradients

ROWS = 6


def attached(model: nn.Module, rows: int = ROWS, *, partial_backward: bool = False) -> Engine:
    engine = Engine(model, Clipping(1.0), capacity=rows, partial_backward=partial_backward)
    engine.attach()
    engine.begin_microbatch(rows)
    return engine


class FunctionalSecondUse(nn.Module):
    """Uses its layer's weight twice, the second time behind the layer's back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.layer(x)), 100 * self.layer.weight)


class FunctionalOnly(FunctionalSecondUse):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight)


@pytest.mark.parametrize("kind", [FunctionalSecondUse, FunctionalOnly])
def test_functional_use_of_a_weight(kind: type[nn.Module]) -> None:
    model = kind()
    engine = attached(model)
    with pytest.raises(
        PrivacyError,
        match=r"'layer.weight' was used outside .*Fix: .*call the module itself",
    ):
        model(torch.randn(ROWS, 5)).mean().backward()
    assert all(p.grad is None for p in model.parameters())
    # nothing of the failed pass was counted
    assert all(float(s.abs().max()) == 0 for s in engine.split(engine.take()))


def test_weight_penalty_in_the_loss() -> None:
    model = nn.Linear(5, 3)
    attached(model)
    with pytest.raises(PrivacyError, match="the optimizer.s weight_decay"):
        (model(torch.randn(ROWS, 5)).mean() + model.weight.square().sum()).backward()


def test_two_backward_passes_over_the_same_rows() -> None:
    model = nn.Linear(5, 3)
    attached(model)
    x = torch.randn(ROWS, 5)
    model(x).mean().backward()
    with pytest.raises(PrivacyError, match="a second time"):
        model(x).mean().backward()


def test_more_rows_than_delivered() -> None:
    model = nn.Linear(5, 3)
    attached(model)
    with pytest.raises(PrivacyError, match="did not cover exactly the rows"):
        model(torch.randn(2 * ROWS, 5)).mean().backward()


def test_disjoint_backward_passes_add_up() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    x = torch.randn(ROWS, 5)
    engine = attached(model, partial_backward=True)
    model(x[:2]).sum(1).mean().backward()
    model(x[2:]).sum(1).mean().backward()
    halves = engine.split(engine.take())
    engine.begin_microbatch(ROWS)
    model(x).sum(1).mean().backward()
    for a, b in zip(halves, engine.split(engine.take()), strict=True):
        torch.testing.assert_close(a, b)
    engine.begin_microbatch(ROWS)
    model(x).sum(1).mean().backward()
    with pytest.raises(PrivacyError, match="a second time"):
        model(x[:1]).sum(1).mean().backward()


def test_a_part_of_a_batch_needs_to_be_asked_for() -> None:
    model = nn.Linear(5, 3)
    attached(model)
    with pytest.raises(PrivacyError, match="partial_backward=True"):
        model(torch.randn(ROWS, 5)[:2]).sum(1).mean().backward()


def test_rows_that_never_reach_the_sum_are_noticed() -> None:
    """A loop that skips losses that are not finite would let one record remove its whole batch."""
    engine = attached(nn.Linear(5, 3))
    with pytest.raises(PrivacyError, match="not all of its rows"):
        engine.begin_microbatch(ROWS)
    engine.take()
    engine.begin_microbatch(1, null=True)
    engine.begin_microbatch(ROWS)  # a placeholder need not be differentiated


def test_a_time_major_layout_is_refused() -> None:
    model = nn.Linear(5, 3)
    attached(model)
    with pytest.raises(PrivacyError, match="records on the first axis"):
        model(torch.randn(ROWS, 4, 5).transpose(0, 1)).mean().backward()


def test_differentiating_the_input_alone_is_harmless() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x = torch.randn(ROWS, 5, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    engine = attached(model)
    (hooked,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(plain, hooked)
    assert all(float(s.abs().max()) == 0 for s in engine.split(engine.take()))


def test_gradient_penalty_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    attached(model)
    x = torch.randn(ROWS, 5, requires_grad=True)
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        g.square().sum().backward()


def test_an_interrupted_backward_leaves_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    x = torch.randn(ROWS, 5)
    engine = attached(model)

    def fail(g: Tensor) -> Tensor:
        raise RuntimeError("interrupted")

    hidden = model[0](x)
    hidden.register_hook(fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        model[1](hidden).mean().backward()
    model(x).sum(1).mean().backward()
    once = engine.split(engine.take())
    engine.begin_microbatch(ROWS)
    model(x).sum(1).mean().backward()
    for a, b in zip(once, engine.split(engine.take()), strict=True):
        torch.testing.assert_close(a, b)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.use_reentrant = use_reentrant

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return self.last(self.inner(x))
        return self.last(checkpoint(self.inner, x, use_reentrant=self.use_reentrant))


def test_non_reentrant_checkpointing_is_exact() -> None:
    sums = []
    x, target = torch.randn(ROWS, 5), torch.randn(ROWS)
    for reentrant in (None, False):
        torch.manual_seed(0)
        sums.append(by_engine(Checkpointed(reentrant), x, target, Clipping(0.1), capacity=ROWS))
    for a, b in zip(*sums, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_reentrant_checkpointing_is_refused() -> None:
    model = Checkpointed(True)
    attached(model)
    with pytest.raises(PrivacyError, match="use_reentrant=False"):
        model(torch.randn(ROWS, 5, requires_grad=True)).mean().backward()


class InnerCheckpointed(Checkpointed):
    """Its checkpointed part comes after a layer, as the blocks of a language model do."""

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return self.last(self.inner(self.first(x)))
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=self.use_reentrant))


@pytest.mark.set_aside("True-vmap")
@pytest.mark.parametrize("isolation", ["auto", "rules", "vmap", "alone"])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.thinned(2)
def test_reentrant_checkpointing_trains_as_the_other_kind(isolation: Any, given: bool) -> None:
    """What asks for it is left as it is, and gets it again when the run is over."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def train(reentrant: bool | None) -> Tensor:
        torch.manual_seed(0)
        model = InnerCheckpointed(reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        records = TensorDataset(torch.randn(ROWS, 5), torch.arange(ROWS) % 3)
        plan = dpoptim.DPSGD(clip_norm=1.0).plan(
            n=ROWS, batch_size=ROWS, steps=2, noise_multiplier=1.0, delta=1e-3
        )
        keep: Any = {"isolation": isolation, "loss": loss if given else None, "noise_seed": 1}
        with dpoptim.attach(plan, model, optimizer, records, **keep) as private:
            for batch in private.batches():
                private.backward(loss(model, batch))
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(train(True), train(False))
    torch.testing.assert_close(train(True), train(None), rtol=1e-4, atol=1e-5)
    x = torch.randn(ROWS, 5, requires_grad=True)
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        torch.autograd.grad(InnerCheckpointed(True)(x).sum(), x)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), "'1' .BatchNorm1d.*GroupNorm"),
        (
            nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False)),
            "'1' .BatchNorm1d.*GroupNorm",
        ),
        (
            nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4).requires_grad_(False)),
            "'1' .BatchNorm1d.*eval",
        ),
        (
            nn.Sequential(
                nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False, track_running_stats=False).eval()
            ),
            "'1' .BatchNorm1d",
        ),
        (
            nn.Sequential(nn.Conv1d(2, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True)),
            "'1' .InstanceNorm1d",
        ),
        (nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)), "'0' .*max_norm"),
        (nn.Sequential(nn.Embedding(9, 4, sparse=True)), "'0' .*sparse"),
        (nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True)), "'0' .*scale_grad_by_freq"),
    ],
)
def test_layers_that_cannot_be_clipped(model: nn.Module, named: str) -> None:
    with pytest.raises(PrivacyError, match=named):
        attached(model)
    # nothing half attached
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_model_without_trainable_parameters() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        Engine(nn.Linear(3, 3).requires_grad_(False), Clipping(1.0), capacity=3)


def test_attaching_twice_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    attached(model)
    with pytest.raises(PrivacyError, match="'0' already has a forward pass"):
        attached(model)


def test_unbatched_inputs_name_the_layer() -> None:
    for layer, shape in (
        (nn.Linear(5, 3), (5,)),
        (nn.Conv2d(3, 2, 3), (3, 6, 6)),
        (nn.LayerNorm(5), (5,)),
    ):
        model = nn.Sequential(layer)
        attached(model)
        with pytest.raises(PrivacyError, match="'0' .*without a record axis"):
            model(torch.randn(shape))


class Flattened(nn.Module):
    """Folds positions into the record axis before one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).flatten(0, 1)).view(x.shape[0], -1)


def test_records_folded_into_positions_name_the_layer() -> None:
    model = Flattened()
    attached(model)
    with pytest.raises(
        PrivacyError, match="'first' and 'second' saw different|'second' and 'first' saw different"
    ):
        model(torch.randn(ROWS, 4, 5)).mean().backward()


class BarePositions(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.token(x) + self.position(torch.arange(x.shape[1])))


def test_positions_without_a_record_axis_name_the_layer() -> None:
    model = BarePositions()
    attached(model)
    with pytest.raises(
        PrivacyError,
        match=r"'position'.* saw different numbers.*positions the "
        r"shape \(1, T\)",
    ):
        model(torch.zeros(ROWS, 5, dtype=torch.long)).mean().backward()


def test_a_module_without_a_rule_whose_output_hides_the_records_is_refused() -> None:
    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,i->i", x, self.scale)

    model = nn.Sequential(nn.Linear(5, 4), Total())
    attached(model)
    with pytest.raises(PrivacyError, match="module '1' .*first axis is not the batch"):
        model(torch.randn(ROWS, 5))


class Borrower(nn.Module):
    """Without a rule, and it uses a layer that it does not own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 5))

    def forward(self, x: Tensor, layer: nn.Module) -> Tensor:
        return torch.tensordot(layer(x), self.weight, ([1], [0]))


def test_a_module_without_a_rule_that_borrows_a_layer_is_refused() -> None:
    class Lender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.borrower = nn.Linear(5, 5), Borrower()

        def forward(self, x: Tensor) -> Tensor:
            return self.borrower(x, self.layer)

    model = Lender()
    attached(model)
    with pytest.raises(PrivacyError, match="'layer.(weight|bias)' was used outside"):
        model(torch.randn(ROWS, 5)).mean().backward()
    model = Lender()
    model.layer.requires_grad_(False)
    attached(model)
    model(torch.randn(ROWS, 5)).mean().backward()


def test_evaluation_under_no_grad_touches_nothing() -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    x = torch.randn(4, 5)
    with torch.no_grad():
        before = model(x)
    engine = attached(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    assert all(float(s.abs().max()) == 0 for s in engine.split(engine.take()))


def test_autocast_is_refused_under_a_mean() -> None:
    model = nn.Linear(5, 3)
    attached(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.randn(ROWS, 5))
    with pytest.raises(PrivacyError, match=r"loss that is a mean"):
        output.float().mean().backward()


class Counter(nn.Module):
    """Keeps a running mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x


def test_buffers_that_learn_are_noticed() -> None:
    model = nn.Sequential(Counter(), nn.Linear(5, 3))
    engine = attached(model)
    model(torch.randn(ROWS, 5)).mean().backward()
    with pytest.raises(PrivacyError, match="buffer '0.mean' was changed"):
        engine.refuse_changes()


def test_a_copy_of_an_attached_model_is_a_plain_model() -> None:
    """Moving averages copy the model; the copy must use its own weights and hold nothing of the
    engine.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), ScaleLayer(4), nn.Linear(4, 2))
    engine = attached(model)
    x = torch.randn(ROWS, 5)
    model(x).mean().backward()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert float(twin(x).detach().abs().max()) == 0
    twin(x).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert not any(isinstance(value, Engine) for value in reachable(twin))
    engine.detach()
    attached(twin)  # and can be attached in its turn


def reachable(model: nn.Module) -> list[object]:
    """Objects within four references of a module's instance dictionaries."""
    seen: dict[int, object] = {}
    layer: list[object] = [value for module in model.modules() for value in vars(module).values()]
    for _ in range(4):
        layer = [
            o
            for o in gc.get_referents(*layer)
            if id(o) not in seen and not isinstance(o, type | types.ModuleType)
        ]
        seen.update((id(o), o) for o in layer)
    return list(seen.values())


def test_an_attached_model_is_not_pickled() -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    attached(model)
    with pytest.raises(PrivacyError, match=r"save model.state_dict\(\)"):
        pickle.dumps(model)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transformer_layers_with_masks_and_none_arguments() -> None:
    """Arguments that are None must stay None on their way through the fallback."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(8, 3))
    x, target = torch.randn(ROWS, 5, 8), torch.randn(ROWS)
    expected = clipped(vmap_gradients(model, x, target), Clipping(0.1), ROWS)
    sums = by_engine(model, x, target, Clipping(0.1), capacity=ROWS)
    for a, b in zip(sums, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@dataclass
class Extras:
    """Of no pytree that torch knows."""

    mask: Tensor


class Masked(nn.Module):
    """No rule of its own; what it is told about the batch comes in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor, extra: Any) -> Tensor:
        if isinstance(extra, Extras):
            return torch.tensordot(x, self.v, ([2], [0])) * extra.mask[:, :, None]
        if isinstance(extra, list):
            return torch.tensordot(x, self.v, ([2], [0])) * torch.tensor(extra)[:, None, None]
        return torch.tensordot(x, self.v, ([2], [0])) * extra.T[:, :, None]


class Outside(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.wrap = Masked(), wrap

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.inner(x, self.wrap(mask))
        return result


WRAPS: dict[str, Callable[[Tensor], Any]] = {
    "a data class": Extras,
    "a list of numbers": lambda mask: mask.sum(1).tolist(),
    "time first": lambda mask: mask.T,
}


@pytest.mark.parametrize("way", WRAPS)
def test_a_layer_without_a_rule_must_get_the_batch_as_tensors(way: str) -> None:
    """Else every record would be differentiated with the first one's data: 45 C."""
    model = Outside(WRAPS[way])
    engine = Engine(model, Clipping(1.0), capacity=6, reduction="sum")
    engine.attach()
    engine.begin_microbatch(6)
    with pytest.raises(PrivacyError, match="'inner' .*first axis is not the batch"):
        model(torch.randn(6, 5, 3), torch.ones(6, 5))
    engine.detach()


@pytest.mark.parametrize("attention", [True, False])
def test_backward_under_autocast_is_refused_under_a_mean(attention: bool) -> None:
    """Plain operations hand back gradients in the narrow dtype there, wherever the forward pass
    ran.
    """

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    model = (
        Attending()
        if attention
        else nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))
    )
    for reduction in ("mean", "sum"):
        engine = Engine(model, Clipping(1.0), capacity=3, reduction=reduction)  # type: ignore[arg-type]
        engine.attach()
        engine.begin_microbatch(3)
        loss = model(torch.randn(3, 5, 4)).flatten(1).sum(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if reduction == "mean":
                with pytest.raises(PrivacyError, match="loss that is a mean"):
                    loss.mean().backward()
            else:
                loss.sum().backward()
                assert engine.recorder.rounded
        engine.detach()


def test_frozen_parameters_that_learn_are_noticed() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.mean = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0))
            return self.layer(x - self.mean)

    model = Running()
    engine = Engine(model, Clipping(1.0), capacity=3)
    engine.attach()
    model(torch.randn(3, 3))
    assert engine.hooks is not None
    with pytest.raises(PrivacyError, match="frozen parameter 'mean' was changed"):
        engine.refuse_changes()
    engine.detach()


def test_a_backward_pass_inside_another_one_is_refused() -> None:
    layer, head = nn.Linear(3, 3), nn.Linear(3, 2)
    model = nn.Sequential(layer, head)
    engine = Engine(model, Clipping(1.0), capacity=4, reduction="sum")
    engine.attach()
    engine.begin_microbatch(4)
    x = torch.randn(4, 3)
    inner = layer(x)

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            with torch.enable_grad():
                inner.sum().backward()
            return g

    hidden = Nested.apply(layer(x))
    with pytest.raises(PrivacyError):
        head(hidden).sum().backward()
    engine.detach()


class Fourier(nn.Module):
    """A weight for each frequency."""

    def __init__(self, *, real: bool) -> None:
        super().__init__()
        values = torch.randn(3, dtype=torch.cfloat)
        self.weight = nn.Parameter(torch.view_as_real(values) if real else values)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        weight = weight if weight.is_complex() else torch.view_as_complex(weight)
        return torch.fft.irfft(torch.fft.rfft(x) * weight, n=x.shape[1])


def test_complex_parameters_are_named_and_what_is_said_to_do_works() -> None:
    with pytest.raises(PrivacyError, match=r"'weight' is complex.*view_as_real"):
        refuse_model(Fourier(real=False))
    model, x, target = Fourier(real=True), torch.randn(ROWS, 4), torch.randn(ROWS)
    refuse_model(model)
    truth = vmap_gradients(model, x, target)
    for mine, theirs in zip(
        by_engine(model, x, target, Clipping(0.1), capacity=ROWS),
        clipped(truth, Clipping(0.1), ROWS),
        strict=True,
    ):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated
def test_models_of_torch_jit_are_refused_by_name() -> None:
    with pytest.raises(PrivacyError, match=r"compiled by torch.jit.*Fix: attach the model as it"):
        refuse_model(torch.jit.trace(nn.Linear(3, 2), torch.randn(2, 3)))
    whole = torch.jit.script(nn.Linear(3, 2))
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(n=4, batch_size=2, steps=1, epsilon=1.0, delta=1e-2)
    with pytest.raises(PrivacyError, match=r"compiled by torch.jit.*Fix: attach the model as it"):
        dpoptim.attach(
            plan, whole, torch.optim.SGD(whole.parameters(), 1.0), [(torch.randn(3),)] * 4
        )


def test_lazy_modules_are_named_and_what_is_said_to_do_works() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(PrivacyError, match=r"'0.weight' has no shape yet.*run model\(x\) once"):
        refuse_model(model)
    model(torch.zeros(1, 3))
    refuse_model(model)


def test_nested_tensors_are_refused_by_name() -> None:
    """Their first axis is one of records to whoever reads it, and to no layer."""
    model = nn.Linear(4, 2)
    engine = attached(model)
    x = torch.nested.nested_tensor([torch.randn(n, 4) for n in (2, 3)], layout=torch.jagged)
    with pytest.raises(PrivacyError, match=r"a nested tensor.*to_padded_tensor.* a list of"):
        model(x)
    engine.detach()
