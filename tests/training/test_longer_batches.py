"""Records much longer than others: beyond some length a model may treat everybody otherwise."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import dpoptim
from dpoptim.gradients.engine import Engine
from dpoptim.training.private_training import PrivateTraining
from dpoptim.training.trials import length_trials
from dpoptim.training.trials.axes_of_records import axes_of, resized

WORDS, N = 13, 20


class Records(Dataset[Any]):
    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.records[index]


class Attention(nn.Module):
    """Attention that is scaled by the logarithm of the padded length, beyond ``threshold``."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold
        self.embed, self.query = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.embed(ids)
        query, length = self.query(h), ids.shape[1]
        if length > self.threshold:
            query = query * 2 * math.log(length) / math.log(self.threshold)
        weights = (query @ h.transpose(1, 2)).masked_fill(mask[:, None] == 0, -1e9).softmax(-1)
        own = mask[..., None].to(h.dtype)
        return self.head(self.drop(((weights @ h) * own).sum(1) / own.sum(1)))


class Coarse(Attention):
    """A cheaper path for long batches."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.embed(ids)
        if ids.shape[1] > self.threshold:
            h = h.mean(-1, keepdim=True).expand_as(h)
        own = mask[..., None].to(h.dtype)
        return self.head((h * own).sum(1) / own.sum(1))


def collate(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return pad_sequence(rows, batch_first=True), mask


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(*batch), batch[0][:, 0] % 3, reduction="none")


def sentences(longest: int) -> Records:
    torch.manual_seed(0)
    return Records(
        [torch.randint(3, WORDS, (5 + i % 8,)) for i in range(N - 1)] + [longest_of(longest)]
    )


def longest_of(length: int) -> Tensor:
    return torch.randint(3, WORDS, (length,))


def attach(model: nn.Module, data: Records, steps: int = 1, **options: Any) -> PrivateTraining:
    plan = dpoptim.DPSGD(clip_norm=0.1).plan(
        n=N, batch_size=N, steps=steps, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return dpoptim.attach(plan, model, optimizer, data, noise_seed=1, **options)


def trained(private: PrivateTraining, model: nn.Module, **options: Any) -> list[Tensor]:
    with private:
        for batch in private.batches(**options):
            private.backward(loss(model, batch))
            private.optimizers[0].step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", [Attention, Coarse])
def test_a_length_beyond_all_that_were_tried_is_tried_before_it_is_passed(
    kind: type[Attention],
) -> None:
    """One record moved the clipped sum by 4.5 and by 18 clip norms."""
    torch.manual_seed(0)
    model = kind(threshold=100.0)
    with (
        attach(model, sentences(200), loss=loss, collate_fn=collate) as private,
        pytest.raises(dpoptim.SamplesInteractError, match="another length") as found,
    ):
        next(private.batches())
    assert "200" not in str(found.value)
    assert private.steps_done == 0


def test_a_loop_that_begins_again_is_refused_again() -> None:
    """As a notebook's cell does that runs twice."""
    torch.manual_seed(0)
    model = Attention(threshold=100.0)
    with attach(model, sentences(200), steps=3, loss=loss, collate_fn=collate) as private:
        for _ in range(3):
            with pytest.raises(dpoptim.SamplesInteractError, match="another length"):
                next(private.batches())
    assert private.steps_done == 0


