"""`attach(..., loss=, collate_fn=)` finds by itself what a loop would leak, on records of every
form.
"""

import dataclasses
import random
import warnings
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset, default_collate

import dpoptim
from dpoptim.distributed.ranks import ALONE
from dpoptim.distributed.wrapping import wrapping_of
from dpoptim.gradients.isolation import Isolation
from dpoptim.training.batches.privacy_units import units_of
from dpoptim.training.private_training import PrivateTraining
from dpoptim.training.trials import lone_lengths
from dpoptim.training.trials.loss_check import check_loss

N, WORDS, WIDTH = 24, 11, 8
Loss = Callable[[nn.Module, Any], Tensor]


class Records(Dataset[Any]):
    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.records[index]


class Sequences(nn.Module):
    """An LSTM over characters, and a head on the last position, or on each record's own last
    one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        h = self.lstm(self.embed(ids))[0]
        last = h[:, -1] if lengths is None else h[torch.arange(len(h)), lengths - 1]
        return self.head(last)


class Words(nn.Module):
    """Scores at each position, from the record's own words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = self.embed(input_ids).cumsum(1)
        return self.head(h)


def attach(model: nn.Module, records: Dataset[Any], **options: Any) -> PrivateTraining:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    return dpoptim.attach(
        plan, model, torch.optim.SGD(model.parameters(), lr=0.1), records, **options
    )


def trusted(private: PrivateTraining) -> list[str]:
    return [item.text for item in private.basis if item.kind == "trusted"]


# ---- padding ------------------------------------------------------------------------------------


def characters(*, equal: bool) -> Records:
    torch.manual_seed(0)
    lengths = [6 if equal else 2 + i % 5 for i in range(N)]
    return Records([(torch.randint(1, WORDS, (n,)), i % 3) for i, n in enumerate(lengths)])


def padding(batch: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    ids = pad_sequence([x for x, _ in batch], batch_first=True)
    return ids, torch.tensor([len(x) for x, _ in batch]), torch.tensor([y for _, y in batch])


def last_position(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[2], reduction="none")


def own_last_position(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[1]), batch[2], reduction="none")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("equal", [True, False], ids=["equal lengths", "unequal lengths"])
def test_a_padding_collate_function_is_found(equal: bool) -> None:
    """A char-LSTM, padding, and the last position: 3.8 C, where the data set's own lengths need
    not show it.
    """
    torch.manual_seed(0)
    with pytest.raises(
        dpoptim.SamplesInteractError,
        match="unequal lengths, collated alone and with others(.|\n)*own last",
    ):
        attach(Sequences(), characters(equal=equal), loss=last_position, collate_fn=padding)
    with attach(
        Sequences(), characters(equal=equal), loss=own_last_position, collate_fn=padding
    ) as private:
        assert "also of unequal lengths" in trusted(private)[0]
        assert not any("not checked" in text for text in trusted(private))
        assert next(private.batches())[0].dim() == 2  # the collate function is the loop's


def test_check_finds_padding() -> None:
    records = [characters(equal=True)[i] for i in range(5)]
    with pytest.raises(dpoptim.SamplesInteractError):
        dpoptim.check(Sequences(), last_position, records, collate_fn=padding)
    assert dpoptim.check(
        Sequences(), own_last_position, records, collate_fn=padding
    ).loss_reduction == ("none")


def attended(model: nn.Module, batch: Any, of_nothing: float) -> Tensor:
    """A mean over a record's own tokens; where it has none, a weight for each place of padding."""
    mask = batch[0] != 0
    weights = mask + of_nothing * (~mask.any(1))[:, None]
    h = model.embed(batch[0])
    share = weights / mask.sum(1, keepdim=True).clamp(min=1)
    return F.cross_entropy(model.head((share[..., None] * h).sum(1)), batch[2], reduction="none")


