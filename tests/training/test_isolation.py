"""`attach` keeps records apart in the fastest way that works, says so once, and lists it."""

import math
import random
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dpoptim
from dpoptim.errors import SamplesInteractError
from dpoptim.gradients import oracle
from dpoptim.gradients.isolation import Isolation
from dpoptim.training.trials.isolation import IsolationWarning, choose_isolation, if_taken
from dpoptim.training.trials.made_up_records import Returned, Sample
from dpoptim.training.trials.memory import LiveTensors
from dpoptim.training.trials.tolerances import settled

N, T, D = 12, 4, 5


class Transposed(nn.Module):
    """Uses a weight functionally, which no rule can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tensordot(self.first(x), self.first.weight, ([1], [0])))


class Deciding(Transposed):
    """Looks at numbers, which no vectorised call can."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if float(x.detach().sum()) > 1e9 else 1.0)


class Noisy(nn.Module):
    """Draws noise in evaluation mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mean(x) + torch.randn_like(x))


def data(*shape: int) -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(N, *(shape or (D,))), torch.randint(0, 3, (N,)))


def trained(model: nn.Module, train_set: Any, **options: Any) -> tuple[list[Tensor], Any]:
    """Weights after two clipped steps without noise, and the training."""
    plan = dpoptim.DPSGD(clip_norm=0.3).plan(
        n=N, batch_size=N, steps=2, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(plan, model, optimizer, train_set, **options) as private:
        for x, y in private.batches():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], private


@pytest.mark.parametrize("kind", [Transposed, Deciding])
def test_every_way_trains_alike(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, results = kind(), []
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for isolation in ("auto", "alone") if kind is Deciding else ("auto", "vmap", "alone"):
        model.load_state_dict(before)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", IsolationWarning)
            results.append(trained(model, data(), isolation=isolation)[0])
        assert all("forward" not in vars(m) for m in model.modules())
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_reason_and_the_factor_are_said_once_and_the_way_is_listed() -> None:
    with pytest.warns(IsolationWarning) as record:
        _, private = trained(Deciding(), data())
    assert len(record) == 1
    message = str(record[0].message)
    assert "records pass alone" in message
    assert "'first.weight' was used outside" in message
    assert re.search(r"about \d[\d.e+]* times as long", message)
    enforced = [item.text for item in private.basis if item.kind == "enforced"]
    assert any("every microbatch has one record" in text for text in enforced)


def test_rules_alone_say_nothing() -> None:
    _, private = trained(nn.Linear(D, 3), data())  # warnings are errors
    assert any("it did on random inputs" in item.text for item in private.basis)


def test_records_that_pass_alone_are_delivered_alone() -> None:
    sizes = []
    plan = dpoptim.DPSGD(clip_norm=0.3).plan(
        n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-5
    )
    model = nn.Linear(D, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(plan, model, optimizer, data(), isolation="alone") as private:
        for x, y in private.batches(physical_batch_size=7):
            sizes.append(len(x))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert sizes == [1] * N
    assert private.steps_done == 1


class HandsOn(nn.Module):
    """Truncated backpropagation through time: a batch begins in the last one's state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(1, 6, batch_first=True), nn.Linear(6, 3)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        known = self.state is not None and self.state[0].shape[1] == len(x)
        outputs, state = self.layer(x[..., None], self.state if known else None)
        self.state = (state[0].detach(), state[1].detach())
        return self.head(outputs[:, -1])


class HandsOnInTraining(HandsOn):
    """Evaluated, it begins anew."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.state = None
        return super().forward(x)


class Centred(nn.Linear):
    """Subtracts a moving average of what earlier batches gave."""

    mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.training:
            return y
        before, self.mean = self.mean, 0.9 * self.mean + 0.1 * float(y.detach().mean())
        return y * (1 + before)


class Counts(nn.Linear):
    """A schedule by calls of the model, of which there are as many as records."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 1 / self.calls)


