"""Losses from labels are those that Hugging Face's models compute themselves, of a batch of one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from integrations.small_language import PAD, VOCABULARY, causal, classifier

transformers = pytest.importorskip("transformers")

from dpoptim.integrations.language import losses_from_labels  # noqa: E402

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def bert(head: str, **options: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, intermediate_size=16, max_position_embeddings=16, **SMALL, **options
    )
    return getattr(transformers, f"BertFor{head}")(config)


def llama() -> Any:
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, intermediate_size=16, **SMALL)
    return transformers.LlamaForCausalLM(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=PAD,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "GPT-2": causal,  # whose loss Hugging Face does not name
    "Llama": llama,
    "T5": t5,
    "masked LM": lambda: bert("MaskedLM"),
    "tokens": lambda: bert("TokenClassification", num_labels=3),
    "classes": classifier,
    "regression": lambda: bert("SequenceClassification", num_labels=1, problem_type="regression"),
    "several labels": lambda: bert(
        "SequenceClassification", num_labels=3, problem_type="multi_label_classification"
    ),
}


def labels_for(name: str, tokens: Tensor) -> Tensor:
    rows = len(tokens)
    if name == "classes":
        return torch.tensor([0, 1, 1])
    if name == "regression":
        return torch.randn(rows)
    if name == "several labels":
        return torch.randint(0, 2, (rows, 3)).float()
    labels = tokens % 3 if name == "tokens" else tokens.clone()
    return labels.masked_fill(tokens == PAD, -100)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_each_record_has_the_models_own_loss(name: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]().eval()
    tokens = torch.randint(1, VOCABULARY, (3, 6))
    tokens[1, 3:] = tokens[2, 5:] = PAD
    batch = {
        "input_ids": tokens,
        "attention_mask": (tokens != PAD).long(),
        "labels": labels_for(name, tokens),
    }
    ours = losses_from_labels(model, batch)
    for i, loss in enumerate(ours):
        alone = {key: value[i : i + 1] for key, value in batch.items()}
        torch.testing.assert_close(loss, model(**alone).loss, rtol=1e-4, atol=1e-5)