@pytest.mark.parametrize("of_nothing", [0.0, 1.0])
def test_texts_that_are_empty_are_named_where_they_see_others(of_nothing: float) -> None:
    """Attention to nothing is spread over all padding, in some models; in others it is nothing."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return attended(model, batch, of_nothing)

    with attach(Sequences(), characters(equal=False), loss=loss, collate_fn=padding) as private:
        said = next(text for text in trusted(private) if "was checked" in text)
        assert ("nothing but padding" in said) == bool(of_nothing)
        assert "of unequal lengths" in said


def test_a_collate_function_nobody_checked_is_named() -> None:
    with attach(Sequences(), characters(equal=False), collate_fn=padding) as private:
        assert trusted(private)[0].startswith("loss not checked")
        assert trusted(private)[1].startswith("collate_fn not checked")
    with attach(
        Sequences(), characters(equal=False), loss=own_last_position, collate_fn=padding
    ) as private:
        next(private.batches(collate_fn=lambda batch: padding(batch[::-1])))
        assert any(text.startswith("collate_fn not checked") for text in trusted(private))


# ---- random numbers -----------------------------------------------------------------------------


def masking(draw: Callable[[Tensor], Tensor]) -> Callable[[list[Any]], Any]:
    """Pads, and hides tokens, as masked language models want it."""

    def collate(batch: list[Any]) -> dict[str, Tensor]:
        ids, lengths, _ = padding(batch)
        there = torch.arange(ids.shape[1]) < lengths[:, None]
        hidden = draw(0.3 * there).bool()
        labels = torch.where(hidden, ids, -100)
        return {"input_ids": ids.masked_fill(hidden, 0), "attention_mask": there, "labels": labels}

    return collate


def by_rows(p: Tensor) -> Tensor:
    return torch.stack([(torch.rand(len(row)) < row).float() for row in p])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draw", [torch.bernoulli, by_rows])
def test_tokens_may_be_masked_at_random(draw: Callable[[Tensor], Tensor]) -> None:
    data, collate = characters(equal=False), masking(draw)
    model = Words()
    before = torch.random.get_rng_state()
    with attach(model, data, loss=record_means, collate_fn=collate) as private:
        assert trusted(private)[0].startswith("the loop computes the loss that was checked")
        assert torch.equal(before, torch.random.get_rng_state())
        # the same records, drawn anew: of a small batch, hardly ever nine times alike
        first, *others = [next(private.batches())["labels"] for _ in range(9)]
        assert any(first.shape != each.shape or not torch.equal(first, each) for each in others)
    with pytest.raises(dpoptim.SamplesInteractError, match="tokens of the whole batch"):
        attach(Words(), data, loss=token_mean, collate_fn=collate)


@pytest.mark.parametrize("share", [0.02, 0.98])
def test_records_that_are_mixed_now_and_then_are_found(share: float) -> None:
    def collate(batch: list[Any]) -> Any:
        x, y = default_collate(batch)
        return (x + x.roll(1, 0) if float(torch.rand(())) < share else x), y

    with pytest.raises(dpoptim.SamplesInteractError):
        attach(classifier(), table(), loss=losses, collate_fn=collate)


def test_records_mixed_by_neither_all_draws_nor_none_are_found() -> None:
    def collate(batch: list[Any]) -> Any:
        x, y = default_collate(batch)
        return (x + x.roll(1, 0) if 0.3 < float(torch.rand(())) < 0.7 else x), y

    with pytest.raises(dpoptim.SamplesInteractError):
        attach(classifier(), table(), loss=losses, collate_fn=collate)


def test_what_cannot_be_compared_of_a_drawing_collate_function_is_said() -> None:
    def collate(batch: list[Any]) -> Any:
        x, y = default_collate(batch)
        if float(torch.rand(())) > 0.9:
            raise RuntimeError
        return x, y

    with attach(classifier(), table(), loss=losses, collate_fn=collate) as private:
        said = "not where nothing of what collate_fn draws happens: RuntimeError was raised on them"
        assert any(said in text for text in trusted(private))


def test_random_numbers_that_are_not_torchs_own_are_named() -> None:
    known = torch.Generator().manual_seed(0)
    for draw, said in (
        (lambda p: torch.bernoulli(p, generator=known), "generator of its own.*seed=None"),
        (
            lambda p: torch.from_numpy(np.random.rand(*p.shape)) < p,
            "numpy's or Python's.*__getitem__",
        ),
    ):
        with pytest.raises(dpoptim.PrivacyError, match=said):
            attach(Words(), characters(equal=False), loss=record_means, collate_fn=masking(draw))


# ---- losses -------------------------------------------------------------------------------------


def token_mean(model: nn.Module, batch: Any) -> Tensor:
    """By hand; of torch's own each record's mean is taken."""
    scores, labels = model(batch["input_ids"], batch["attention_mask"]), batch["labels"]
    losses = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.sum() / (labels != -100).sum()


def record_means(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch["input_ids"], batch["attention_mask"])
    losses = F.cross_entropy(
        scores.transpose(1, 2), batch["labels"], ignore_index=-100, reduction="none"
    )
    return dpoptim.losses.per_sample_mean(losses, batch["labels"] != -100)


def texts() -> Records:
    """All as long: nothing in them shows what a mean over tokens does."""
    torch.manual_seed(0)
    ids = [torch.randint(1, WORDS, (7,)) for _ in range(N)]
    return Records(
        [{"input_ids": x, "attention_mask": torch.ones(7).long(), "labels": x} for x in ids]
    )


def test_token_means_of_equally_long_records_are_found() -> None:
    with pytest.raises(
        dpoptim.SamplesInteractError, match="unequal lengths(.|\n)*tokens of the whole batch"
    ):
        attach(Words(), texts(), loss=token_mean)
    with attach(Words(), texts(), loss=record_means) as private:
        assert "also of unequal lengths" in trusted(private)[0]
    batch = torch.utils.data.default_collate([texts()[i] for i in range(5)])
    with pytest.raises(dpoptim.SamplesInteractError, match="tokens of the whole batch"):
        dpoptim.check(Words(), token_mean, batch)
    assert dpoptim.check(Words(), record_means, batch).loss_reduction == "none"


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def table() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(N, 5), torch.arange(N) % 3)


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mixup(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    other, share = torch.randperm(len(x)), torch.rand(())
    mixed = model(share * x + (1 - share) * x[other])
    both = [F.cross_entropy(mixed, target, reduction="none") for target in (y, y[other])]
    return share * both[0] + (1 - share) * both[1]


def hard_mining(model: nn.Module, batch: Any) -> Tensor:
    each = losses(model, batch)
    return torch.where(each >= each.detach().median(), each, 0.0)


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none")


def balanced(model: nn.Module, batch: Any) -> Tensor:
    counts = torch.bincount(batch[1], minlength=3)
    return losses(model, batch) / counts[batch[1]]


def centred(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0])
    return F.cross_entropy(scores - scores.mean(0), batch[1], reduction="none")


def broadcast(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0])[:, :1] - batch[1].float()).square().mean(1)


@pytest.mark.parametrize(
    "loss",
    [mixup, hard_mining, contrastive, balanced, centred, broadcast],
    ids=lambda f: f.__name__,
)
def test_vectors_whose_terms_are_made_of_each_other_are_found(loss: Loss) -> None:
    with pytest.raises(dpoptim.SamplesInteractError) as raised:
        attach(classifier(), table(), loss=loss)
    assert "sorted or shuffled" not in str(raised.value)
    if loss in (mixup, contrastive, balanced, centred):
        assert "depend on other records" in str(raised.value)


def means_of_padded_length(model: nn.Module, batch: Any) -> Tensor:
    ids = batch[0]
    scores = model(ids)[:, :-1].transpose(1, 2)
    return F.cross_entropy(scores, ids[:, 1:], ignore_index=0, reduction="none").mean(1)


def test_means_over_the_padded_length_are_named() -> None:
    with pytest.raises(
        dpoptim.SamplesInteractError, match="divide by each record's own count"
    ) as raised:
        attach(Words(), characters(equal=True), loss=means_of_padded_length, collate_fn=padding)
    assert "sorted or shuffled" not in str(raised.value)


def test_how_losses_of_private_records_differ_is_not_told() -> None:
    """Whether they are in another order, or padded, may be a matter of these records."""
    found = set()
    for collate in (sorted_batch, None):
        loss = losses if collate else balanced
        data = Records([(torch.randn(5), i % 3, object()) for i in range(N)])

        def of_two(records: list[Any], collate: Any = collate) -> Any:
            return (collate or default_collate)([record[:2] for record in records])

        with pytest.raises(dpoptim.SamplesInteractError, match="on records of the") as raised:
            attach(classifier(), data, loss=loss, collate_fn=of_two)
        found.add(str(raised.value))
    assert len(found) == 1


def needs_others(model: nn.Module, batch: Any) -> Tensor:
    found = losses(model, batch)
    if len(found) < 2:
        raise ValueError(f"no deviation of {float(found.sum())}")
    return (found - found.mean()) / found.std()


def sorted_batch(records: list[Any]) -> Any:
    return default_collate(sorted(records, key=lambda record: float(record[0].sum())))


@pytest.mark.parametrize("way", ["sorted", "neighbours"])
def test_losses_out_of_order_are_found(way: str) -> None:
    """Sums do not tell, but empty slots are left out by their places."""

    def neighbours(model: nn.Module, batch: Any) -> Tensor:
        found = losses(model, batch)
        return found - 0.5 * found.roll(1)

    options = {"loss": losses, "collate_fn": sorted_batch} if way == "sorted" else {}
    said = "sorted or shuffled" if way == "sorted" else "depend on other records"
    with pytest.raises(dpoptim.SamplesInteractError, match=said):
        attach(classifier(), table(), **({"loss": neighbours} | options))


def test_a_loss_that_needs_several_records_says_so() -> None:
    """And what it raised is not quoted."""
    with pytest.raises(dpoptim.SamplesInteractError, match="standardises by the batch") as refusal:
        attach(classifier(), table(), loss=needs_others)
    assert "no deviation" not in str(refusal.value)


def test_loss_reductions_are_found_and_must_agree() -> None:
    def mean(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, batch).mean()

    with pytest.raises(
        dpoptim.PrivacyError,
        match='is a mean over the batch, but attach was told loss_reduction="sum"',
    ):
        attach(classifier(), table(), loss=mean, loss_reduction="sum")
    model = classifier()
    with attach(model, table(), loss=lambda m, b: losses(m, b).sum() ** 1.0) as private:
        batch = next(private.batches())
        private.backward(losses(model, batch).sum() ** 1.0)  # which no graph shows
        assert ("scalar", "sum") in private._engine.handed_over


def test_losses_that_are_never_finite_are_refused_without_a_word_of_records() -> None:
    with pytest.raises(
        dpoptim.PrivacyError, match=r"losses of the records .* not finite(.|\n)*Fix"
    ):
        attach(classifier(), table(), loss=lambda m, b: losses(m, b) / 0.0)


def complex_losses(model: nn.Module, batch: Any) -> Tensor:
    return torch.fft.fft(model(batch[0])).square().sum(1)


def test_complex_losses_are_refused() -> None:
    """They trained nothing, without a word."""
    with pytest.raises(dpoptim.PrivacyError, match=r"complex(.|\n)*Fix"):
        attach(classifier(), table(), loss=complex_losses)
    model = classifier()
    with (
        attach(model, table(), loss=None) as private,
        pytest.raises(dpoptim.PrivacyError, match=r"complex(.|\n)*Fix"),
    ):
        private.backward(complex_losses(model, next(private.batches())))


def test_a_loss_of_another_shape_is_refused() -> None:
    with pytest.raises(dpoptim.PrivacyError, match=r"one value for each record.*Fix"):
        attach(classifier(), table(), loss=lambda m, b: m(b[0]))


# ---- what a model remembers ---------------------------------------------------------------------


class RunningMean(nn.Module):
    """Normalises by what it saw before: in a buffer, behind autograd's back, or in an
    attribute.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.register_buffer("seen", torch.zeros(5))
        self.hidden = torch.zeros(5)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "attribute":
            self.hidden = 0.5 * self.hidden + 0.5 * x.detach().mean(0)
            return x - self.hidden
        (self.seen if self.where == "buffer" else self.seen.data).lerp_(x.detach().mean(0), 0.5)
        return x - self.seen


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("buffer", "writes into '0.seen'"),
        ("data", "writes into '0.seen'"),
        ("attribute", "second time"),
    ],
)
def test_couplings_through_what_a_model_remembers_are_found(where: str, said: str) -> None:
    model = nn.Sequential(RunningMean(where), nn.Linear(5, 3))
    with pytest.raises(dpoptim.PrivacyError, match=f"{said}|records are mixed in the forward pass"):
        attach(model, table(), loss=losses)
    with pytest.raises(dpoptim.SamplesInteractError, match=said):
        dpoptim.check(model, losses, table()[:6])