@pytest.mark.parametrize("kind", [HandsOn, HandsOnInTraining, Centred, Counts])
@pytest.mark.parametrize("isolation", ["auto", "rules", "alone"])
def test_what_a_model_hands_on_lets_records_meet_though_they_pass_alone(
    isolation: str, kind: Any
) -> None:
    """One of them moved a sum by 3.7 C under "records cannot be mixed", said to be enforced."""
    model = kind() if issubclass(kind, HandsOn) else kind(D, 3)
    with pytest.raises(dpoptim.SamplesInteractError, match=r"(?s)(keeps something|mixed).*Fix"):
        trained(model, data(), isolation=isolation)


def test_a_memory_that_could_not_be_tried_is_taken_on_trust() -> None:
    class Choosy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not bool((x == 1).all()):
                raise ValueError
            return super().forward(x)

    chosen = choose_isolation(Choosy(D, 3), TensorDataset(torch.ones(8, D)), "alone")
    assert [each.kind for each in chosen.basis] == ["enforced", "trusted"]
    assert "keeps nothing from one record's" in chosen.basis[1].text
    (only,) = choose_isolation(nn.Linear(D, 3), data(), "alone").basis
    assert only.kind == "enforced"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(4))
def test_layers_that_numpy_drops_are_served(seed: int) -> None:
    """By chance they were, or were told that records are mixed."""

    class Dropping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            dropped = self.training and float(np.random.rand()) < 0.5
            return super().forward(x) * (1 if dropped else 2)

    np.random.seed(seed)
    assert trained(Dropping(D, 3), data())[1].steps_done == 2


def test_what_a_model_returns_in_evaluation_alone_moves_no_places() -> None:
    """Encoder-decoder models return their caches then; noise has the trials in that mode."""

    class Caching(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Any, ...]:
            out = super().forward(x)
            return (out + np.random.randn(),) if self.training else (None, object(), out)

    sample = choose_isolation(Caching(D, 3), data()).sample
    assert sample is not None
    assert [each.place for each in sample.returned] == [0]


def test_numbers_drawn_by_numpy_are_no_memory() -> None:
    class Drawing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + float(np.random.randn()) + random.random()

    assert trained(Drawing(D, 3), data(), isolation="alone")[1].steps_done == 2


@pytest.mark.parametrize("isolation", ["books", "fast", None, 3])
def test_other_words_are_refused(isolation: Any) -> None:
    with pytest.raises(
        ValueError, match="isolation must be one of 'auto', 'rules', 'vmap', 'alone'"
    ):
        trained(nn.Linear(D, 3), data(), isolation=isolation)


@pytest.mark.parametrize("axis", [2, -1, True, "first"])
def test_other_axes_are_refused(axis: Any) -> None:
    with pytest.raises(ValueError, match="batch_axis must be 0"):
        trained(nn.Linear(D, 3), data(), batch_axis=axis)


def test_rules_by_name_refuse_what_they_cannot_follow() -> None:
    with pytest.raises(
        dpoptim.PrivacyError, match="'first.weight' was used outside.*isolation=.auto"
    ):
        choose_isolation(Transposed(), data(), "rules")
    with pytest.raises(dpoptim.PrivacyError, match="vectorise"):
        choose_isolation(Deciding(), data(), "vmap")


def test_noise_in_evaluation_mode_is_no_reason_to_refuse() -> None:
    """Its records draw noise of their own, which is held still while they are compared."""
    model, records = Noisy(), data()
    state = torch.get_rng_state()
    assert choose_isolation(model, records).isolation == Isolation()
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    trained(model, data())
    assert dpoptim.check(
        model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), data().tensors
    ).loss_reduction == ("mean")


class Both(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D, **options)
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def test_time_first_is_found_and_may_be_said() -> None:
    found = choose_isolation(Both(), data(T, D))
    assert found.isolation == Isolation(batch_axis=1, time_first=frozenset({"head"}), windows=True)
    assert choose_isolation(Both(), data(T, D), "auto", 1).isolation == found.isolation
    assert choose_isolation(Both(batch_first=True), data(T, D)).isolation == Isolation()
    with pytest.raises(dpoptim.SamplesInteractError, match="batch_axis=1"):
        choose_isolation(Both(), data(T, D), "auto", 0)


