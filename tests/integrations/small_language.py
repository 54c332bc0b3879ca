"""A made-up task and tiny random models for the tests of other libraries' loops."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpoptim

VOCABULARY, RECORDS, PAD = 23, 48, 0


def plan(steps: int = 3) -> dpoptim.Plan:
    return dpoptim.DPSGD(clip_norm=0.5).plan(
        n=RECORDS, batch_size=12, steps=steps, noise_multiplier=0.3, delta=1e-4
    )


class Sentences(Dataset[dict[str, Tensor]]):
    """Records of different lengths; the label says whether the first token is large."""

    def __init__(self, records: int = RECORDS, *, language_model: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = []
        for _ in range(records):
            length = int(torch.randint(3, 9, (), generator=generator))
            tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
            labels = tokens.clone() if language_model else (tokens[0] > VOCABULARY // 2).long()
            self.rows.append({"input_ids": tokens, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def collate(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest of the batch, as Hugging Face's collators do."""
    longest = max(len(record["input_ids"]) for record in records)

    def padded(key: str, value: int) -> Tensor:
        rows = [record[key] for record in records]
        return torch.stack(
            [nn.functional.pad(row, (0, longest - len(row)), value=value) for row in rows]
        )

    tokens = padded("input_ids", PAD)
    labels = [record["labels"] for record in records]
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != PAD).long(),
        "labels": padded("labels", -100) if labels[0].dim() else torch.stack(labels),
    }


def classifier() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


class Outputs(dict[str, Tensor]):
    """As those of transformers' models, by names."""

    def __getattr__(self, name: str) -> Tensor:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Bag(nn.Module):
    """Tells records by their tokens in any order: for a loop that would do the same to any model.

    It is tried on made-up records in a tenth of a transformer's time.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 2)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Outputs:
        logits = self.head((torch.tanh(self.tokens(input_ids)) * attention_mask[..., None]).sum(1))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return Outputs(**loss, logits=logits)


def causal() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2, **none)
    )


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    model = causal()
    torch.manual_seed(2)
    return get_peft_model(
        model,
        LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    )