# ---- forms of records ---------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Example:
    x: Tensor
    y: int


FORMS: dict[str, tuple[Callable[[Tensor, int], Any], Loss]] = {
    "tuple": (lambda x, y: (x, y), losses),
    "list": (lambda x, y: [x, y], losses),
    "named tuple": (Pair, lambda m, b: losses(m, (b.x, b.y))),
    "mapping": (lambda x, y: {"x": x, "y": y}, lambda m, b: losses(m, (b["x"], b["y"]))),
    "nested": (
        lambda x, y: {"in": {"x": x}, "out": (y,)},
        lambda m, b: losses(m, (b["in"]["x"], b["out"][0])),
    ),
    "arrays": (lambda x, y: (x.numpy(), np.int64(y)), losses),
    "dataclass": (Example, lambda m, b: losses(m, b)),
}


def gathered(batch: list[Any]) -> Any:
    if dataclasses.is_dataclass(batch[0]):
        return torch.stack([e.x for e in batch]), torch.tensor([e.y for e in batch])
    return torch.utils.data.default_collate(batch)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS)
def test_records_of_any_form_are_made_up_and_checked(form: str) -> None:
    make, loss = FORMS[form]
    records = Records([make(x, int(y)) for x, y in zip(*table().tensors, strict=True)])
    with attach(classifier(), records, loss=loss, collate_fn=gathered) as private:
        assert "(on made-up records" in trusted(private)[0]
        assert "one bit about the program" in trusted(private)[0]
    with pytest.raises(dpoptim.SamplesInteractError):
        attach(
            classifier(),
            records,
            loss=lambda m, b: loss(m, b) * loss(m, b).mean(),
            collate_fn=gathered,
        )


