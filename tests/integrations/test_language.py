"""Losses from labels are those that Hugging Face's models compute themselves, of a batch of one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from integrations.small_language import PAD, VOCABULARY, causal, classifier

transformers = pytest.importorskip("transformers")

from dpoptim.errors import NoSuchLossError  # noqa: E402
from dpoptim.integrations.language import base_model, losses_from_labels  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' own
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


def prompted(model: Any, task: str, kind: str = "PromptTuningConfig") -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, getattr(peft, kind)(num_virtual_tokens=3, task_type=task))


def transcriber(reduction: str) -> Any:
    config = transformers.Wav2Vec2Config(
        vocab_size=VOCABULARY, intermediate_size=16, conv_dim=(8, 8), conv_stride=(4, 2),
        conv_kernel=(8, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer", pad_token_id=PAD,
        ctc_loss_reduction=reduction, mask_time_prob=0.0, **SMALL,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


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
    "several labels, told by their numbers": lambda: bert("SequenceClassification", num_labels=3),
    "prompt tuning": lambda: prompted(llama(), "CAUSAL_LM"),
    "prefix tuning": lambda: prompted(llama(), "CAUSAL_LM", "PrefixTuningConfig"),
}


def labels_for(name: str, tokens: Tensor) -> Tensor:
    rows = len(tokens)
    if name == "classes":
        return torch.tensor([0, 1, 1])
    if name == "regression":
        return torch.randn(rows)
    if name.startswith("several labels"):
        return torch.randint(0, 2, (rows, 3)).float()
    labels = tokens % 3 if name == "tokens" else tokens.clone()
    return labels.masked_fill(tokens == PAD, -100)


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


def each_alone(model: nn.Module, batch: dict[str, Tensor], lengths: list[int]) -> Tensor:
    """The model's own loss of each record, without padding."""
    found = []
    for i, length in enumerate(lengths):
        alone = {
            key: x[i : i + 1, :length] if x.dim() > 1 else x[i : i + 1] for key, x in batch.items()
        }
        found.append(model(**alone).loss)
    return torch.stack(found)


def test_answers_are_looked_for_among_a_records_own_tokens() -> None:
    torch.manual_seed(0)
    model, lengths = bert("QuestionAnswering").eval(), [6, 3, 5]
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
    batch = {
        "input_ids": torch.randint(1, VOCABULARY, (3, 6)) * mask,
        "attention_mask": mask,
        "start_positions": torch.tensor([1, 0, 4]),
        "end_positions": torch.tensor([5, 2, 5]),  # the last beyond its record, which is ignored
    }
    ours = losses_from_labels(model, batch)
    own = each_alone(model, {**batch, "end_positions": torch.tensor([5, 2, 4])}, lengths)
    torch.testing.assert_close(ours[:2], own[:2], rtol=1e-4, atol=1e-5)
    start = model(batch["input_ids"][2:, :5]).start_logits.log_softmax(1)[0, 4]
    torch.testing.assert_close(ours[2], -start / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_transcriptions_have_the_models_own_loss(reduction: str) -> None:
    torch.manual_seed(0)
    model, lengths = transcriber(reduction).eval(), [160, 96, 128]
    mask = (torch.arange(160) < torch.tensor(lengths)[:, None]).long()
    labels = torch.randint(1, VOCABULARY, (3, 4))
    labels[1, 2:] = -100
    batch = {"input_values": torch.randn(3, 160) * mask, "attention_mask": mask, "labels": labels}
    ours, own = losses_from_labels(model, batch), each_alone(model, batch, lengths)
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)
    assert model.config.ctc_loss_reduction == reduction


@pytest.mark.parametrize(
    ("head", "more", "said"),
    [
        ("SequenceClassification", {}, "BertForSequenceClassification hold no 'labels'.*Fix: loss"),
        ("PreTraining", {"labels": torch.ones(2, 4, dtype=torch.long)}, "hold no 'logits'.*Fix: l"),
        (
            "MaskedLM",
            {"labels": torch.ones(2, 3, dtype=torch.long)},
            "same rows and tokens.*Fix: l",
        ),
    ],
)
def test_what_has_no_loss_a_record_is_refused_with_a_fix(head: str, more: Any, said: str) -> None:
    inputs = {"input_ids": torch.ones(2, 4, dtype=torch.long), **more}
    with pytest.raises(NoSuchLossError, match=said):
        losses_from_labels(bert(head), inputs)


def test_a_model_of_several_processes_is_the_one_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Wrapper)
    model = prompted(llama(), "CAUSAL_LM")
    assert base_model(Wrapper(model)).loss_type == "ForCausalLM"
