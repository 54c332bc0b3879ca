"""Losses are tried on records that a data set may have none of: other ranges, flags, no numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import dpoptim
from dpoptim.training.batches.records import is_flag, leaves_of, made_up
from dpoptim.training.trials.isolation import IsolationWarning
from dpoptim.training.trials.missing_numbers import Missing, missing_flags
from dpoptim.training.trials.variations import POSITIVE, RANGES, with_ranges

N, FEATURES = 24, 6
WITHIN = torch.rand(N, FEATURES) * 0.9 + 0.05  # none zero, none negative, none above 1
LABELS = torch.zeros(N, dtype=torch.int64)
KNOWN = torch.ones(N, dtype=torch.bool)


def attach(loss: Any, data: Any, model: nn.Module | None = None, collate: Any = None) -> str:
    """What is said of the loss."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 3) if model is None else model
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, data, loss=loss, collate_fn=collate) as private:
        return next(item.text for item in private.basis if "was checked" in item.text)


def bytes_or_not(x: Tensor) -> Tensor:
    return x / 255 if x.max() > 1 else x


def in_python(x: Tensor) -> Tensor:
    return x / 255 if x.max().item() > 1 else x


def signed(x: Tensor) -> Tensor:
    return (x + 1) / 2 if x.min() < 0 else x * 5


def without_a_zero(x: Tensor) -> Tensor:
    return x * 0.01 if (x.norm(dim=1) < 0.1).any() else x


class Before(nn.Linear):
    """A layer before which a batch is changed."""

    change: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.change(x))


@pytest.mark.parametrize("change", [bytes_or_not, in_python, signed, without_a_zero])
@pytest.mark.parametrize("place", ["loss", "model", "collate_fn"])
@pytest.mark.thinned(3)
def test_what_all_records_are_is_not_taken_for_what_all_will_be(change: Any, place: str) -> None:
    """One record with another number moved the sum by 264 clip norms, and nothing was said."""
    model, collate = Before(48, 3), None
    model.change = change if place == "model" else nn.Identity()
    if place == "collate_fn":

        def collate(rows: list[Any]) -> Any:
            x, y = default_collate(rows)
            return change(x), y

    def loss(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(change(b[0]) if place == "loss" else b[0]), b[1], reduction="none")

    # a number that the model itself compares is tried without the loss
    with pytest.raises(
        (dpoptim.SamplesInteractError, IsolationWarning),
        match="some within 0 and 1, some negative|numbers in records by which the model",
    ):
        attach(loss, TensorDataset(WITHIN.repeat(1, 8), LABELS), model, collate)


def test_whole_numbers_that_the_largest_is_compared_with_are_tried() -> None:
    """Images in bytes, or in zeros and ones: made-up ones have no 2."""
    images = torch.zeros(N, 48, dtype=torch.uint8)

    def loss(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(bytes_or_not(b[0].float()) + 1), b[1], reduction="none")

    with pytest.raises(dpoptim.SamplesInteractError, match="one that the loss compares"):
        attach(loss, TensorDataset(images, LABELS), nn.Linear(48, 3))


def test_weights_that_are_scaled_where_one_is_large_are_refused() -> None:
    def loss(m: nn.Module, b: Any) -> Tensor:
        x, y, w = b
        w = w / w.max() if w.max() > 100 else w
        return F.cross_entropy(m(x), y, reduction="none") * w

    with pytest.raises(dpoptim.SamplesInteractError, match="made-up records"):
        attach(loss, TensorDataset(WITHIN, LABELS, torch.ones(N)))


def test_each_record_has_another_range() -> None:
    """No bound that all or some records keep, of those that data have by habit, is kept by all."""
    row = torch.zeros(7), np.zeros(3, np.float32), 0.0, 3
    generator = torch.Generator().manual_seed(0)
    invented = [[made_up(row, generator)] for _ in range(5)]
    for record, (changed,) in zip(invented, with_ranges(invented), strict=True):
        kinds = [type(leaf) for _, leaf in leaves_of(changed)]
        assert kinds == [torch.Tensor, np.ndarray, float, int]
        assert changed[3] == record[0][3]
    for place in range(3):
        floats = [torch.as_tensor(row[place]) for (row,) in with_ranges(invented)]
        for holds in (lambda x: x > 1, lambda x: x < 0, lambda x: x == 0, lambda x: x >= 0):
            assert len({bool(holds(x).any()) for x in floats}) == 2
    assert all(float(torch.as_tensor(r[2])) > 0 for (r,) in with_ranges(invented, POSITIVE))
    assert len(RANGES) == 5, "one a record"


