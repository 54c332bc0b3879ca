"""TRL's trainers, made private: TRL's own losses record by record, one record moves a step by at
most the clip norm, and nothing of a training batch is logged.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dpoptim
from integrations.small_language import causal

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from dpoptim.integrations.preferences import DIVERGENCES, LOSSES  # noqa: E402
from dpoptim.integrations.trl import PrivateDPOTrainer, PrivateSFTTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' own
C, RECORDS, RATE = 0.7, 8, 0.5


def tokenizer() -> Any:
    words = {"[pad]": 0, "[end]": 1, **{f"w{i}": i for i in range(2, 23)}}
    known = Tokenizer(models.WordLevel(words, unk_token="[pad]"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="[pad]", eos_token="[end]")


def tokens(length: int, first: int) -> list[int]:
    return [2 + (first * 7 + 3 * i) % 21 for i in range(length)]


def words(length: int, first: int) -> str:
    return "".join(f" w{token}" for token in tokens(length, first))


def texts(removed: int | None = None) -> Any:
    """Records of different lengths; record 0 is the longest."""
    rows = [tokens(14 if i == 0 else 3 + i % 4, i) for i in range(RECORDS)]
    kept = [{"input_ids": row, "labels": row} for i, row in enumerate(rows) if i != removed]
    return datasets.Dataset.from_list(kept)


def pairs(removed: int | None = None) -> Any:
    rows = [
        {
            "prompt": words(2 + i % 3, i),
            "chosen": words(9 if i == 0 else 2 + i % 3, i + 5),
            "rejected": words(3 + i % 2, i + 11),
        }
        for i in range(RECORDS)
    ]
    return datasets.Dataset.from_list([row for i, row in enumerate(rows) if i != removed])


def trainer(
    kind: str, folder: Path, model: Any, data: Any, *, noise_multiplier: float = 0, **options: Any
) -> Any:
    """One step over all records; without noise, and by plain gradient descent, if not told
    otherwise.
    """
    plan = dpoptim.DPSGD(clip_norm=C).plan(
        n=RECORDS, batch_size=RECORDS, steps=1, noise_multiplier=noise_multiplier, delta=1e-4
    )
    arguments = (trl.SFTConfig if kind == "sft" else trl.DPOConfig)(
        output_dir=str(folder), report_to=[], use_cpu=True, disable_tqdm=True,
        lr_scheduler_type="constant", logging_steps=1, optim="sgd", learning_rate=RATE,
        **{"save_strategy": "no", "bf16": False, "per_device_train_batch_size": 3, **options},
    )  # fmt: skip
    shared = {"args": arguments, "train_dataset": data, "processing_class": tokenizer()}
    if kind == "sft":
        return PrivateSFTTrainer(model, **shared, plan=plan)
    whole = not hasattr(model, "peft_config")
    reference = causal().to(next(model.parameters()).dtype) if whole else None
    return PrivateDPOTrainer(model, reference, **shared, plan=plan)


DATA = {"sft": texts, "dpo": pairs}


def released_sum(kind: str, data: Any, folder: Path, **options: Any) -> Tensor:
    """What one step adds up, all records taking part and no noise."""
    model = causal().double()
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    trainer(kind, folder, model, data, **options).train()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return (before - after) * (RECORDS / RATE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DATA)
def test_one_padded_record_moves_the_sum_by_at_most_the_clip_norm(
    kind: str, tmp_path: Path
) -> None:
    """The longest one, to whose length the others are padded."""
    whole = released_sum(kind, DATA[kind](), tmp_path)
    part = released_sum(kind, DATA[kind](removed=0), tmp_path)
    assert 0.5 * C < float((whole - part).norm()) <= C
    cut = released_sum(kind, DATA[kind](), tmp_path, per_device_train_batch_size=100)
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_the_loss_of_a_text_is_that_of_a_batch_of_one(loss_type: str, tmp_path: Path) -> None:
    run = trainer("sft", tmp_path, causal().eval(), texts(), loss_type=loss_type)
    records = list(run.train_dataset)
    batch = run.data_collator(records)
    ours = run.per_sample_losses(run.model, batch)
    for loss, record in zip(ours, records, strict=True):
        alone = run.compute_loss(run.model, run.data_collator([record]))
        torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-6)


def test_the_loss_of_a_pair_is_that_of_a_batch_of_one(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = causal().eval()
    for p in model.parameters():  # another one than the reference
        p.data += 0.1 * torch.randn_like(p)
    run = trainer("dpo", tmp_path, model, pairs(), label_smoothing=0.1)
    data, collate = run._records()
    batch = collate([row for i in range(RECORDS) for row in rows_of(data[i])])
    for name in LOSSES:
        for divergence in DIVERGENCES if name in ("sigmoid", "ipo") else ("reverse_kl",):
            run.args.loss_type, run.args.loss_weights = [name, "hinge"], [1.0, 0.5]
            run.loss_types, run.loss_weights = [name, "hinge"], [1.0, 0.5]
            run.args.f_divergence_type = run.f_divergence_type = divergence
            ours = run.per_sample_losses(run.model, batch)
            for loss, record in zip(ours, run.train_dataset, strict=True):
                alone = run.compute_loss(run.model, run.data_collator([record]))
                torch.testing.assert_close(loss, alone, rtol=1e-4, atol=1e-5, msg=name)


def rows_of(item: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{key: value[k] for key, value in item.items()} for k in range(2)]


@pytest.mark.parametrize("kind", DATA)
def test_adapters_train_as_trl_has_it_and_tell_nothing(kind: str, tmp_path: Path) -> None:
    """With checkpointing of activations and bfloat16, TRL's own settings; scores on public
    records are shown.
    """
    model = peft.get_peft_model(
        causal(), peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")
    )
    run = trainer(
        kind, tmp_path, model, DATA[kind](), bf16=True, noise_multiplier=1.0, save_strategy="steps"
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name and ".default" in name for name in moved)
    assert (tmp_path / "checkpoint-1" / "private.checkpoint").exists()
    assert (tmp_path / "checkpoint-1" / "adapter_model.safetensors").exists()
    logged = {key for entry in run.state.log_history for key in entry}
    assert "epsilon_reserved" in logged
    private = ("loss", "entropy", "tokens", "accuracy", "logits", "rewards", "logps", "grad")
    assert not [key for key in logged if any(word in key for word in private)]
    assert "eval_loss" in run.evaluate(DATA[kind]().select([1, 2]))


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("sft", "packing", True),
        ("sft", "padding_free", True),
        ("dpo", "loss_type", ["aot"]),
        ("dpo", "f_divergence_type", "alpha_divergence"),
        ("dpo", "ld_alpha", 0.5),
        ("dpo", "use_weighting", True),
        ("dpo", "precompute_ref_log_probs", True),
    ],
)
def test_options_by_which_records_meet_are_refused(
    kind: str, option: str, value: Any, tmp_path: Path
) -> None:
    more = {"max_length": None} if option == "padding_free" else {}
    with pytest.raises(ValueError, match=f"{option}.*Fix: "):
        trainer(kind, tmp_path, causal(), DATA[kind](), **{option: value}, **more)


def test_reference_scores_may_be_computed_beforehand_pair_by_pair(tmp_path: Path) -> None:
    model = causal()
    for p in model.parameters():
        p.data += 0.1
    before = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 1}
    found = []
    for options in (before, {}):
        run = trainer("dpo", tmp_path, model.eval(), pairs(), **options)
        data, collate = run._records()
        batch = collate([row for i in range(RECORDS) for row in rows_of(data[i])])
        assert ("ref_logps" in batch) == bool(options)
        found.append(run.per_sample_losses(run.model, batch))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
