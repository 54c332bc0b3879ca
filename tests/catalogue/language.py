"""Small models of Hugging Face transformers and PEFT, each with the form of its records."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

tr = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
tr.logging.set_verbosity_error()
logging.getLogger("transformers").setLevel(logging.CRITICAL)

T, V = 6, 29  # 6 tokens of a vocabulary of 29
BASE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
SMALL = BASE | {"vocab_size": V}
LLAMA = SMALL | {"num_key_value_heads": 1, "max_position_embeddings": 12}
LONG = SMALL | {"max_position_embeddings": 16}

Record = dict[str, Tensor]
Entry = tuple[Callable[[], nn.Module], Callable[[], Record]]


def text() -> Record:
    return {
        "input_ids": torch.randint(0, V, (T,)),
        "attention_mask": torch.ones(T, dtype=torch.long),
    }


def labelled() -> Record:
    return text() | {"labels": torch.randint(0, V, (T,))}


def image(size: int = 8) -> Callable[[], Record]:
    return lambda: {"pixel_values": torch.randn(3, size, size)}


def make(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A model by the names of its class and its configuration's class."""
    return lambda: getattr(tr, name)(getattr(tr, config)(**options))


def adapted(build: Callable[[], nn.Module], config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: peft.get_peft_model(build(), getattr(peft, config)(**options))


llama = make("LlamaForCausalLM", "LlamaConfig", **LLAMA)
opt = make(
    "OPTForCausalLM",
    "OPTConfig",
    vocab_size=V,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    ffn_dim=32,
    max_position_embeddings=12,
    word_embed_proj_dim=16,
)
deberta = make(
    "DebertaV2ForMaskedLM",
    "DebertaV2Config",
    **LONG,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
)
GPT = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12}
QV = {"target_modules": ["q_proj", "v_proj"]}
BART = {
    **{
        "vocab_size": V,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "max_position_embeddings": 12,
    },
    **{
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    },
    **{
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    },
}
SWIN = {
    "image_size": 8,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 2],
    "num_heads": [2, 2],
    "window_size": 2,
}
EXPERTS = LLAMA | {"num_experts_per_tok": 2}
CAUSAL = {"task_type": "CAUSAL_LM"}

