"""Hugging Face `config.json` → Geometry. Whatever this engine cannot compute is refused by name."""

from __future__ import annotations

import math
from typing import Any, cast

from swapkv_jax.errors import ModelError
from swapkv_jax.models.geometry import (
    ARCHITECTURES,
    ROPE_KINDS,
    Architecture,
    Geometry,
    RopeKind,
    RopeScaling,
)

_CAUSAL_LM = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SUPPORTED = f"supported: {', '.join(ARCHITECTURES)} causal language models"
# Hugging Face's defaults for keys that a config may leave out.
_DEFAULT_KV_HEADS = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}


def geometry_from_hf_config(config: dict[str, Any]) -> Geometry:
    """The geometry that a parsed `config.json` describes, with Hugging Face's defaults for absent keys.

    Takes both forms of RoPE settings: `rope_theta` with `rope_scaling`, and `rope_parameters`.
    Raises ModelError naming the setting that is unsupported, missing or malformed, and what is supported.
    """
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    heads = _integer(config, "num_attention_heads")
    hidden = _integer(config, "hidden_size")
    max_positions = _integer(config, "max_position_embeddings", _DEFAULT_MAX_POSITIONS[architecture])
    attention_bias = architecture in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    theta, scaling = _rope(config, max_positions)
    return Geometry(
        architecture=architecture,
        layers=_integer(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(config, architecture, heads),
        head_dim=_head_dim(config, architecture, hidden, heads),
        intermediate=_integer(config, "intermediate_size"),
        vocab=_integer(config, "vocab_size"),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=max_positions,
        qkv_bias=architecture == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=architecture == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _architecture(config: dict[str, Any]) -> Architecture:
    model_type = config.get("model_type")
    for key in ("vision_config", "audio_config", "text_config"):
        if config.get(key):
            raise ModelError(
                f"config has {key}: multimodal model {model_type!r} is not supported; {_SUPPORTED}"
            )
    if model_type not in _CAUSAL_LM:
        raise ModelError(f"model_type {model_type!r} is not supported; {_SUPPORTED}")
    declared = config.get("architectures") or [_CAUSAL_LM[model_type]]
    if _CAUSAL_LM[model_type] not in declared:
        raise ModelError(f"architectures {declared} is not supported; {_SUPPORTED}")
    return cast(Architecture, model_type)


def _refuse_unsupported(config: dict[str, Any], architecture: Architecture) -> None:
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(key):
            raise ModelError(f"mixture of experts ({key}={config[key]}) is not supported; dense models are")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act {activation!r} is not supported; supported: silu")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"quantised checkpoint (quantization_config, {method!r}) is not supported; "
            "use the float32, bfloat16 or float16 checkpoint, or a GGUF"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            raise ModelError(f"{key}={config[key]} is not supported; models without soft-capping are")
    _refuse_sliding_window(config, architecture)


def _refuse_sliding_window(config: dict[str, Any], architecture: Architecture) -> None:
    remedy = "supported: full attention in every layer"
    kinds = set(config.get("layer_types") or ["full_attention"])
    if other := sorted(kinds - {"full_attention"}):
        raise ModelError(f"layer_types {', '.join(other)} is not supported; {remedy}")
    window = config.get("sliding_window", None if architecture == "llama" else 4096)
    if architecture == "mistral" and window is not None:
        # An absent key means Hugging Face's default of 4,096, so only an explicit null is full attention.
        raise ModelError(
            f'sliding window ({window} tokens) is not supported; {remedy} ("sliding_window": null)'
        )
    if architecture in ("qwen2", "qwen3") and config.get("use_sliding_window") and window is not None:
        from_layer = config.get("max_window_layers", 28)
        if config.get("layer_types") is None and _integer(config, "num_hidden_layers") > from_layer:
            raise ModelError(
                f"sliding window ({window} tokens, use_sliding_window) is not supported; {remedy}"
            )


def _kv_heads(config: dict[str, Any], architecture: Architecture, heads: int) -> int:
    default = _DEFAULT_KV_HEADS[architecture]
    if config.get("num_key_value_heads", default) is None:
        return heads
    return _integer(config, "num_key_value_heads", default)


def _head_dim(config: dict[str, Any], architecture: Architecture, hidden: int, heads: int) -> int:
    if config.get("head_dim", 128 if architecture == "qwen3" else None) is not None:
        return _integer(config, "head_dim", 128)
    if heads <= 0 or hidden % heads:
        raise ModelError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}; set head_dim")
    return hidden // heads


def _rope(config: dict[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    # Same precedence as Hugging Face: `rope_scaling` replaces `rope_parameters`, and a theta inside
    # either one beats the top-level `rope_theta`.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"rope settings {rope!r} are not an object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(
            f"rope settings per layer type ({', '.join(rope)}) are not supported; one for all layers is"
        )
    theta = _number(rope if "rope_theta" in rope else config, "rope_theta", 10_000.0)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise ModelError(
            f"partial_rotary_factor {partial} is not supported; rotary over the whole head (1.0) is"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" and "mrope_section" not in rope:
        return theta, None
    if kind not in ROPE_KINDS:
        kind = "mrope" if "mrope_section" in rope else kind
        raise ModelError(f"rope type {kind!r} is not supported; supported: default, {', '.join(ROPE_KINDS)}")
    return theta, _scaling(cast(RopeKind, kind), config, rope, max_positions)


def _scaling(kind: RopeKind, config: dict[str, Any], rope: dict[str, Any], max_positions: int) -> RopeScaling:
    if kind == "linear":
        return RopeScaling(kind=kind, factor=_number(rope, "factor"))
    if kind == "dynamic":
        # Hugging Face grows from max_position_embeddings whatever original_max_position_embeddings says.
        return RopeScaling(kind=kind, factor=_number(rope, "factor"), original_max_positions=max_positions)
    holder = config if "original_max_position_embeddings" in config else rope
    original = _integer(holder, "original_max_position_embeddings", max_positions)
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=_number(rope, "factor"),
            low_freq_factor=_number(rope, "low_freq_factor"),
            high_freq_factor=_number(rope, "high_freq_factor"),
            original_max_positions=original,
        )
    explicit = rope.get("factor") is not None
    return RopeScaling(
        kind=kind,
        factor=_number(rope, "factor") if explicit else max_positions / original,
        original_max_positions=original,
        beta_fast=_optional(rope, "beta_fast") or 32.0,
        beta_slow=_optional(rope, "beta_slow") or 1.0,
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_optional(rope, "attention_factor"),
        mscale=_optional(rope, "mscale"),
        mscale_all_dim=_optional(rope, "mscale_all_dim"),
    )


def _value(record: dict[str, Any], key: str, default: Any) -> Any:
    value = record.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config lacks {key}")
    return value


def _integer(record: dict[str, Any], key: str, default: int | None = None) -> int:
    value = _value(record, key, default)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole:
        raise ModelError(f"config has {key}={value!r}; it must be an integer")
    return int(value)


def _number(record: dict[str, Any], key: str, default: float | None = None) -> float:
    value = _value(record, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"config has {key}={value!r}; it must be a finite number")
    return float(value)


def _optional(record: dict[str, Any], key: str) -> float | None:
    return None if record.get(key) is None else _number(record, key)