def spelled(batch: list[str]) -> tuple[Tensor, Tensor]:
    return torch.stack([torch.full((5,), float(len(word))) for word in batch]), torch.zeros(
        len(batch)
    ).long()


def test_records_that_nobody_can_make_up_are_taken_from_the_data() -> None:
    words = Records(["a" * (i + 1) for i in range(N)])
    with attach(classifier(), words, loss=losses, collate_fn=spelled) as private:
        assert "a few of the data set" in trusted(private)[0]
        assert "nobody can make up str" in trusted(private)[0]
    with pytest.raises(dpoptim.SamplesInteractError, match="records of the data set"):
        attach(classifier(), words, loss=balanced_by_length, collate_fn=spelled)


def steep_by_others(model: nn.Module, batch: Any) -> Tensor:
    """Return of each record the right value, with a gradient as steep as the batch has it."""
    own = losses(model, batch)
    return own + batch[0].square().mean() * (own - own.detach())


def test_where_private_records_meet_is_not_told() -> None:
    """By what weights, or at which of the model's parameters, is a matter of the records."""
    for data, collate, named in (
        (Records(["a" * (i + 1) for i in range(N)]), spelled, False),
        (Records([(torch.randn(5), 1) for _ in range(N)]), None, True),
    ):
        with pytest.raises(dpoptim.SamplesInteractError, match="mixed|weighs") as raised:
            attach(classifier(), data, loss=steep_by_others, collate_fn=collate)
        said = str(raised.value)
        assert ("how much a record weighs in the loss depends on the others" in said) == named
        assert not any(name in said for name, _ in classifier().named_parameters())


