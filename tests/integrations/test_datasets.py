"""Tables of Hugging Face's datasets give lists of numbers: they are made up and checked like
tensors.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import dpoptim
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
