"""Tables of Hugging Face's datasets give lists of numbers: they are made up and checked like
tensors.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset

import dpoptim
from dpoptim.training.batches.repeated_records import (
    have_records_in_common,
    refuse_repeated_records,
)
from integrations.small_language import RECORDS, Sentences, classifier

datasets = pytest.importorskip("datasets")
pytest.importorskip("transformers")

from dpoptim.integrations.language import losses_from_labels  # noqa: E402


def collate(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    assert all(isinstance(record["input_ids"], list) for record in records)
    tokens = pad_sequence([torch.tensor(r["input_ids"]) for r in records], batch_first=True)
    labels = torch.tensor([record["labels"] for record in records])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def length_of_others(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return losses_from_labels(model, batch) * batch["input_ids"].shape[1]


@pytest.mark.filterwarnings("ignore")
def test_lists_of_numbers_are_checked_on_made_up_records_of_unequal_lengths() -> None:
    rows = [{key: value.tolist() for key, value in row.items()} for row in Sentences().rows]
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=0.5).plan(
        n=RECORDS, batch_size=12, steps=2, noise_multiplier=0.3, delta=1e-4
    )
    data = datasets.Dataset.from_list(rows)
    with dpoptim.attach(
        plan, model, optimizer, data, loss=losses_from_labels, collate_fn=collate
    ) as private:
        assert any("made-up records, also of unequal lengths" in a.text for a in private.basis)
    with pytest.raises(dpoptim.SamplesInteractError, match="made-up records of unequal lengths"):
        dpoptim.attach(plan, model, optimizer, data, loss=length_of_others, collate_fn=collate)


def table(records: int = 6) -> Any:
    return datasets.Dataset.from_dict({"x": [[float(i)] * 3 for i in range(records)]})


one = table()
SELECTED = {
    "some": (lambda: one.select([0, 3]), True),
    "some in a row": (lambda: one.select(range(2, 5)), True),
    "shuffled": (lambda: one.shuffle(seed=0), True),
    "split": (lambda: one.train_test_split(2, seed=0)["test"], True),
    "joined": (lambda: datasets.concatenate_datasets([table(), one]), True),
    "without a column": (lambda: one.add_column("y", [0] * 6).remove_columns("y"), True),
    "copied": (table, False),
}


@pytest.mark.parametrize("name", SELECTED)
def test_what_was_selected_or_joined_is_known_again(name: str) -> None:
    make, same = SELECTED[name]
    assert have_records_in_common(make(), one) == same
    assert have_records_in_common(one, Subset(make(), [0, 1])) == (same and name != "joined")
    parts = one.train_test_split(2, seed=0)
    assert not have_records_in_common(parts["test"], parts["train"])
    refuse_repeated_records(make())
    if same:
        with pytest.raises(dpoptim.PrivacyError, match=r"more than once(.|\n)*Fix"):
            refuse_repeated_records(datasets.concatenate_datasets([make(), one]))
    with pytest.raises(dpoptim.PrivacyError, match=r"more than once(.|\n)*Fix"):
        refuse_repeated_records(make().select([0, 1, 1]))


def columns() -> Any:
    return table()["x"]


def split() -> Any:
    return datasets.DatasetDict({"train": table(), "test": table()})


@pytest.mark.parametrize(("make", "served"), [(columns, True), (split, False)])
def test_columns_are_data_sets_and_splits_are_several(make: Any, served: bool) -> None:
    """Both ended in an AttributeError of ours."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(1.0).plan(n=6, batch_size=3, steps=2, noise_multiplier=1.0, delta=1e-3)

    def run() -> None:
        with dpoptim.attach(plan, model, optimizer, make(), collate_fn=torch.tensor) as private:
            for x in private.batches():
                private.backward(model(x)[:, 0])
                optimizer.step()

    if served:
        run()
    else:
        with pytest.raises(TypeError, match=r'DatasetDict(.|\n)*Fix: .*train_set\["train"\]'):
            run()