def test_a_model_that_mixes_records_is_refused_unless_a_way_is_named() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(D, 7), Centred(), nn.Linear(7, 3))
    with pytest.raises(dpoptim.SamplesInteractError, match="records are mixed"):
        choose_isolation(model, data())
    for named in ("vmap", "alone"):
        assert choose_isolation(model, data(), named).isolation.enforced


class Adapted(nn.Module):
    """A frozen bfloat16 layer with a low-rank update in float32, as LoRA mostly is.

    It rounds a record's numbers by how many others there are, as kernels for wide layers do.
    """

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.frozen = nn.Linear(D, D).to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16) * (1 + 2.0**-7 * (len(x) > 1))
        x = x - x.mean(0) if self.mixes else x
        return self.frozen(x) + self.up(self.down(x.float())).to(x.dtype)


class MixingBackwards(torch.autograd.Function):
    """The identity; gradients are mixed with those of other records."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g + 0.03 * (g.mean(0) - g)


class BesideNarrow(nn.Module):
    """Mixes gradients a little, beside a frozen layer of few digits."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(D, D), nn.Linear(D, D).to(torch.bfloat16)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = MixingBackwards.apply(self.trained(x))
        return y + 0.1 * self.frozen(x.to(self.frozen.weight.dtype)).to(x.dtype)


def test_few_digits_elsewhere_hide_no_mixing_of_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(BesideNarrow(), nn.Tanh(), nn.Linear(D, D))
    assert choose_isolation(model, data()).isolation != Isolation()


@pytest.mark.parametrize("mixes", [False, True])
def test_what_is_frozen_in_fewer_digits_is_no_mixing_and_hides_none(mixes: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(mixes=False), Adapted(mixes=mixes))
    if not mixes:
        assert choose_isolation(model, data()).isolation == Isolation()
        return
    with pytest.raises(dpoptim.SamplesInteractError, match="records are mixed"):
        choose_isolation(model, data())


@pytest.mark.parametrize("mixes", [False, True])
def test_layers_of_two_dtypes_are_tried_under_autocast(mixes: bool) -> None:
    """Norms kept in float32 over layers in bfloat16 run under autocast alone, as QLoRA's do."""
    first, last = nn.Linear(D, D).to(torch.bfloat16), nn.Linear(D, 3).to(torch.bfloat16)
    model = nn.Sequential(first, nn.LayerNorm(D), nn.Softmax(0 if mixes else 1), last)
    if not mixes:
        assert choose_isolation(model, data()).sample is not None
        return
    with pytest.raises(dpoptim.SamplesInteractError, match="records are mixed"):
        choose_isolation(model, data())