@pytest.mark.parametrize("normalised", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_trials_within_a_step_iterate_no_spectral_norm(normalised: Any) -> None:
    """How often it was, public weights would tell."""

    def run(longest: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = Attention(threshold=math.inf)
        model.head = normalised(model.head)
        private = attach(model, sentences(longest), steps=1, loss=loss, collate_fn=collate)
        trained(private, model, physical_batch_size=2)
        return [b.clone() for name, b in model.named_buffers() if name.endswith("_u")]

    ours, others = run(200), run(12)
    assert ours
    # `head` has other weights after a step, and is iterated before
    for one, other in zip(ours, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_model_that_cannot_be_attached_again_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Attention(threshold=math.inf)
    with attach(model, sentences(200), loss=loss, collate_fn=collate) as private:

        def fail(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(Engine, "attach", fail)
        with pytest.raises(MemoryError):
            next(private.batches())
        monkeypatch.undo()
        with pytest.raises((dpoptim.PrivacyError, RuntimeError)):
            next(private.batches())
    assert all(p.grad is None for p in model.parameters())


def test_such_a_length_in_a_later_microbatch_is_found() -> None:
    torch.manual_seed(0)
    with pytest.raises(dpoptim.SamplesInteractError, match="another length"):
        model = Attention(threshold=100.0)
        data = sentences(200)
        private = attach(model, data, steps=3, loss=loss, collate_fn=collate)
        trained(private, model, physical_batch_size=2)


@pytest.mark.parametrize("kind", [Attention, Coarse])
def test_a_length_that_attaching_makes_up_finds_most_such_models(kind: type[Attention]) -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match="unequal lengths"):
        attach(kind(threshold=40.0), sentences(6), loss=loss, collate_fn=collate)


def test_trials_between_batches_leave_training_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, momentum, dropout, noise and coins are those of a run without trials."""

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = Attention(threshold=math.inf)
        private = attach(model, sentences(200), steps=3, loss=loss, collate_fn=collate)
        return trained(private, model, physical_batch_size=2)

    tried = list[object]()
    honest = length_trials.LengthTrials._compare
    monkeypatch.setattr(
        length_trials.LengthTrials, "_compare", lambda self, new: tried.append(honest(self, new))
    )
    with_trials = run()
    assert tried
    monkeypatch.setattr(length_trials.LengthTrials, "see", lambda *_: None)
    for a, b in zip(with_trials, run(), strict=True):
        assert torch.equal(a, b)


def test_lengths_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[object]()
    honest = length_trials.compare_if_possible
    monkeypatch.setattr(
        length_trials,
        "compare_if_possible",
        lambda *given: tried.append(given) or honest(*given),
    )
    model = Attention(threshold=math.inf)
    private = attach(model, sentences(12), steps=3, loss=loss, collate_fn=collate)
    assert len(tried) == 1
    trained(private, model)
    assert len(tried) == 1  # none is beyond what was made up


def test_records_alone_meet_no_other_length() -> None:
    model = Attention(threshold=100.0)
    private = attach(model, sentences(200), loss=loss, collate_fn=collate, isolation="alone")
    trained(private, model)


# ---- lists of boxes -----------------------------------------------------------------------------


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.boxes = nn.Linear(4, 4)

    def forward(self, image: Tensor) -> Tensor:
        return self.boxes(image.flatten(2).mean(2))


def listed(rows: list[Any]) -> dict[str, Any]:
    return {
        "pixel_values": torch.stack([image for image, _, _ in rows]),
        "labels": [{"class_labels": labels, "boxes": boxes} for _, boxes, labels in rows],
    }


def box_losses(model: nn.Module, batch: Any) -> Tensor:
    found = model(batch["pixel_values"])
    return torch.stack(
        [
            (own - each["boxes"]).abs().sum() + 0 * each["class_labels"].sum()
            for own, each in zip(found, batch["labels"], strict=True)
        ]
    )


def by_all_boxes(model: nn.Module, batch: Any) -> Tensor:
    return box_losses(model, batch).sum() / sum(len(each["boxes"]) for each in batch["labels"])


def by_own_boxes(model: nn.Module, batch: Any) -> Tensor:
    counts = torch.tensor([len(each["boxes"]) for each in batch["labels"]])
    return box_losses(model, batch) / counts.clamp(min=1)


@pytest.mark.parametrize("boxes", [1, 2, 4])
def test_a_loss_divided_by_the_boxes_of_a_batch_is_found(boxes: int) -> None:
    """As Hugging Face's DETR divides it, also where all records that are tried have as many."""
    torch.manual_seed(0)
    data = Records(
        [(torch.rand(4, 3, 3), torch.rand(boxes, 4), torch.randint(3, (boxes,))) for _ in range(N)]
    )
    with pytest.raises(dpoptim.SamplesInteractError, match="unequal lengths"):
        attach(Detector(), data, loss=by_all_boxes, collate_fn=listed)
    with attach(Detector(), data, loss=by_own_boxes, collate_fn=listed) as private:
        next(private.batches())


def test_axes_of_one_size_are_varied_together_and_without_those_of_an_image() -> None:
    image, boxes, labels = torch.rand(3, 8, 8), torch.rand(3, 4), torch.zeros(3, dtype=torch.long)
    first, *_ = axes_of((image, boxes, labels))
    assert [sorted(axes) for axes in first[:2]] == [
        [(("0",), 0), (("1",), 0), (("label",), 0)],
        [(("1",), 0), (("label",), 0)],
    ]
    longer = resized((image, boxes, labels), first[1], 7)
    assert [tuple(t.shape) for t in longer] == [(3, 8, 8), (7, 4), (7,)]
    assert torch.equal(longer[1][3:6], boxes)


# ---- what refusals say --------------------------------------------------------------------------


class Dynamic(Attention):
    """Frequencies that the longest record sets, as in RoPE of a dynamic kind."""

    def __init__(self, threshold: float) -> None:
        super().__init__(threshold)
        self.register_buffer("inv_freq", torch.ones(1))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.inv_freq = torch.full((1,), 1.0 if ids.shape[1] <= self.threshold else 0.5)
        return super().forward(ids, mask) * self.inv_freq


def test_frequencies_that_the_longest_record_sets_are_refused_with_what_helps() -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match="original_max_position_embeddings"):
        attach(Dynamic(threshold=40.0), sentences(6), loss=loss, collate_fn=collate)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_a_module_compiled_inside_of_a_model_is_refused_with_what_helps() -> None:
    model = Attention(threshold=math.inf)
    model.head = torch.compile(model.head)  # type: ignore[assignment]
    with pytest.raises(dpoptim.PrivacyError, match=r"m\[0\].compile\(\)"):
        attach(model, sentences(6), loss=loss, collate_fn=collate)


def test_a_loss_by_which_nothing_alone_is_learnt_is_not_told_to_go_alone() -> None:
    class Embeds(Attention):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            h = F.normalize(super().forward(ids, mask), dim=1)
            return h @ h.T

    def contrastive(model: nn.Module, batch: Any) -> Tensor:
        scores = model(*batch)
        return F.cross_entropy(scores, torch.arange(len(scores)))

    with pytest.raises(dpoptim.SamplesInteractError, match="nothing would be learnt") as found:
        attach(Embeds(threshold=math.inf), sentences(6), loss=contrastive, collate_fn=collate)
    assert "isolation=" not in str(found.value)
