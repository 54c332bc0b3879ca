"""Small Hugging Face models, with padding and one loss term per record: sums as micro-batches of
one give them.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpoptim
from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.backward_pass import BackwardPass
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.layers.bare import BareParameters
from dpoptim.gradients.layers.vmapped import VmapLayer
from dpoptim.gradients.oracle import clipped_sums, engine_sums, gradients_alone
from support import joint_norm

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
logging.getLogger("transformers").setLevel(logging.CRITICAL)
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ROWS, T, V = 7, 6, 29
SMALL = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
GPT2 = {
    "vocab_size": V,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, max_position_embeddings=8))


def gpt2(*, tied: bool = True) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, tie_word_embeddings=tied))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=8)
    return transformers.LlamaForCausalLM(config)


def gemma() -> nn.Module:
    config = transformers.GemmaConfig(
        **SMALL, num_key_value_heads=1, head_dim=8, max_position_embeddings=8
    )
    return transformers.GemmaForCausalLM(config)


def vit() -> nn.Module:
    small = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**small, image_size=8, patch_size=4)
    )


def lora(build: Callable[[], nn.Module], targets: list[str], **options: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        build(), peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    )


def token_losses(model: nn.Module, batch: dict[str, Tensor], shift: int) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, shift:]
    losses = F.cross_entropy(
        logits[:, : T - shift].transpose(1, 2), labels, ignore_index=-100, reduction="none"
    )
    return dpoptim.losses.per_sample_mean(losses, labels != -100).mean()


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return token_losses(model, batch, 1)


def same_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return token_losses(model, batch, 0)


def image_class(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"])


def texts() -> dict[str, Tensor]:
    ids = torch.randint(0, V, (ROWS, T))
    mask = (torch.arange(T) < torch.tensor([6, 3, 4, 6, 2, 5, 6])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def images() -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(ROWS, 3, 8, 8, dtype=torch.float64),
        "labels": torch.randint(0, 2, (ROWS,)),
    }


CASES = {
    "bert": (bert, same_token, texts),
    "gpt2-tied": (gpt2, next_token, texts),
    "gpt2-untied": (lambda: gpt2(tied=False), next_token, texts),
    "llama": (llama, next_token, texts),
    "gemma": (gemma, next_token, texts),
    "vit": (vit, image_class, images),
    "llama-lora": (lambda: lora(llama, ["q_proj", "v_proj"]), next_token, texts),
    "gpt2-lora": (lambda: lora(gpt2, ["c_attn"], fan_in_fan_out=True), next_token, texts),
    "llama-lora-embedding-frozen-norms": (
        lambda: lora(llama, ["gate_proj"], modules_to_save=["norm"]),
        next_token,
        texts,
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_micro_batches(case: str) -> None:
    torch.manual_seed(0)
    build, loss, data = CASES[case]
    model, batch = build().double().eval(), data()
    truth = gradients_alone(
        model, loss, [{key: t[i : i + 1] for key, t in batch.items()} for i in range(ROWS)]
    )
    norms = torch.stack([g.reshape(ROWS, -1).square().sum(1) for g in truth]).sum(0).sqrt()
    clipping = Clipping(float(norms.median()))
    expected = clipped_sums(truth, clipping, ROWS)
    sums = engine_sums(model, loss, batch, ROWS, clipping, "mean")
    error = joint_norm([a - b for a, b in zip(sums, expected, strict=True)])
    assert error < 1e-6 * joint_norm(expected)  # Llama's norms compute in float32


def runners(model: nn.Module) -> list[BareParameters | VmapLayer]:
    """What runs the modules of an attached model that have no rule."""
    forwards = (vars(m).get("forward") for m in model.modules())
    closures = (getattr(f._forward, "__closure__", None) or () for f in forwards if f is not None)
    cells = [cell.cell_contents for closure in closures for cell in closure]
    return [c for c in cells if isinstance(c, BareParameters | VmapLayer)]


@pytest.mark.parametrize("case", CASES)
def test_none_of_them_needs_the_fallback(case: str) -> None:
    torch.manual_seed(0)
    build, loss, data = CASES[case]
    model = build().double().train()
    engine = Engine(model, Clipping(1.0), capacity=ROWS)
    engine.attach()
    loss(model, data())
    assert not any(isinstance(r, VmapLayer) or r.falls_back for r in runners(model))


def test_frozen_layers_enter_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under LoRA, the recorder hold the adapters alone."""
    torch.manual_seed(0)
    model, entries = lora(llama, ["q_proj"]).double(), []
    monkeypatch.setattr(Engine, "_close", lambda self, finished: entries.extend(finished.entries))
    engine = Engine(model, Clipping(1.0), capacity=ROWS)
    engine.attach()
    engine.begin_microbatch(ROWS)
    next_token(model, texts()).backward()
    assert isinstance(BackwardPass().entries, list)
    assert {e.layer.rsplit(".", 2)[1] for e in entries} == {"lora_A", "lora_B"}
    assert len(entries) == 4


def test_the_loss_inside_the_model_is_taken_of_each_record() -> None:
    torch.manual_seed(0)
    found = dpoptim.check(llama(), lambda model, batch: model(**batch).loss, texts())
    assert found.loss_reduction == "mean"
    assert found.labels > 1
    assert dpoptim.check(llama(), next_token, texts()).labels == 0


def test_weight_decomposed_adapters_are_more_than_rules_can_tell_apart() -> None:
    """DoRA normalises by the norms of weights that belong to other modules."""
    model = lora(llama, ["q_proj"], use_dora=True)
    engine = Engine(model, Clipping(1.0), capacity=ROWS)
    engine.attach()
    engine.begin_microbatch(ROWS)
    with pytest.raises(PrivacyError, match="was used outside its module"):
        next_token(model, texts()).backward()