def balanced_by_length(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, batch) * batch[0].mean()


def test_errors_on_private_records_say_nothing_of_them() -> None:
    def raising(model: nn.Module, batch: Any) -> Tensor:
        raise ValueError(f"cannot handle {batch}")

    secret = Records([("secret", 0)] * N)
    with pytest.raises(
        dpoptim.PrivacyError, match="raised ValueError on records of train_set"
    ) as caught:
        attach(classifier(), secret, loss=raising)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_the_values_of_records_are_not_used_for_made_up_ones() -> None:
    """Neither their labels nor how many of them are padding."""
    seen: list[Any] = []

    def noting(model: nn.Module, batch: Any) -> Tensor:
        seen.append([t.clone() for t in batch])
        return losses(model, batch)

    for value in (0.0, 5.0):
        data = TensorDataset(torch.full((N, 5), value), torch.zeros(N).long())
        with attach(classifier(), data, loss=noting):
            pass
    half = len(seen) // 2
    for first, second in zip(seen[:half], seen[half:], strict=True):
        constant = [bool((batch[0] == batch[0].flatten()[0]).all()) for batch in (first, second)]
        assert constant[0] == constant[1]
        if not constant[0]:
            numbers = zip(first, second, strict=True)
            assert all(torch.equal(a.nan_to_num(-9), b.nan_to_num(-9)) for a, b in numbers)


def test_nothing_about_model_or_random_numbers_changes() -> None:
    model = classifier().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    data = table()
    random_before = torch.get_rng_state()
    check_loss(
        model, losses, data, data[0], None, None, units_of(data, 1, "mean", None),
        Isolation.of("rules"), wrapping_of(model), ALONE, expected=6, by_name=False,
    )  # fmt: skip
    assert torch.equal(torch.get_rng_state(), random_before)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


# ---- several rows -------------------------------------------------------------------------------


def within_records(model: nn.Module, batch: Any) -> Tensor:
    """Pairs of rows are compared with each other: one loss for each pair."""
    z = F.normalize(model(batch[0]), dim=1).unflatten(0, (-1, 2))
    return (z[:, 0] * z[:, 1]).sum(1)


def across_records(model: nn.Module, batch: Any) -> Tensor:
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)) ^ 1, reduction="none")