def test_value_clipping_takes_no_other_way() -> None:
    plan = dpoptim.ValueClippedSGD(clip_norm=1.0).plan(
        n=N, batch_size=4, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    model = nn.Linear(D, 3)
    with pytest.raises(ValueError, match="isolation is not for value clipping"):
        dpoptim.attach(
            plan, model, torch.optim.SGD(model.parameters(), lr=0.1), data(), isolation="alone"
        )


class Named(Dataset[dict[str, Tensor]]):
    """Records by name, a mask and a number among them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        torch.manual_seed(index)
        return {
            "x": torch.randint(0, 11, (T,)),
            "attention_mask": torch.ones(T),
            "length": 3,
            "labels": index % 3,
        }

    def __len__(self) -> int:
        return N


class ByName(nn.Module):
    def __init__(self, positions: Any) -> None:
        super().__init__()
        self.token, self.position, self.head = (
            nn.Embedding(11, 6),
            nn.Embedding(T, 6),
            nn.Linear(6, 3),
        )
        self.positions = positions

    def forward(
        self, x: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        h = self.token(x) * attention_mask[..., None] + self.position(self.positions(x))
        logits = self.head(h.mean(1))
        return (
            {"loss": F.cross_entropy(logits, labels), "logits": logits}
            if labels is not None
            else {"logits": logits}
        )


def test_records_by_name_are_tried_as_the_model_takes_them() -> None:
    of_one_row = ByName(lambda x: torch.arange(T)[None])
    chosen = choose_isolation(of_one_row, Named())
    assert chosen.isolation == Isolation()
    assert chosen.sample is not None
    assert set(chosen.sample.kwargs) == {"x", "attention_mask", "labels"}
    # Positions of shape (T,) pass for records whenever there are T of them; nothing but made-up
    # records could tell.
    chosen = choose_isolation(ByName(lambda x: torch.arange(T)), Named())
    assert chosen.isolation == Isolation(shared=frozenset({"position"}), windows=True)


def test_numbers_that_may_be_masks_are_ones_where_nothing_else_works() -> None:
    """A record without any token has no gradient at all in some models."""

    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 3)

        def forward(self, x: Tensor, counted: Tensor) -> Tensor:
            return (self.layer(x) * counted[..., None]).sum(1) / counted.sum(1, keepdim=True)

    torch.manual_seed(0)
    records = TensorDataset(torch.randn(N, 1, D), torch.ones(N, 1, dtype=torch.long))
    assert choose_isolation(Averaging(), records).isolation == Isolation()
    never = choose_isolation(nn.Sequential(nn.Linear(D, 3), NotFinite()), data())
    assert never.sample is None
    assert "not finite" in never.basis[-1].text


class NotFinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * math.nan


class Turned(nn.Module):
    """A layer whose output batches of several change a little, as where rounding turns a ReLU:
    with the weights that it begins with, or with any.
    """

    def __init__(self, *, by_rounding: bool) -> None:
        super().__init__()
        self.layer, self.by_rounding = nn.Linear(D, 3), by_rounding
        self.first = self.layer.weight.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        at_kink = not self.by_rounding or torch.equal(self.layer.weight.detach(), self.first)
        return self.layer(x) * (1.002 if len(x) > 1 and at_kink else 1.0)


def test_what_rounding_turns_is_tried_with_other_weights() -> None:
    model = Turned(by_rounding=True)
    assert choose_isolation(model, data()).isolation == Isolation.of("rules")
    assert torch.equal(model.layer.weight, model.first)
    assert dpoptim.check(model, losses_of, data()[:4]).loss_reduction == "none"


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_what_records_turn_is_not() -> None:
    with pytest.raises(SamplesInteractError):
        dpoptim.check(
            nn.Linear(D, 3),
            lambda m, b: losses_of(m, b) * (1 + 0.005 * (len(b[0]) > 1)),
            data()[:4],
        )
    assert choose_isolation(Turned(by_rounding=False), data()).isolation != Isolation.of("rules")


def test_little_is_settled_by_other_weights() -> None:
    """However wide the tolerance: that of bfloat16 is three parts of a hundred."""
    for share, tolerance, agrees in (
        (100.0, 1e-4, True),
        (101.0, 1e-4, False),
        (1.0, 3e-2, True),
        (1.01, 3e-2, False),
        (math.nan, 1e-4, False),
    ):
        assert settled([0.5, share], lambda seed: [0.0], lambda: False, tolerance) is agrees
        assert settled([0.5, share], lambda seed: [2.0], lambda: True, tolerance) is agrees
        if share > 1:
            assert not settled([share], lambda seed: [2.0 * seed], lambda: False, tolerance)


class Rounds(nn.Module):
    """A layer whose output batches of several change a little with any weights: in float32, as
    where rounding turns one ReLU or another, or in every dtype.
    """

    def __init__(self, *, only_float32: bool) -> None:
        super().__init__()
        self.layer, self.only_float32 = nn.Linear(D, 3), only_float32

    def forward(self, x: Tensor) -> Tensor:
        moves = len(x) > 1 and (x.dtype == torch.float32 or not self.only_float32)
        return self.layer(x) * (1.002 if moves else 1.0)


def test_what_rounding_turns_with_any_weights_is_tried_in_float64() -> None:
    model = Rounds(only_float32=True)
    assert choose_isolation(model, data()).isolation == Isolation.of("rules")
    assert model.layer.weight.dtype == torch.float32
    assert choose_isolation(Rounds(only_float32=False), data()).isolation != Isolation.of("rules")


def rounding(batch: Any) -> float:
    """What losses of several records are multiplied by in float32."""
    return 1.002 if len(batch[0]) > 1 and batch[0].dtype == torch.float32 else 1.0


def test_losses_that_rounding_moves_are_tried_in_float64_by_the_copy_alone() -> None:
    model, batch = nn.Linear(D, 3), data()[:4]
    found = dpoptim.check(model, lambda m, b: losses_of(m, b) * rounding(b), batch)
    assert found.loss_reduction == "none"

    def elsewhere(_: nn.Module, b: Any) -> Tensor:
        return losses_of(model, (b[0].float(), b[1])) * rounding(b)

    with pytest.raises(SamplesInteractError):  # of the copy's gradients, all of them zero
        dpoptim.check(model, elsewhere, batch)


class TakesSome(nn.Module):
    """A layer that does not take just any numbers."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.layer, self.most = nn.Linear(D, 3), most

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.abs() > self.most).any()):
            raise IndexError
        return self.layer(x)


