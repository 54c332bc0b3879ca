"""Train a tiny BERT classifier by Transformers' Trainer, privately: a plan, and another class
name.
"""

import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import dpoptim
from dpoptim.integrations.transformers import PrivateTrainer

VOCABULARY = 32


class Reviews(Dataset[dict[str, Tensor]]):
    """Made-up texts of different lengths; the label says which half of the vocabulary they are
    from.
    """

    def __init__(self, records: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(records):
            length, label = (int(torch.randint(n, (), generator=generator)) for n in (8, 2))
            tokens = torch.randint(1, VOCABULARY // 2, (length + 3,), generator=generator)
            self.rows.append(
                {"input_ids": tokens + label * (VOCABULARY // 2), "labels": torch.tensor(label)}
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.stack([row["labels"] for row in rows])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


def main() -> float:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=2,
    )
    plan = dpoptim.DPSGD(clip_norm=0.5).plan(
        n=800, batch_size=200, epochs=6, epsilon=4.0, delta=1e-5
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=64, learning_rate=5e-3, logging_steps=10,
            report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = PrivateTrainer(
            BertForSequenceClassification(config),
            arguments,
            train_dataset=Reviews(800, seed=0),
            eval_dataset=Reviews(200, seed=1),  # public records
            data_collator=collate,
            compute_metrics=lambda found: {
                "accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())
            },
            plan=plan,
        )
        trainer.train()
        accuracy = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy on public records {accuracy:.3f}, with {trainer.private.spent()}")
    return accuracy


if __name__ == "__main__":
    main()