def test_rows_of_a_record_may_meet_each_other() -> None:
    torch.manual_seed(0)
    views = TensorDataset(torch.randn(N, 2, 5), (torch.arange(2 * N) % 3).view(N, 2))
    for loss in (losses, within_records):
        with attach(classifier(), views, loss=loss, rows_per_record=2) as private:
            assert "(on made-up records" in trusted(private)[0]
    with pytest.raises(dpoptim.SamplesInteractError):
        attach(classifier(), views, loss=across_records, rows_per_record=2)
    owners = [i // 3 for i in range(N)]
    with attach(classifier(), table(), loss=losses, rows_per_record=3, persons=owners) as private:
        assert "(on made-up records" in trusted(private)[0]
    with pytest.raises(dpoptim.SamplesInteractError):
        attach(classifier(), table(), loss=centred, rows_per_record=3, persons=owners)


def test_the_first_records_of_a_stream_are_tried() -> None:
    plan = dpoptim.DPFTRL(clip_norm=1.0, order="given").plan(
        n=N, batch_size=6, epochs=1, noise_multiplier=1.0, delta=1e-5, neighboring="zero-out"
    )
    records = list(zip(*table().tensors, strict=True))
    for loss in (losses, centred):
        model, seen = classifier(), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if loss is centred:
            with pytest.raises(dpoptim.SamplesInteractError):
                dpoptim.attach(plan, model, optimizer, iter(records), loss=loss)
            continue
        with dpoptim.attach(plan, model, optimizer, iter(records), loss=loss) as private:
            for batch in private.batches():
                seen += len(batch[0])
                private.backward(loss(model, batch))
                optimizer.step()
        assert seen == N


def test_what_autocast_would_round_away_is_compared_without_it() -> None:
    """A fiftieth more of each record's gradient where there are others: bfloat16's digits."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            own = (model(batch[0]).float().sum(1) - 9).square()
        return own + (0.02 if len(own) > 1 else 0.0) * (own - own.detach())

    with pytest.raises(dpoptim.SamplesInteractError):
        attach(nn.Linear(6, 3), TensorDataset(torch.randn(N, 6), torch.arange(N) % 3), loss=loss)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")  # as ever


@pytest.mark.parametrize("coupled", [False, True])
def test_losses_of_few_digits_may_round_otherwise_in_a_batch(coupled: bool) -> None:
    """By what bfloat16 rounds to; records that move others' losses by as little are mixed."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        own = (model(batch[0]).float().sum(1) - 9).square()
        beside = own.detach().sin().mean() if coupled else 0.25
        return own * (1 + 2.0**-6 * beside * (len(own) > 1))

    model = nn.Linear(6, 3).to(torch.bfloat16)
    data = TensorDataset(torch.randn(N, 6).to(torch.bfloat16), torch.arange(N) % 3)
    with pytest.raises(dpoptim.SamplesInteractError) if coupled else nullcontext():
        attach(model, data, loss=loss)


def test_a_mean_over_labels_in_few_digits_has_no_factor_to_round() -> None:
    """So records need not pass alone, which would be warned of."""

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    sums = []
    for loss in (mean, lambda m, b: F.cross_entropy(m(b[0]).float(), b[1], reduction="none")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).to(torch.bfloat16)
        data = TensorDataset(torch.randn(N, 6).to(torch.bfloat16), torch.arange(N) % 3)
        with attach(model, data, loss=loss, noise_seed=0) as private:
            batch = next(private.batches())
            private.backward(loss(model, batch))
            private.optimizers[0].step()
        sums.append(model[0].weight.detach().clone())
    assert torch.equal(*sums)


@pytest.mark.parametrize("narrow", ["stored", "base", "autocast"])
def test_a_mean_in_few_digits_is_taken_of_each_record_alone(narrow: str) -> None:
    """Where a step would refuse it, attach already goes another way."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow == "autocast"):
            scores = model(batch[0])
        return F.cross_entropy(scores.float(), batch[1], reduction="none").mean()

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    x = torch.randn(N, 6)
    if narrow == "stored":
        model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    if narrow == "base":
        model = nn.Sequential(model[0], Halved(), model[1].to(torch.bfloat16).requires_grad_(False))
    data = TensorDataset(x, torch.arange(N) % 3)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="with a loss that is a mean"):
        private = dpoptim.attach(plan, model, optimizer, data, loss=loss)
    with private:
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
    with pytest.raises(dpoptim.SamplesInteractError, match="one loss for each record"):
        attach(model, data, loss=loss, isolation="rules")


@pytest.mark.parametrize("weight", [3e-2, 1e-2])
def test_a_small_mixing_term_is_found_though_it_names_the_model_itself(weight: float) -> None:
    """A loss that balances gates by a closure's name: a copy of the model has no part in that."""
    torch.manual_seed(0)
    words, gate = nn.Embedding(10, 8), nn.Linear(8, 3)
    net = nn.Sequential(words, nn.Flatten(), nn.Linear(40, 8), gate)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        shares = gate(words(batch[0]).mean(1)).softmax(-1).mean(0)
        return F.cross_entropy(model(batch[0]), batch[1]) + weight * 4 * shares.square().sum()

    with pytest.raises(dpoptim.SamplesInteractError):
        dpoptim.check(net, loss, (torch.randint(0, 10, (8, 5)), torch.arange(8) % 3))


class Halved(nn.Module):
    """Half as many digits."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)


@pytest.mark.parametrize("coupled", [False, True])
def test_losses_under_autocast_round_as_it_does(coupled: bool) -> None:
    """Other than in float32, by more than a check of float32 allows; records are found mixed all
    the same.
    """

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(batch[0])
        losses = F.cross_entropy(scores.float(), batch[1], reduction="none")
        return losses * (1 + scores.float().square().mean()) if coupled else losses

    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        data = TensorDataset(torch.randn(N, 6), torch.arange(N) % 3)
        if coupled:
            with pytest.raises(dpoptim.SamplesInteractError):
                attach(model, data, loss=loss)
        else:
            with attach(model, data, loss=loss) as private:
                assert not any("loss not checked" in item.text for item in private.basis)


def test_a_run_by_a_slower_way_for_its_loss_is_entered_again() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") + penalty

    model, data = nn.Linear(6, 3), TensorDataset(torch.randn(N, 6), torch.arange(N) % 3)
    with pytest.warns(dpoptim.IsolationWarning, match="pass alone.*outside its module.*'alone'"):
        private = attach(model, data, loss=loss)
    for _ in range(2):
        with private:
            for batch in private.batches():
                private.backward(loss(model, batch))
                private.optimizers[0].step()
                if private.finished_step:
                    break
    assert private.steps_done == 2


def test_a_run_by_a_slower_way_for_its_loss_is_taken_up_as_the_hint_says(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") + penalty

    model, data = nn.Linear(6, 3), TensorDataset(torch.randn(N, 6), torch.arange(N) % 3)
    fixes: list[dict[str, Any]] = [{"loss": loss}, {"isolation": "alone"}]
    with pytest.warns(dpoptim.IsolationWarning), attach(model, data, loss=loss) as private:
        private.save(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="the same loss=, or isolation='alone', the way in which"):
        attach(model, data, resume=tmp_path / "checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dpoptim.IsolationWarning)
        for fix in fixes:
            with attach(model, data, resume=tmp_path / "checkpoint", **fix) as private:
                assert private.steps_done == 0
                private.save(tmp_path / "checkpoint")


def test_rows_of_one_record_take_no_way_that_has_records_alone() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") + penalty

    model, data = nn.Linear(6, 3), TensorDataset(torch.randn(N, 2, 6), torch.ones(N, 2).long())
    with pytest.raises(dpoptim.SamplesInteractError, match="outside its module"):
        attach(model, data, loss=loss, rows_per_record=2)


def test_how_many_losses_private_records_have_is_not_told() -> None:
    """The number of those that have something in common, which no made-up record has."""

    def of_some(model: nn.Module, batch: Any) -> Tensor:
        found = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        some = torch.tensor([int(kind) == 12_345 for kind in batch[2]])
        return found[some] if some.any() else found

    kinds = torch.tensor([12_345, 0, 0, 0] * (N // 4))
    data = TensorDataset(torch.randn(N, 5), torch.arange(N) % 3, kinds)
    with pytest.raises(dpoptim.SamplesInteractError, match="on records of the data set") as raised:
        attach(nn.Linear(5, 3), data, loss=of_some)
    assert "it returned another shape." in str(raised.value)


def with_boxes_alone(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Losses over how many records of the batch have a box; a constant where none has."""
    x, has = batch[0], batch[1] > 0
    if not has.any():
        return torch.zeros(len(x))
    return model(x).square().sum(1) * has / has.float().mean()


@pytest.mark.parametrize("reduce", [lambda losses: losses, Tensor.mean])
def test_losses_without_a_graph_for_some_record_are_compared(
    reduce: Callable[[Tensor], Tensor],
) -> None:
    """A constant has no gradient, and the others' are still told apart."""
    torch.manual_seed(0)
    records = TensorDataset(torch.randn(N, WIDTH), torch.ones(N, dtype=torch.long))
    with pytest.raises(dpoptim.SamplesInteractError, match="on made-up records"):
        attach(
            nn.Linear(WIDTH, 3),
            records,
            loss=lambda model, batch: reduce(with_boxes_alone(model, batch)),
            isolation="rules",
        )


def test_losses_that_a_shared_coin_makes_zero_are_tried_on_other_records() -> None:
    """Trials' coins show tails; what is seen where they do not is padding."""
    words = nn.Embedding(WORDS, WIDTH)
    records = [torch.randint(WORDS, (7,)) for _ in range(N)]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean((1, 2)) * (torch.rand(()) < 0.1)

    with pytest.raises(dpoptim.SamplesInteractError, match="unequal lengths"):
        attach(
            words,
            records,
            loss=loss,
            isolation="rules",
            collate_fn=lambda rows: pad_sequence(rows, batch_first=True),
        )


# ---- large batches ------------------------------------------------------------------------------


def centred_if(wanted: Callable[[int], bool]) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x - x.mean(0) if wanted(len(x)) else x), y, reduction="none")

    return loss