class Categories(nn.Module):
    """A layer beside a table that is looked up in by numbers of the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(3, 3), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.table(x.long()).sum(1)


def test_what_was_tried_on_whole_numbers_alone_says_so() -> None:
    torch.manual_seed(0)
    of_categories, of_floats = (
        choose_isolation(model, data()).basis[0].text for model in (Categories(), nn.Linear(D, 3))
    )
    assert "it did on random inputs of 0 and 1, which alone it took" in of_categories
    assert "it did on random inputs, against batches of one" in of_floats


def test_models_may_raise_on_random_numbers() -> None:
    """Enormous ones are left out, and whole ones come after others."""
    torch.manual_seed(0)
    for most in (100.0, 1.5):
        assert choose_isolation(TakesSome(most), data()).sample is not None
    zeros = Sample((torch.zeros(3, D),), {}, 3, returned=(Returned(0, 0),))
    assert if_taken(TakesSome(0.0), zeros, None) == (
        None,
        "the model raised IndexError on random input",
    )


class Ragged(Dataset[Any]):
    """Records that only their own collate function makes a batch of."""

    def __getitem__(self, index: int) -> Any:
        return {"ids": [index % 2] * (3 + index % 4)}

    def __len__(self) -> int:
        return 20


def padded(records: list[Any]) -> dict[str, Tensor]:
    rows = [torch.tensor(record["ids"]) for record in records]
    return {"ids": nn.utils.rnn.pad_sequence(rows, batch_first=True)}


class Read(nn.Module):
    def __init__(self, mixed: float) -> None:
        super().__init__()
        self.table, self.mixed = nn.Embedding(4, 3), mixed

    def forward(self, ids: Tensor) -> Tensor:
        found = self.table(ids).mean(1)
        return found + self.mixed * found.mean(0)


def test_the_loops_own_collate_function_shows_how_the_model_is_called() -> None:
    """Without it, a model of such records would be taken on trust."""
    without = choose_isolation(Read(0.0), Ragged())
    assert "not tested" in without.basis[-1].text
    chosen = choose_isolation(Read(0.0), Ragged(), collate=padded)
    assert chosen.sample is not None
    assert not any("not tested" in item.text for item in chosen.basis)
    choose_isolation(Read(1.0), Ragged())
    with pytest.raises(dpoptim.SamplesInteractError):
        choose_isolation(Read(1.0), Ragged(), collate=padded)

    def broken(records: list[Any]) -> Any:
        raise KeyError(records)

    assert choose_isolation(Read(0.0), Ragged(), collate=broken).sample is None


class Looked(nn.Module):
    """A table that is large beside everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(20_000, 8, mode="mean"), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


def test_a_trial_takes_the_memory_of_few_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "KEPT", 1 << 10)
    records = TensorDataset(torch.randint(20_000, (4, 6)), torch.zeros(4))
    model = Looked()
    with LiveTensors() as live:
        found = choose_isolation(model, records)
    assert found.isolation == Isolation()
    # a copy of the model, sums in float64, and gradients of one record after the other
    assert live.peak < 5 * 4 * sum(p.numel() for p in model.parameters())


class OfAnItem(nn.Module):
    """Takes a history, an item, and a grid that is nobody's; may mix, by what it does with both."""

    def __init__(self, mixed: float = 0.0) -> None:
        super().__init__()
        self.layer, self.mixed = nn.Linear(D, 3), mixed
        self.register_buffer("grid", torch.linspace(0, 1, 4 * D).view(4, D))

    def forward(self, x: Tensor, item: Tensor | None = None, grid: Tensor | None = None) -> Tensor:
        found = self.layer(x)
        if item is not None and grid is not None:
            found = found + self.layer(grid).mean(0) * item[:, None]
            found = found + self.mixed * found.mean(0)
        return found


