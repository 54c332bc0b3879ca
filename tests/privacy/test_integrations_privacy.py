"""Try to falsify the guarantee of other libraries' loops: one record more or less, padded batches,
noise switched off.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dpoptim
from integrations.small_language import Bag, Sentences, causal, collate

transformers = pytest.importorskip("transformers")
from dpoptim.integrations.transformers import PrivateTrainer  # noqa: E402
from dpoptim.integrations.transformers_checkpoints import PrivateCheckpoints  # noqa: E402

C, RECORDS, RATE = 0.7, 10, 0.5


class Without(Sentences):
    """The records but one; the longest of them sets how far all others are padded."""

    def __init__(self, removed: int | None, longest: int) -> None:
        super().__init__(RECORDS, language_model=True)
        tokens = torch.arange(1, 15)
        self.rows[longest] = {"input_ids": tokens, "labels": tokens.clone()}
        if removed is not None:
            del self.rows[removed]


def released_sum(data: Sentences, folder: Path, losses: Any = None) -> Tensor:
    """What one step of the trainer adds up, all records taking part and no noise."""
    plan = dpoptim.DPSGD(clip_norm=C).plan(
        n=RECORDS, batch_size=RECORDS, steps=1, noise_multiplier=0, delta=1e-4
    )
    model = causal().double()
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_strategy="no",
        lr_scheduler_type="constant", disable_tqdm=True,
    )  # fmt: skip
    PrivateTrainer(
        model,
        arguments,
        train_dataset=data,
        data_collator=collate,
        optimizers=(torch.optim.SGD(model.parameters(), lr=RATE), None),
        plan=plan,
        losses=losses,
    ).train()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return (before - after) * (RECORDS / RATE)


@pytest.mark.filterwarnings("ignore")
def test_one_padded_record_moves_the_sum_by_at_most_the_clip_norm(tmp_path: Path) -> None:
    whole = released_sum(Without(None, longest=0), tmp_path / "whole")
    for removed in (0, 3):  # the longest, and another
        part = released_sum(Without(removed, longest=0), tmp_path / str(removed))
        distance = float((whole - part).norm())
        assert 0.5 * C < distance <= C


@pytest.mark.filterwarnings("ignore")
def test_a_mean_over_the_batchs_tokens_is_refused(tmp_path: Path) -> None:
    """The model's own loss, spread over the records: each record's term depends on how long the
    others are.
    """

    def coupled(model: Any, inputs: Any) -> Tensor:
        each = torch.ones(len(inputs["input_ids"]), dtype=torch.float64) / len(inputs["input_ids"])
        return model(**inputs).loss * each

    with pytest.raises(dpoptim.SamplesInteractError):
        released_sum(Without(None, longest=0), tmp_path, coupled)


def saved_states(folder: Path, **options: Any) -> list[torch.ByteTensor]:
    """States of torch's generator in checkpoint folders, beside the secret file."""
    plan = dpoptim.DPSGD(clip_norm=C).plan(
        n=RECORDS, batch_size=5, steps=2, noise_multiplier=1.0, delta=1e-4
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_strategy="steps", save_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = PrivateTrainer(
        Bag(), arguments, train_dataset=Sentences(RECORDS), data_collator=collate, plan=plan,
        **options,
    )  # fmt: skip
    trainer.train()
    assert (folder / "checkpoint-1" / "private.checkpoint").exists()
    read = [torch.load(path, weights_only=False) for path in folder.glob("*/*.pth")]
    return [each["cpu"] for each in read]


@pytest.mark.filterwarnings("ignore")
def test_checkpoint_folders_tell_nothing_of_secret_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the generator's state has every mask of dropout, and how many rows drew one."""
    assert saved_states(tmp_path / "secret") == []
    assert len(saved_states(tmp_path / "for tests", noise_seed=1)) == 2
    monkeypatch.delattr(PrivateCheckpoints, "_save_rng_state")
    assert len(saved_states(tmp_path / "mutant")) == 2


class Noisy(torch.nn.Module):
    """Noise on embeddings while it trains, the less the longer the longest record of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = causal()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> Any:
        x = self.model.get_input_embeddings()(input_ids)
        if self.training:
            x = x + torch.zeros_like(x).uniform_(-1 / x.shape[1], 1 / x.shape[1])
        return self.model(inputs_embeds=x, attention_mask=attention_mask)


@pytest.mark.filterwarnings("ignore")
def test_noise_that_the_longest_record_scales_is_refused(tmp_path: Path) -> None:
    """Also where the model comes in evaluation mode, as all that ``from_pretrained`` loads."""
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, report_to=[], use_cpu=True
    )
    plan = dpoptim.DPSGD(clip_norm=C).plan(
        n=RECORDS, batch_size=5, steps=1, noise_multiplier=1.0, delta=1e-4
    )
    data = Sentences(RECORDS, language_model=True)
    with pytest.raises(dpoptim.SamplesInteractError):
        PrivateTrainer(
            Noisy().eval(), arguments, train_dataset=data, data_collator=collate, plan=plan
        ).train()