@pytest.mark.parametrize("wanted", [lambda n: n >= 8, lambda n: n % 4 == 0])
def test_mixing_that_begins_with_some_number_of_records_is_found(
    wanted: Callable[[int], bool],
) -> None:
    """It moved the sum by 18 clip norms: trials had five records."""
    with pytest.raises(dpoptim.SamplesInteractError, match="16 in a batch .fewer showed nothing"):
        attach(classifier(), table(), loss=centred_if(wanted))


def test_the_sizes_of_batches_that_were_tried_are_named() -> None:
    """Many records of a model that takes long would double the time that attaching takes."""

    def said(model: nn.Module) -> str:
        with attach(model, table(), loss=losses) as private:
            return trusted(private)[0]

    assert "in batches of 1, 6 and 16;" in said(classifier())
    wide = nn.Sequential(nn.Linear(5, 3000), nn.Tanh(), nn.Linear(3000, 3000), nn.Linear(3000, 3))
    assert "in batches of 1 and 7;" in said(wide)


# ---- what a collate function does to a batch ----------------------------------------------------


def cut_to(length: Callable[[list[int]], float]) -> Callable[[list[Any]], Any]:
    def collate(batch: list[Any]) -> Any:
        most = max(1, int(length([len(x) for x, _ in batch])))
        return padding([(x[:most], y) for x, y in batch])

    return collate