def items() -> list[Any]:
    return [{"history": torch.ones(D), "item": torch.ones(()), "y": torch.tensor(1)}] * N


def of_item(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["history"], batch["item"], grid=torch.ones(9, D))
    return F.cross_entropy(out, batch["y"], reduction="none")


def test_the_loss_shows_how_the_model_is_called() -> None:
    """By its own names of what a record has, and beside tensors that are nobody's."""
    records: Any = items()
    without = choose_isolation(OfAnItem(), records)
    assert without.sample is not None
    assert not without.sample.kwargs  # the first of a record's tensors alone
    chosen = choose_isolation(OfAnItem(), records, loss=of_item)
    assert chosen.sample is not None
    assert len(chosen.sample.args) == 2
    assert chosen.sample.kwargs["grid"].shape == (9, D)
    assert chosen.sample.rows == 6  # unlike axes of buffers, too
    assert not chosen.isolation.alone
    choose_isolation(OfAnItem(1.0), records)
    with pytest.raises(dpoptim.SamplesInteractError, match="mixed in the forward pass"):
        choose_isolation(OfAnItem(1.0), records, loss=of_item)


def test_a_loss_that_raises_shows_nothing() -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError(batch)

    records: Any = items()
    model = OfAnItem()
    assert choose_isolation(model, records, loss=broken).sample is not None
    assert not model._forward_pre_hooks


class AcrossRows(nn.Module):
    """Attends to all rows of a batch, and takes none of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1)[None]
        return self.attention(rows, rows, rows)[0][0]


def test_models_that_take_no_records_turned_round_are_told_of_mixing() -> None:
    records = TensorDataset(torch.randn(N, D, 1), torch.ones(N))
    with pytest.raises(dpoptim.SamplesInteractError, match="records are mixed"):
        choose_isolation(AcrossRows(), records)
    with pytest.raises(dpoptim.SamplesInteractError, match=r"attention .* across.* The loss uses"):
        trained(AcrossRows(), records, loss=lambda model, b: model(b[0]).square().mean(1))


class AtPositions(nn.Module):
    """Looks a parameter up, or multiplies it, at positions: as many as there are records."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.p, self.head, self.use = nn.Parameter(torch.randn(N, D) / 3), nn.Linear(D, 3), use

    def forward(self, x: Tensor) -> Tensor:
        found = {"p": self.p, "at": torch.arange(N), "torch": torch, "F": F}
        found |= {"eye": torch.eye(N, D) + 1, "square": torch.eye(N)}
        return self.head((x + eval(self.use, found)).tanh()).mean(1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "use",
    [
        "p[at]",
        "p[at, at % 5][:, None]",
        "torch.einsum('td,de->te', eye, p[:5])",
        "torch.einsum('td,de->te', square, p)",
        "F.cosine_similarity(p[0].expand(len(at), -1), eye, -1)[:, None]",
        "square @ (p * 2)",
        "F.linear(eye, p.clamp(-0.1, 0.1))[:, :5]",
    ],
)
def test_as_many_positions_as_records_are_not_taken_for_these(use: str) -> None:
    torch.manual_seed(0)
    model, results = AtPositions(use), []
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for isolation in ("auto", "alone"):
        model.load_state_dict(before)
        results.append(trained(model, data(N, D), isolation=isolation)[0])
    for ours, alone in zip(*results, strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-6)


class Multiplies(nn.Module):
    """Multiplies the gradients of what is below it by the number of records."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda g: g * len(g))
        return x


def test_the_layer_whose_gradient_is_wrong_is_named() -> None:
    """Not one above it, whose gradient is clipped by a norm that is wrong."""
    model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), Multiplies(), nn.Linear(4, 2))
    with pytest.raises(SamplesInteractError, match=r"the gradient of '0\.bias' was not"):
        choose_isolation(model, data(), "rules")
