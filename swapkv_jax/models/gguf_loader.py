"""GGUF → Geometry and weights, for the architectures `llama` (with Mistral), `qwen2` and `qwen3`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from swapkv_jax.errors import ModelError
from swapkv_jax.models.geometry import Architecture, Geometry, RopeScaling
from swapkv_jax.models.gguf_file import GGUFFile
from swapkv_jax.models.weights import Progress, Slot, Weights, assemble

_ROPE_FACTORS = "rope_freqs.weight"
_OUTER = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_TENSORS = {
    "input_norm": "attn_norm",
    "post_norm": "ffn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
# Metadata (under the architecture's prefix) that changes the computation in a way not implemented here,
# with the values that leave it unchanged.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


def gguf_name(slot: Slot) -> str:
    """The GGUF name of a slot's tensor."""
    if slot.layer is None:
        return _OUTER[slot.key]
    key, kind = (slot.key[: -len("_bias")], "bias") if slot.key.endswith("_bias") else (slot.key, "weight")
    return f"blk.{slot.layer}.{_TENSORS[key]}.{kind}"


def geometry_from_gguf(file: GGUFFile) -> Geometry:
    """The geometry that the metadata and the tensors present describe.

    Raises ModelError naming the path and the key that is unsupported, missing or contradictory.
    """
    keys = _Keys(file)
    if int(file.metadata.get("split.count", 1) or 1) > 1:
        raise ModelError(f"{file.path}: one part of a split GGUF; merge the parts into one file first")
    for key, neutral in _NEUTRAL.items():
        value = keys.get(key)
        if value is not None and value not in neutral:
            raise ModelError(
                f"{file.path}: {keys.architecture}.{key}={value} is not supported; models without it are"
            )
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // heads if heads else 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise ModelError(
                f"{file.path}: {keys.architecture}.{key}={keys.get(key)} with head dimension {head_dim} "
                "is not supported; they must be equal"
            )
    theta, max_positions = keys.number("rope.freq_base", 10_000.0), keys.integer("context_length")
    for name in (_OUTER["embed"], "blk.0.attn_q.weight"):
        if name not in file.tensors:
            raise ModelError(f"{file.path}: tensor {name} is missing; the checkpoint is incomplete")
    try:
        return Geometry(
            architecture=keys.architecture,
            layers=keys.integer("block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=keys.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate=keys.integer("feed_forward_length"),
            vocab=file.tensors[_OUTER["embed"]].shape[0],
            norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rope_theta=theta,
            rope_scaling=_rope_scaling(file, keys, max_positions),
            max_positions=max_positions,
            qkv_bias="blk.0.attn_q.bias" in file.tensors or keys.architecture == "qwen2",
            o_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            qk_norm=keys.architecture == "qwen3",
            tied=_OUTER["head"] not in file.tensors,
        )
    except ModelError as error:
        message = str(error)
        raise ModelError(message if str(file.path) in message else f"{file.path}: {message}") from error


def load_gguf_weights(
    file: GGUFFile, geometry: Geometry, dtype: str, progress: Progress | None = None
) -> tuple[Weights, str]:
    """Weights in `dtype` and Hugging Face's row order, and their digest. Raises ModelError as `assemble`."""
    source = _HalfRotation(file, geometry) if geometry.architecture == "llama" else file

    def ignore(name: str) -> bool:
        return name == _ROPE_FACTORS  # already in the geometry

    return assemble(geometry, source, gguf_name, dtype, ignore=ignore, progress=progress)


class _HalfRotation:
    """A `llama` GGUF with the rows of Q and K back in half-rotation order.

    Converters permute them for RoPE over adjacent pairs (2i, 2i+1); here, as in Hugging Face, the pairs are
    (i, i + D/2).
    """

    def __init__(self, file: GGUFFile, geometry: Geometry) -> None:
        self._file = file
        self._heads = {"attn_q": geometry.heads, "attn_k": geometry.kv_heads}

    @property
    def names(self) -> set[str]:
        return self._file.names

    def where(self, name: str) -> str:
        return self._file.where(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(name)

    def read(self, name: str) -> np.ndarray:
        array = self._file.read(name)
        parts = name.split(".")
        heads = self._heads.get(parts[2]) if len(parts) == 4 else None
        if heads is None:
            return array
        paired = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
        return paired.swapaxes(1, 2).reshape(array.shape)


class _Keys:
    """Metadata under the architecture's prefix, with typed access."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        name = file.metadata.get("general.architecture")
        if name != "llama" and name != "qwen2" and name != "qwen3":
            raise ModelError(
                f"{file.path}: GGUF architecture {name!r} is not supported; "
                "supported: llama (with Mistral), qwen2, qwen3"
            )
        self.architecture: Architecture = name

    def get(self, key: str) -> Any:
        return self._file.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # some converters write a value per layer
        value = default if value is None else value
        full = f"{self.architecture}.{key}"
        if value is None:
            raise ModelError(f"{self._file.path}: GGUF metadata lacks {full}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(
                f"{self._file.path}: GGUF metadata {full}={value!r} is not supported; one number is"
            )
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))


def _rope_scaling(file: GGUFFile, keys: _Keys, max_positions: int) -> RopeScaling | None:
    factors = None
    if _ROPE_FACTORS in file.tensors:
        factors = tuple(file.read(_ROPE_FACTORS).reshape(-1).tolist())
    kind = keys.get("rope.scaling.type")
    if kind in (None, "none"):
        legacy = keys.number("rope.scale_linear", 1.0)
        scaled = factors is not None or legacy != 1.0
        return RopeScaling(kind="linear", factor=legacy, factors=factors) if scaled else None
    factor = keys.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor, factors=factors)
    if kind != "yarn":
        raise ModelError(
            f"{file.path}: rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn"
        )
    # llama.cpp multiplies its own 1 + 0.1 ln(factor) by the file's factor.
    extra = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
    own = 1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_positions=keys.integer("rope.scaling.original_context_length", max_positions),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        truncate=True,
        attention_factor=own * extra,
        factors=factors,
    )