def mean_words(model: nn.Module, batch: Any) -> Tensor:
    there = torch.arange(batch[0].shape[1]) < batch[1][:, None]
    h = (model.embed(batch[0]) * there[..., None]).sum(1) / batch[1][:, None]
    return F.cross_entropy(model.head(h), batch[2], reduction="none")


@pytest.mark.parametrize("share", [10, 90, 95])
def test_lengths_that_some_of_a_batch_decide_are_found(share: int) -> None:
    """The 90th percentile moved the sum by 9 clip norms: no trial had one long record in ten."""
    # where no records of the data set could show it
    data = Records([(torch.tensor([1, 2, 3, 4]), i % 3) for i in range(N)])
    with pytest.raises(dpoptim.SamplesInteractError, match="unequal lengths"):
        attach(
            Sequences(),
            data,
            loss=mean_words,
            collate_fn=cut_to(lambda lengths: float(np.percentile(lengths, share))),
        )


def test_batches_that_pad_alone_take_no_further_runs_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool | None] = []
    honest = lone_lengths.only_padded
    monkeypatch.setattr(
        lone_lengths, "only_padded", lambda *given: seen.append(honest(*given)) or seen[-1]
    )
    data = characters(equal=True)
    for collate in (padding, cut_to(lambda lengths: 100)):
        with attach(Sequences(), data, loss=mean_words, collate_fn=collate):
            assert seen == 6 * [True]
        seen.clear()


def test_shared_numbers_of_any_size_that_mix_records_are_found() -> None:
    def collate(batch: list[Any]) -> Any:
        x, y = default_collate(batch)
        return (x + x.roll(1, 0) if 0.2 < float(torch.rand(())) < 0.25 else x), y

    with pytest.raises(dpoptim.SamplesInteractError, match="numbers that collate_fn draws"):
        attach(classifier(), table(), loss=losses, collate_fn=collate)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.default_rng(0).random])
def test_collate_functions_that_draw_where_nobody_sees_are_refused(
    draw: Callable[[], float],
) -> None:
    """Mixing one batch in twenty was accepted in two runs of five."""

    def collate(batch: list[Any]) -> Any:
        x, y = default_collate(batch)
        return (x + x.roll(1, 0) if draw() < 1e-9 else x), y

    with pytest.raises(dpoptim.SamplesInteractError, match=r"numpy's or Python's(.|\n)*Fix"):
        attach(classifier(), table(), loss=losses, collate_fn=collate)


def sparse_batch(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in rows]).to_sparse(), torch.stack([y for _, y in rows])


@pytest.mark.parametrize("records", [True, False], ids=["records", "batches"])
def test_sparse_tensors_are_refused_in_words(records: bool) -> None:
    x, y = torch.eye(6).repeat(4, 1), torch.arange(24) % 3
    data = [
        (each.to_sparse() if records else each, label) for each, label in zip(x, y, strict=True)
    ]
    model = nn.Linear(6, 3)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=24, batch_size=8, steps=1, noise_multiplier=1.0, delta=1e-5
    )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].to_dense()), batch[1], reduction="none")

    options: Any = {} if records else {"collate_fn": sparse_batch}
    with pytest.raises(dpoptim.PrivacyError, match=r"sparse tensors(.|\n)*to_dense"):
        dpoptim.attach(plan, model, torch.optim.SGD(model.parameters()), data, loss=loss, **options)
