"""Hold-outs of a model in training: records of every shape, and what is refused."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import dpoptim
from dpoptim.privacy_unit import Unit
from dpoptim.training.private_training import PrivateTraining

N, COST = 40, {"epsilon": 50.0, "noise_seed": 0}


class Classifier(nn.Module):
    """By the longest token; returns what Hugging Face's models return."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        kept = attention_mask[:, :, None]
        mean = (self.embed(input_ids) * kept).sum(1) / kept.sum(1)
        return SimpleNamespace(logits=self.head(mean))


class Sentences(Dataset[Any]):
    """Lists of tokens, of different lengths, as a tokenizer leaves them."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 1 + index % 5
        ids = [(3 * index + k) % 20 for k in range(length)]
        return {"input_ids": ids, "attention_mask": [1] * length, "labels": index % 3}


def padded(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(record["input_ids"]) for record in records)
    return {
        "labels": torch.tensor([record["labels"] for record in records]),
        **{
            name: torch.tensor(
                [record[name] + [0] * (longest - len(record[name])) for record in records]
            )
            for name in ("input_ids", "attention_mask")
        },
    }


def in_training(
    model: nn.Module, data: Dataset[Any], use: Callable[[PrivateTraining], Any], **options: Any
) -> Any:
    plan = dpoptim.DPSGD(1.0).plan(
        n=N, batch_size=10, steps=3, delta=1e-5, noise_multiplier=1.0, neighboring="zero-out"
    )
    plan = dataclasses.replace(plan, unit=options.pop("unit", plan.unit))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, data, **options) as private:
        found = use(private)
        private.finish()
    return found


def test_dictionaries_are_collated_as_the_run_does_and_scored_by_their_labels() -> None:
    torch.manual_seed(0)
    model = Classifier()
    batch = padded([Sentences()[i] for i in range(N)])
    labels = batch.pop("labels")
    predicted = model(**batch).logits.argmax(1)
    true = np.zeros((3, 3))
    np.add.at(true, (labels.numpy(), predicted.numpy()), 1)
    scores = in_training(
        model,
        Sentences(),
        lambda private: private.evaluate(Sentences(), **COST),
        collate_fn=padded,
    )
    assert np.abs(scores.confusion - true).max() < 1


class Counted(nn.Module):
    """A model whose output is of no usual kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.layer(x)}


def test_a_function_says_what_outputs_and_target_are() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(N, 4), torch.arange(N) % 3
    model, lengths = Counted(), list[int]()

    def outputs(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        lengths.append(len(batch[0]))
        return model(batch[0])["scores"], batch[1]

    predicted = model(x)["scores"].argmax(1)
    data = TensorDataset(x, y)
    scores = in_training(
        model, data, lambda private: private.evaluate(data, outputs=outputs, **COST)
    )
    assert lengths == [1] * N, "records went through the model together"
    assert scores.accuracy.value == pytest.approx(float((predicted == y).double().mean()), abs=0.05)


class NoLabels(Sentences):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {k: torch.tensor(v) for k, v in super().__getitem__(0).items() if k != "labels"}


@pytest.mark.parametrize(
    ("hold_out", "said"),
    [
        (NoLabels(), "without 'labels'. Fix: outputs="),
        (TensorDataset(torch.zeros(5, 4), torch.zeros(5, 2)), "not one number: .* Fix: outputs="),
        (TensorDataset(torch.zeros(0, 4), torch.zeros(0)), "holds no records"),
        ([(torch.zeros(4), "ill")], "not one number: .* Fix: outputs="),
        (DataLoader(TensorDataset(torch.zeros(5, 4))), "got DataLoader. Fix: loader.dataset"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything_is_spent(
    hold_out: Dataset[Any], said: str
) -> None:
    data = TensorDataset(torch.randn(N, 4), torch.arange(N) % 3)
    model = nn.Linear(4, 3)
    with dpoptim.Ledger(neighboring="zero-out") as ledger:

        def refused(private: PrivateTraining) -> None:
            with pytest.raises((ValueError, TypeError), match=said):
                private.evaluate(hold_out, **COST)

        in_training(model, data, refused, ledger=ledger)
        assert not [entry for entry in ledger.entries() if entry.label == "evaluation"]


@pytest.mark.parametrize(
    ("owners", "said"),
    [
        (["a", "", "", *"b" * (N - 3)], "rows without an owner"),
        ([1.0] * N, "must be whole numbers or strings"),
        ([1, 2], "as long as hold_out"),
    ],
)
def test_owners_that_are_unclear_are_refused(owners: list[Any], said: str) -> None:
    """Rows without an owner would be one person: who leaves would bring another's row in."""
    data = TensorDataset(torch.randn(N, 4), torch.arange(N) % 3)

    def refused(private: PrivateTraining) -> None:
        with pytest.raises(ValueError, match=said):
            private.evaluate(data, persons=owners, **COST)

    options: Any = {"unit": Unit("person", 2), "persons": range(N), "rows_per_record": 2}
    in_training(nn.Linear(4, 3), data, refused, **options)


class Masked(Dataset[Any]):
    """Draws as augmentations do: from the common generators, and from one of its own."""

    def __init__(self) -> None:
        self.own, self.drawn = np.random.default_rng(3), list[float]()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.drawn += [self.own.random(), np.random.random(), float(torch.rand(()))]
        return torch.ones(3) * (index % 2), index % 2


def test_nobody_foretells_what_a_hold_out_draws_at_random() -> None:
    """By a public seed, a record more would shift the numbers of all that follow."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        data = Masked()
        train = TensorDataset(torch.ones(N, 3), torch.zeros(N, dtype=torch.long))

        def score(private: PrivateTraining, data: Masked = data) -> None:
            data.drawn.clear()
            before = (data.own.bit_generator.state, torch.get_rng_state().tolist())
            private.evaluate(data, epsilon=50.0)
            assert (data.own.bit_generator.state, torch.get_rng_state().tolist()) == before

        in_training(nn.Linear(3, 2), train, score)
        drawn.append(data.drawn)
    assert len(drawn[0]) == len(drawn[1]) == 3 * N
    assert not np.isin(*drawn).any()


def test_a_record_at_several_places_is_not_scored_at_each() -> None:
    """Fifty places moved the counts by fifty, and the noise hid one."""
    data = TensorDataset(torch.randn(N, 4), torch.arange(N) % 2)
    ledger = dpoptim.Ledger(neighboring="zero-out")

    def scored(private: PrivateTraining) -> None:
        charged = len(ledger.entries())
        for again in (Subset(data, [0] * 50), ConcatDataset([data, data])):
            with pytest.raises(
                dpoptim.PrivacyError, match="hold_out holds a record more than once"
            ):
                private.evaluate(again, epsilon=1.0)
        assert len(ledger.entries()) == charged
        private.evaluate(Subset(data, [*range(9)]), epsilon=1.0)

    in_training(nn.Linear(4, 2), data, scored, ledger=ledger)