def test_a_loss_of_positive_numbers_is_tried_on_these() -> None:
    """A logarithm of what is negative is none: nothing was tried, and it was said in passing."""

    def loss(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0].log()), b[1], reduction="none")

    said = attach(loss, TensorDataset(WITHIN, LABELS))
    assert "on made-up records, in batches of 1" in said
    with pytest.raises(dpoptim.SamplesInteractError):
        attach(lambda m, b: loss(m, b) * bytes_or_not(b[0]).max(), TensorDataset(WITHIN, LABELS))


def test_a_loss_of_probabilities_is_tried_on_these() -> None:
    """It raises on labels that are none, and so on all that were normal numbers."""

    def loss(m: nn.Module, b: Any) -> Tensor:
        return F.binary_cross_entropy(m(b[0])[:, 0].sigmoid(), b[1], reduction="none")

    data = TensorDataset(WITHIN.repeat(1, 8), WITHIN[:, 0])
    said = attach(loss, data, nn.Linear(48, 1))
    assert "on made-up records, in batches of 1" in said
    assert "not on ones within 0 and 1" not in said
    with pytest.raises(dpoptim.SamplesInteractError, match="made-up records"):
        attach(lambda m, b: loss(m, (bytes_or_not(b[0]), b[1])), data, nn.Linear(48, 1))


def squares(m: nn.Module, b: Any) -> Tensor:
    return m(b[0]).square().mean(1)


BY_FLAGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a share": lambda each, known: (each * known).sum() / known.sum(),
    "clamped": lambda each, known: (each * known).sum() / known.sum().clamp(min=1),
    "picked": lambda each, known: each[known].mean(),
    "all": lambda each, known: each if known.all() else each * 0.01,
    "a mean": lambda each, known: each * known.float().mean(),
}


@pytest.mark.parametrize("name", BY_FLAGS)
def test_flags_are_tried_as_false(name: str) -> None:
    """All were True: one record whose flag was not moved the sum by up to 97 clip norms."""
    data = TensorDataset(WITHIN, KNOWN)
    with pytest.raises((dpoptim.SamplesInteractError, IsolationWarning)) as refused:
        attach(lambda m, b: BY_FLAGS[name](squares(m, b), b[1]), data)
    alone = "records pass alone" in str(refused.value)  # what has no loss by itself is left out
    assert alone or "flags that are False" in str(refused.value)


def test_masks_of_tokens_without_a_name_are_tried() -> None:
    """Records with 2 tokens that count, beside one with 64, moved the sum by 20 clip norms."""
    mask = torch.ones(N, FEATURES, dtype=torch.bool)
    data = TensorDataset(WITHIN, mask)
    model = nn.Sequential(nn.Unflatten(1, (FEATURES, 1)), nn.Linear(1, 1))

    def batch_mean(m: nn.Module, b: Any) -> Tensor:
        each = m(b[0]).squeeze(2).square()
        return (each * b[1]).sum() / b[1].sum()

    def own(m: nn.Module, b: Any) -> Tensor:
        each = m(b[0]).squeeze(2).square()
        return (each * b[1]).sum(1) / b[1].sum(1)

    with pytest.raises(dpoptim.SamplesInteractError, match="flags that are False"):
        attach(batch_mean, data, model)
    assert "flags" not in attach(own, data, model)


def test_a_mask_that_says_that_nothing_counts_shows_the_others() -> None:
    """Where True is padding, made-up records were of nothing else, and nothing was tried."""
    layer = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
    x, padding = torch.randn(N, 4, FEATURES), torch.zeros(N, 4, dtype=torch.bool)

    def loss(m: nn.Module, b: Any) -> Tensor:
        attended = m(b[0], b[0], b[0], key_padding_mask=b[1], need_weights=False)[0]
        return attended.square().masked_fill(b[1].unsqueeze(2), 0).sum((1, 2))

    assert "on made-up records" in attach(loss, TensorDataset(x, padding), layer)


