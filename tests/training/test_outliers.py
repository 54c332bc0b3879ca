"""Quantised layers that round a record by what is large in others."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.trials import isolation as ways
from dpoptim.training.trials import isolation_trials
from dpoptim.training.trials.made_up_records import Sample, samples
from dpoptim.training.trials.neighbours import mixed_beside_large

THRESHOLD = 6.0
RECORDS = 40


class Linear8bitLt(nn.Linear):  # bitsandbytes' own is known by its name
    """Multiplies in 8 bits but for columns with an outlier, as bitsandbytes' layer does."""

    def __init__(self, size: int, threshold: float) -> None:
        super().__init__(size, size)
        self.requires_grad_(False)
        self.state = SimpleNamespace(threshold=threshold)

    def forward(self, x: Tensor) -> Tensor:
        exact = (x.abs() >= self.state.threshold).any(0) & (self.state.threshold > 0)
        scale = torch.where(exact, 0.0, x).abs().amax(1, keepdim=True) / 127
        return super().forward(torch.where(exact, x, (x / scale).round() * scale))


def adapter(threshold: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Linear8bitLt(8, threshold), nn.Linear(8, 1))


def data(first: float) -> TensorDataset:
    """Records, of which the first may have an outlier."""
    torch.manual_seed(1)
    x = torch.randn(RECORDS, 8)
    x[0, 3] = first
    return TensorDataset(x)


def weights(threshold: float, first: float, isolation: str = "auto") -> Tensor:
    """After a step without noise, in which the first record's own loss is zero."""
    model = adapter(threshold)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1.0)  # type: ignore[index]
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=RECORDS, steps=1, noise_multiplier=0.0, delta=1e-4
    )
    private = dpoptim.attach(plan, model, optimizer, data(first), isolation=isolation)  # type: ignore[arg-type]
    with private:
        for (x,) in private.batches():
            private.backward(model(x).squeeze(1) * (x[:, 3] != first))
            optimizer.step()
    return model[1].weight.detach().clone()  # type: ignore[index, union-attr, return-value]


def test_records_pass_alone_and_see_no_outlier_of_others() -> None:
    with pytest.warns(dpoptim.IsolationWarning, match=r"Linear8bitLt.*llm_int8_threshold=0\.0"):
        with_outlier = weights(THRESHOLD, 50.0)
    assert torch.equal(with_outlier, weights(THRESHOLD, 0.5, "alone"))


def test_it_is_they_that_would_mix_records() -> None:
    """As the trial of the model does not see, by the model as it is."""
    model, x = adapter(THRESHOLD)[0], data(50.0).tensors[0]  # type: ignore[index]
    assert not torch.allclose(model(x)[1:], model(x[1:]), rtol=1e-3)


def test_without_a_threshold_rules_serve() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_outlier = weights(0.0, 50.0)
        assert torch.equal(with_outlier, weights(0.0, 0.5))


@pytest.mark.parametrize("isolation", ["rules", "vmap"])
def test_another_way_that_was_asked_for_is_refused(isolation: str) -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match=r"Linear8bitLt.*Fix"):
        weights(THRESHOLD, 0.5, isolation)


class OneScale(nn.Linear):
    """Rounds all that it is given by one scale, as dynamic quantisation of whole tensors does."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax() / 127
        return super().forward((x / scale).round() * scale)


class ScaledIn(nn.Sequential):
    """The same beside the forward passes of layers, where no hook of theirs comes."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax() / 127
        return super().forward((x / scale).round() * scale)


TOKENS, RARE = 16, 15
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "layer": OneScale,
    "container": lambda: ScaledIn(nn.Linear(8, 8)),
    "torch": lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8))),
}


def moved_by_a_rare_token(kind: str) -> float:
    """How far a record with a token of large numbers moves a step's sum, in clip norms."""
    torch.manual_seed(1)
    tokens, labels = torch.randint(RARE, (RECORDS, 12)), torch.randint(3, (RECORDS,))
    tokens[0] = RARE
    sums = []
    for first in (0, 1):
        torch.manual_seed(0)
        embedding = nn.Embedding(TOKENS, 8).requires_grad_(False)
        embedding.weight[RARE] *= 50
        head = nn.Sequential(nn.Flatten(), nn.Linear(96, 3))
        model = nn.Sequential(embedding, LAYERS[kind](), nn.Tanh(), head)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1.0)
        plan = dpoptim.DPSGD(clip_norm=1.0).plan(
            n=RECORDS, batch_size=RECORDS, steps=1, noise_multiplier=0.0, delta=1e-4
        )
        before = [p.detach().clone() for p in trained]
        data = TensorDataset(tokens[first:], labels[first:])
        with dpoptim.attach(plan, model, optimizer, data) as private:
            for x, y in private.batches():
                private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()
        sums.append(
            torch.cat([(a - b.detach()).flatten() for a, b in zip(before, trained, strict=True)])
        )
    return RECORDS * float((sums[0] - sums[1]).double().norm())


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize")
@pytest.mark.parametrize(
    ("kind", "name"), [("layer", "'1'"), ("container", "'1'"), ("torch", r"'1\.0'")]
)
def test_records_pass_alone_where_one_scale_is_for_all(kind: str, name: str) -> None:
    named = rf"layer {name} .*another has large numbers.*Fix"
    with pytest.warns(dpoptim.IsolationWarning, match=named):
        assert moved_by_a_rare_token(kind) <= 1


def test_no_other_trial_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "mixed_beside_large", lambda model, sample: "")
    monkeypatch.setattr(
        isolation_trials, "with_other_numbers", lambda *_: None
    )  # which has its own
    assert moved_by_a_rare_token("layer") > 1.2


class Bounded(nn.Module):
    """Takes no large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.abs() > 100).any()):
            raise ValueError("too large")
        return x


@pytest.mark.parametrize("mixes", [True, False])
def test_layers_that_take_no_large_numbers_are_left_out(mixes: bool) -> None:
    made_up = samples_of(nn.Sequential(Bounded(), OneScale() if mixes else nn.Linear(8, 8)))
    assert bool(mixed_beside_large(*made_up)) == mixes


def samples_of(model: nn.Module) -> tuple[nn.Module, Sample]:
    data = TensorDataset(torch.ones(RECORDS, 8))
    found = next(iter(samples(model, data, None)))
    return model, found.tried(model)


class RoundsByLayout(nn.Linear):
    """Multiplies what is transposed by another kernel, which rounds otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)) * (1 + 2.0**-7 * x.is_contiguous())


def test_copies_that_round_otherwise_are_no_mixing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), RoundsByLayout(2, 3))
    model[2].register_forward_pre_hook(lambda _, args: args[0].mT.contiguous().mT)
    made_up = next(samples(model, TensorDataset(torch.randn(9, 4)), None)).tried(model)
    assert mixed_beside_large(model, made_up) == ""
