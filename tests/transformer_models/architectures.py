"""Architectures of Transformers as tiny models with random weights: no download, some thousand numbers each.

A configuration is the library's own with small numbers for whatever it has of `SMALL`; `only` is what an architecture
needs besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

VOCABULARY = 99
IMAGE, PATCH = 16, 4
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "depth", "encoder_num_hidden_layers"), 2),
    **dict.fromkeys(("decoder_num_hidden_layers",), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "n_group", "topk_group", "num_selected_experts"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions"), 96),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 5),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    "first_k_dense_replace": 1,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "decoder_start_token_id": 1,
    "num_mel_bins": 16,
    "max_source_positions": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True)
class Architecture:
    """One of Transformers': the name of its configuration and the class of its model. `kind` says what it is fed with.
    `outcome`: what becomes of its attention."""

    name: str
    model: str
    kind: str
    only: Mapping[str, Any] = field(default_factory=dict)
    outcome: str = "served"

    def config(self) -> PreTrainedConfig:
        return tiny(type(AutoConfig.for_model(self.name)), self.only)

    def build(self, implementation: str) -> PreTrainedModel:
        """The same weights for each implementation."""
        torch.manual_seed(0)
        config = self.config()
        model: PreTrainedModel = getattr(transformers, self.model)._from_config(
            config, attn_implementation=implementation
        )
        return model.eval()


def tiny(cls: type[PreTrainedConfig], only: Mapping[str, Any]) -> PreTrainedConfig:
    """A configuration of a class with small numbers, its parts likewise. `only` names those that differ; of a part it
    is a mapping."""
    usual = cls()
    given: dict[str, Any] = {name: value for name, value in SMALL.items() if hasattr(usual, name)}
    for name in ("num_key_value_heads", "head_dim", "sliding_window"):
        if name in given and (getattr(usual, name) is None or isinstance(getattr(cls, name, None), property)):
            del given[name]
    for part in cls.sub_configs:
        if (have := getattr(usual, part, None)) is not None:
            given[part] = {**tiny(type(have), only.get(part, {})).to_dict(), "model_type": have.model_type}
    given.update({name: value for name, value in only.items() if name not in cls.sub_configs})
    return cls(**given)


def _of(kind: str, *rows: tuple[Any, ...]) -> tuple[Architecture, ...]:
    return tuple(Architecture(name, model, kind, *rest) for name, model, *rest in rows)


NOT_ASKED = "not asked"  # its layers look no attention function up: what they do themselves stays
REFUSED = "refused"  # it has a class for each of the names that it knows, and this is none of them: KeyError
IMAGE_TOKEN = 98
LLAVA = {"vision_feature_layer": -1, "text_config": {"vocab_size": VOCABULARY}}
CONV = {"conv_dim": (16, 16), "conv_kernel": (4, 4), "conv_stride": (4, 4), "num_feat_extract_layers": 2}
CONV = {**CONV, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}

ARCHITECTURES = (
    *_of(
        "decoder",
        ("llama", "LlamaForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("gemma", "GemmaForCausalLM"),
        ("gemma2", "Gemma2ForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("phi", "PhiForCausalLM"),
        ("phi3", "Phi3ForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("gpt_neox", "GPTNeoXForCausalLM"),
        ("gpt_bigcode", "GPTBigCodeForCausalLM"),
        ("gptj", "GPTJForCausalLM", {"rotary_dim": 4}, REFUSED),
        ("gpt_neo", "GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]]}, REFUSED),
        ("codegen", "CodeGenForCausalLM", {"rotary_dim": 4}, NOT_ASKED),
        ("opt", "OPTForCausalLM"),
        ("bloom", "BloomForCausalLM", {}, NOT_ASKED),
        ("falcon", "FalconForCausalLM", {}, REFUSED),
        ("mpt", "MptForCausalLM", {}, NOT_ASKED),
        ("starcoder2", "Starcoder2ForCausalLM"),
        ("stablelm", "StableLmForCausalLM"),
        ("olmo", "OlmoForCausalLM"),
        ("olmo2", "Olmo2ForCausalLM"),
        ("olmo3", "Olmo3ForCausalLM"),
        ("cohere", "CohereForCausalLM"),
        ("cohere2", "Cohere2ForCausalLM"),
        ("granite", "GraniteForCausalLM"),
        ("nemotron", "NemotronForCausalLM", {"head_dim": 8, "num_key_value_heads": 2}),
        ("glm", "GlmForCausalLM"),
        ("glm4", "Glm4ForCausalLM"),
        ("helium", "HeliumForCausalLM"),
        ("persimmon", "PersimmonForCausalLM"),
        ("smollm3", "SmolLM3ForCausalLM"),
        ("exaone4", "Exaone4ForCausalLM"),
        ("biogpt", "BioGptForCausalLM"),
        ("xglm", "XGLMForCausalLM", {}, NOT_ASKED),
        ("ctrl", "CTRLLMHeadModel"),
        ("seed_oss", "SeedOssForCausalLM"),
        ("apertus", "ApertusForCausalLM"),
        ("arcee", "ArceeForCausalLM"),
        ("ernie4_5", "Ernie4_5ForCausalLM"),
        ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", {"head_dim": 8}),
        ("ministral", "MinistralForCausalLM", {"head_dim": 8}),
        ("modernbert-decoder", "ModernBertDecoderForCausalLM"),
        ("diffllama", "DiffLlamaForCausalLM"),
        ("minicpm3", "MiniCPM3ForCausalLM", {"num_key_value_heads": 4}),
        ("mixtral", "MixtralForCausalLM"),
        ("qwen2_moe", "Qwen2MoeForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("olmoe", "OlmoeForCausalLM"),
        ("phimoe", "PhimoeForCausalLM"),
        ("granitemoe", "GraniteMoeForCausalLM"),
        ("jetmoe", "JetMoeForCausalLM"),
        ("deepseek_v2", "DeepseekV2ForCausalLM", {"num_key_value_heads": 4}),
        ("deepseek_v3", "DeepseekV3ForCausalLM", {"num_key_value_heads": 4}),
        ("glm4_moe", "Glm4MoeForCausalLM"),
        ("gpt_oss", "GptOssForCausalLM"),
        ("dots1", "Dots1ForCausalLM", {"head_dim": 8, "num_key_value_heads": 4, "n_shared_experts": 1}),
        ("llama4_text", "Llama4ForCausalLM"),
        ("deepseek_v32", "DeepseekV32ForCausalLM", {"num_key_value_heads": 4, "index_topk": 4, "index_head_dim": 16}),
        ("qwen3_next", "Qwen3NextForCausalLM", {"num_hidden_layers": 4}),
        ("bamba", "BambaForCausalLM", {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]}),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM", {"num_hidden_layers": 3}),
        ("mamba", "MambaForCausalLM", {}, NOT_ASKED),
    ),
    *_of(
        "encoder",
        ("bert", "BertForMaskedLM"),
        ("roberta", "RobertaForMaskedLM"),
        ("xlm-roberta", "XLMRobertaForMaskedLM"),
        ("distilbert", "DistilBertForMaskedLM"),
        ("electra", "ElectraForMaskedLM"),
        ("albert", "AlbertForMaskedLM"),
        ("camembert", "CamembertForMaskedLM"),
        ("ernie", "ErnieForMaskedLM"),
        ("esm", "EsmForMaskedLM"),
        ("modernbert", "ModernBertForMaskedLM"),
        ("eurobert", "EuroBertForMaskedLM"),
        ("nomic_bert", "NomicBertForMaskedLM"),
        ("mobilebert", "MobileBertForMaskedLM"),
        ("mpnet", "MPNetForMaskedLM", {}, NOT_ASKED),
        ("deberta-v2", "DebertaV2ForMaskedLM", {}, NOT_ASKED),
        ("splinter", "SplinterModel"),
    ),
    *_of(
        "seq2seq",
        ("bart", "BartForConditionalGeneration"),
        ("mbart", "MBartForConditionalGeneration"),
        ("marian", "MarianMTModel"),
        ("pegasus", "PegasusForConditionalGeneration"),
        ("blenderbot", "BlenderbotForConditionalGeneration"),
        ("m2m_100", "M2M100ForConditionalGeneration"),
        ("t5", "T5ForConditionalGeneration", {"decoder_start_token_id": 1}),
        ("mt5", "MT5ForConditionalGeneration"),
        ("umt5", "UMT5ForConditionalGeneration"),
        ("switch_transformers", "SwitchTransformersForConditionalGeneration"),
        ("nllb-moe", "NllbMoeForConditionalGeneration"),
        ("longt5", "LongT5ForConditionalGeneration"),
        ("led", "LEDForConditionalGeneration", {}, NOT_ASKED),
        ("t5gemma", "T5GemmaForConditionalGeneration"),
    ),
    *_of(
        "vision",
        ("vit", "ViTForImageClassification"),
        ("deit", "DeiTForImageClassification"),
        ("beit", "BeitForImageClassification"),
        ("dinov2", "Dinov2ForImageClassification"),
        ("dinov3_vit", "DINOv3ViTModel"),
        ("siglip_vision_model", "SiglipVisionModel"),
        ("clip_vision_model", "CLIPVisionModel"),
        ("ijepa", "IJepaForImageClassification"),
        ("yolos", "YolosModel", {"image_size": [IMAGE, IMAGE], "num_detection_tokens": 3}),
    ),
    *_of(
        "speech",
        ("wav2vec2", "Wav2Vec2ForCTC", CONV),
        ("hubert", "HubertForCTC", CONV),
        ("unispeech", "UniSpeechForCTC", CONV),
        ("sew", "SEWForCTC", CONV),
        ("data2vec-audio", "Data2VecAudioForCTC", CONV),
        ("wavlm", "WavLMForCTC", CONV, NOT_ASKED),
    ),
    *_of(
        "speech2text",
        ("whisper", "WhisperForConditionalGeneration"),
        ("speech_to_text", "Speech2TextForConditionalGeneration", {"input_feat_per_channel": 16, "conv_channels": 32}),
    ),
    *_of(
        "vision2text",
        (
            "llava",
            "LlavaForConditionalGeneration",
            {"image_token_index": IMAGE_TOKEN, "image_token_id": IMAGE_TOKEN, **LLAVA},
        ),
        ("gemma3", "Gemma3ForConditionalGeneration", {"image_token_index": IMAGE_TOKEN, "mm_tokens_per_image": 4}),
    ),
)
