"""Fine-tune low-rank adapters of a tiny GPT-2 on sentences of different lengths, padded batch by
batch.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import dpoptim
from dpoptim.integrations.language import losses_from_labels

VOCABULARY = 32


class Sentences(Dataset[Tensor]):
    """Made-up sentences: counting up from a random token, a random number of tokens long."""

    def __init__(self, records: int) -> None:
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(1, VOCABULARY, (records,), generator=generator).tolist()
        lengths = torch.randint(4, 12, (records,), generator=generator).tolist()
        self.rows = [
            torch.arange(start, start + length) % (VOCABULARY - 1) + 1
            for start, length in zip(starts, lengths, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    """Pad to the longest; padding is masked, so that no record sees how long the others are."""
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens > 0).long(),
        "labels": tokens.where(tokens > 0, -100),
    }


def main() -> None:
    torch.manual_seed(0)
    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    )
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    )
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    plan = dpoptim.DPSGD(clip_norm=0.5).plan(
        n=1_000, batch_size=200, steps=30, epsilon=4.0, delta=1e-5
    )
    train_set = Sentences(1_000)
    with dpoptim.attach(
        plan, model, optimizer, train_set, loss=losses_from_labels, collate_fn=collate
    ) as private:
        for step in private.steps(physical_batch_size=64):
            for batch in step:
                private.backward(losses_from_labels(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        public = losses_from_labels(model.eval(), collate(Sentences(1_050).rows[1_000:]))
    print(f"loss a token on public sentences {float(public.mean()):.2f}, with {private.spent()}")


if __name__ == "__main__":
    main()