def test_masks_of_which_each_record_has_as_many_are_tried() -> None:
    """Of a masked autoencoder's records, what is seen is put in one tensor."""
    model, masks = nn.Linear(1, 1), torch.tensor([True, False, True, False])

    def loss(m: nn.Module, b: Any) -> Tensor:
        x, hidden = b
        seen = x[~hidden].reshape(len(x), -1, 1)
        return (m(seen).mean(1) - x[hidden].reshape(len(x), -1)).square().mean(1)

    data = TensorDataset(WITHIN[:, :4], masks.repeat(N, 1))
    said = attach(loss, data, model)
    assert "on made-up records, in batches" in said
    assert "not on ones with flags that are False" in said
    with pytest.raises(dpoptim.SamplesInteractError, match="made-up records"):
        attach(lambda m, b: loss(m, b) * loss(m, b).mean(), data, model)


def test_flags_that_a_program_does_not_take_are_named() -> None:
    def loss(m: nn.Module, b: Any) -> Tensor:
        if not b[1].all():
            raise ValueError
        return squares(m, b)

    assert "not on ones with flags that are False: Val" in attach(
        loss, TensorDataset(WITHIN, KNOWN)
    )


def test_what_is_a_flag() -> None:
    row = {"x": torch.ones(2), "y": 1, "valid": True, "own": np.ones(3, bool), "mask": 1.0}
    assert [path[0] for path, leaf in leaves_of(row) if is_flag(path, leaf)] == [
        *("valid", "own", "mask")
    ]
    flags = missing_flags(row)
    assert isinstance(flags, Missing)
    mixed = [r[0] for r in flags.mixed([[row]] * 5)]
    assert [each["valid"] for each in mixed] == [True, False, True, False, True]
    assert [int(each["own"].sum()) for each in mixed] == [3, 3, 2, 2, 1]
    assert missing_flags({"x": torch.ones(2)}) is None


@pytest.mark.thinned(2)
@pytest.mark.parametrize("features", [2, 8, 30])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_one_record_of_no_numbers_that_stops_the_others_is_refused(
    features: int, number: float
) -> None:
    """With 8 features all but one record had some that were none: 82 clip norms, and no word."""
    x = torch.randn(N, features)

    def loss(m: nn.Module, b: Any) -> Tensor:
        each = F.cross_entropy(m(b[0]), b[1], reduction="none")
        return each * torch.isfinite(each).all()

    def zeroed(m: nn.Module, b: Any) -> Tensor:
        bad = b[0].isnan().any() if number != number else b[0].isinf().any()
        return F.cross_entropy(m(b[0] * 0 if bad else b[0]), b[1], reduction="none")

    for each in (loss, zeroed):
        with pytest.raises(dpoptim.SamplesInteractError, match="missing numbers"):
            attach(each, TensorDataset(x, LABELS), nn.Linear(features, 3))


def test_gradients_of_a_mean_that_is_no_number_are_compared() -> None:
    """A mean has no value beside such a record, but the others' gradients; here it has none."""

    def mean(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]), b[1])

    def all_or_nothing(m: nn.Module, b: Any) -> Tensor:
        each = F.cross_entropy(m(b[0]), b[1], reduction="none")
        return each.mean() * each.isfinite().all()

    data = TensorDataset(WITHIN, LABELS)
    assert "NotFinite" not in attach(mean, data)
    with pytest.raises(IsolationWarning, match="records pass alone"):
        attach(all_or_nothing, data)


@pytest.mark.parametrize("change", [bytes_or_not, in_python, signed, without_a_zero])
def test_models_alone_are_tried_on_other_ranges(change: Any) -> None:
    """Without a loss, too, one record in a model moved the sum by 12 to 24 clip norms."""
    model = Before(48, 3)
    model.change = change
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(WITHIN.repeat(1, 8), LABELS)
    with pytest.raises((dpoptim.SamplesInteractError, IsolationWarning)):
        dpoptim.attach(plan, model, optimizer, data)