TRANSFORMERS: dict[str, Entry] = {
    "bert": (make("BertForMaskedLM", "BertConfig", **LONG), text),
    "bert classifier": (make("BertForSequenceClassification", "BertConfig", **LONG), text),
    "roberta": (make("RobertaForMaskedLM", "RobertaConfig", **LONG), text),
    "albert": (make("AlbertForMaskedLM", "AlbertConfig", **LONG, embedding_size=8), text),
    "distilbert": (
        make(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            vocab_size=V,
            dim=16,
            n_layers=2,
            n_heads=2,
            hidden_dim=32,
        ),
        text,
    ),
    "electra": (make("ElectraForMaskedLM", "ElectraConfig", **LONG, embedding_size=8), text),
    "mpnet": (make("MPNetForMaskedLM", "MPNetConfig", **LONG), text),
    "deberta": (
        make(
            "DebertaForMaskedLM",
            "DebertaConfig",
            **LONG,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
        ),
        text,
    ),
    "deberta v2": (deberta, text),
    "deberta v3": (
        make(
            "DebertaV2ForMaskedLM",
            "DebertaV2Config",
            **LONG,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            share_att_key=True,
            norm_rel_ebd="layer_norm",
            position_buckets=4,
            position_biased_input=False,
        ),
        text,
    ),
    **{
        f"{name} with its own head": (
            make(
                f"{kind}ForMaskedLM",
                f"{kind}Config",
                **LONG,
                relative_attention=True,
                pos_att_type=["c2p", "p2c"],
                legacy=False,
                **more,
            ),
            text,
        )
        for name, kind, more in (
            ("deberta", "Deberta", {}),
            ("deberta v2", "DebertaV2", {}),
            ("deberta v3", "DebertaV2", {"share_att_key": True, "position_buckets": 4}),
        )
    },
    "longformer": (
        make("LongformerForMaskedLM", "LongformerConfig", **LONG, attention_window=4),
        text,
    ),
    "xlnet": (
        make(
            "XLNetLMHeadModel",
            "XLNetConfig",
            vocab_size=V,
            d_model=16,
            n_layer=2,
            n_head=2,
            d_inner=32,
        ),
        text,
    ),
    "funnel": (
        make(
            "FunnelForMaskedLM",
            "FunnelConfig",
            **{"vocab_size": V, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32},
            block_sizes=[1, 1],
            num_decoder_layers=1,
        ),
        text,
    ),
    "fnet": (
        make("FNetForMaskedLM", "FNetConfig", **LONG),
        lambda: {"input_ids": torch.randint(0, V, (T,))},
    ),
    "gpt2": (make("GPT2LMHeadModel", "GPT2Config", **GPT), labelled),
    "gpt neo": (
        make(
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            vocab_size=V,
            hidden_size=16,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=12,
            window_size=4,
        ),
        text,
    ),
    "gpt neox": (make("GPTNeoXForCausalLM", "GPTNeoXConfig", **LONG), text),
    "gptj": (make("GPTJForCausalLM", "GPTJConfig", **GPT, rotary_dim=4), text),
    "bloom": (
        make("BloomForCausalLM", "BloomConfig", vocab_size=V, hidden_size=16, n_layer=2, n_head=2),
        text,
    ),
    "opt": (opt, labelled),
    "llama": (llama, labelled),
    "mistral": (make("MistralForCausalLM", "MistralConfig", **LLAMA), text),
    "qwen2": (make("Qwen2ForCausalLM", "Qwen2Config", **LLAMA), text),
    "gemma2": (make("Gemma2ForCausalLM", "Gemma2Config", **LLAMA, head_dim=8), text),
    "phi": (make("PhiForCausalLM", "PhiConfig", **LONG), text),
    "mixtral": (make("MixtralForCausalLM", "MixtralConfig", **EXPERTS, num_local_experts=3), text),
    "qwen2 moe": (
        make(
            "Qwen2MoeForCausalLM",
            "Qwen2MoeConfig",
            **EXPERTS,
            num_experts=3,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        text,
    ),
    "gpt oss": (
        make("GptOssForCausalLM", "GptOssConfig", **EXPERTS, head_dim=8, num_local_experts=3),
        text,
    ),
    "mamba": (
        make(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=V,
            hidden_size=16,
            num_hidden_layers=2,
            state_size=4,
        ),
        text,
    ),
    "mamba2": (
        make(
            "Mamba2ForCausalLM",
            "Mamba2Config",
            **{"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
            **{"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
        ),
        text,
    ),
    "t5": (
        make(
            "T5ForConditionalGeneration",
            "T5Config",
            **{
                "vocab_size": V,
                "d_model": 16,
                "d_kv": 8,
                "d_ff": 32,
                "num_layers": 2,
                "num_heads": 2,
            },
            decoder_start_token_id=0,
        ),
        labelled,
    ),
    "bart": (make("BartForConditionalGeneration", "BartConfig", **BART), labelled),
    "vit": (
        make("ViTForImageClassification", "ViTConfig", **BASE, image_size=8, patch_size=4),
        image(),
    ),
    "deit": (
        make("DeiTForImageClassification", "DeiTConfig", **BASE, image_size=8, patch_size=4),
        image(),
    ),
    "dinov2": (
        make("Dinov2ForImageClassification", "Dinov2Config", **BASE, image_size=8, patch_size=4),
        image(),
    ),
    "swin": (make("SwinForImageClassification", "SwinConfig", **SWIN), image()),
    "swin v2": (make("Swinv2ForImageClassification", "Swinv2Config", **SWIN), image()),
    "beit": (
        make(
            "BeitForImageClassification",
            "BeitConfig",
            **BASE,
            image_size=8,
            patch_size=4,
            use_relative_position_bias=True,
        ),
        image(),
    ),
    "beit with a shared bias": (
        make(
            "BeitForImageClassification",
            "BeitConfig",
            **BASE,
            image_size=8,
            patch_size=4,
            use_shared_relative_position_bias=True,
        ),
        image(),
    ),
    "convnext": (
        make(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 12],
            depths=[1, 1],
            num_stages=2,
        ),
        image(16),
    ),
    "mobilevit, frozen batch norm": (
        make(
            "MobileViTForImageClassification",
            "MobileViTConfig",
            **{
                "image_size": 32,
                "hidden_sizes": [16] * 3,
                "neck_hidden_sizes": [8] * 7,
                "num_attention_heads": 2,
            },
        ),
        image(32),
    ),
    "wav2vec2 with SpecAugment": (
        make(
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            **BASE,
            **{"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
            **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4},
            **{"num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8},
            **{"mask_time_prob": 0.3, "mask_time_length": 2},
        ),
        lambda: {"input_values": torch.randn(400)},
    ),
    "patchtst": (
        make(
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            **{"num_input_channels": 2, "context_length": 8, "patch_length": 2, "patch_stride": 2},
            **{
                "prediction_length": 3,
                "d_model": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "ffn_dim": 32,
            },
        ),
        lambda: {"past_values": torch.randn(8, 2), "future_values": torch.randn(3, 2)},
    ),
    "clip's vision tower": (
        make(
            "CLIPVisionModelWithProjection", "CLIPVisionConfig", **BASE, image_size=8, patch_size=4
        ),
        image(),
    ),
}

ADAPTERS: dict[str, Entry] = {
    "lora": (adapted(llama, "LoraConfig", r=2, init_lora_weights=False, **QV), text),
    "lora on deberta v2": (
        adapted(
            deberta,
            "LoraConfig",
            r=2,
            init_lora_weights=False,
            target_modules=["query_proj", "value_proj"],
        ),
        text,
    ),
    "dora": (adapted(llama, "LoraConfig", r=2, init_lora_weights=False, use_dora=True, **QV), text),
    "loha": (adapted(llama, "LoHaConfig", r=2, init_weights=False, **QV), text),
    "lokr": (adapted(llama, "LoKrConfig", r=2, init_weights=False, **QV), text),
    "ia3": (
        adapted(
            llama,
            "IA3Config",
            target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
        text,
    ),
    "adalora": (adapted(llama, "AdaLoraConfig", init_r=2, target_r=2, total_step=9, **QV), text),
    "vera": (
        adapted(llama, "VeraConfig", r=2, target_modules=["q_proj"], init_weights=False),
        text,
    ),
    "oft": (adapted(llama, "OFTConfig", oft_block_size=4, init_weights=False, **QV), text),
    "hra": (adapted(llama, "HRAConfig", r=2, init_weights=False, **QV), text),
    "fourier": (adapted(llama, "FourierFTConfig", n_frequency=5, init_weights=True, **QV), text),
    "layer norms": (adapted(llama, "LNTuningConfig", target_modules=["input_layernorm"]), text),
    "prompt": (adapted(llama, "PromptTuningConfig", num_virtual_tokens=3, **CAUSAL), text),
    "prompt encoder": (
        adapted(
            llama, "PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=8, **CAUSAL
        ),
        text,
    ),
    "prefix": (adapted(llama, "PrefixTuningConfig", num_virtual_tokens=3, **CAUSAL), text),
    "bits of a head": (
        adapted(
            llama,
            "LoraConfig",
            r=2,
            init_lora_weights=False,
            target_modules=["q_proj"],
            modules_to_save=["norm"],
        ),
        text,
    ),
}
