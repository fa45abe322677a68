"""A loaded model as a GGUF file that llama.cpp reads, for token ids alone: it holds no vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import gguf
import numpy as np

from swapkv_jax.models import Geometry, Model
from swapkv_jax.models.gguf_loader import gguf_name
from swapkv_jax.models.weights import Slot, slots

Kind = Literal["F32", "Q4_1"]


def write_gguf(model: Model, path: Path, kind: Kind) -> int:
    """Writes `model.weights`, which must still be there, at `path`. Returns the tensors' bytes.

    Norms and biases are float32 whatever the `kind`, and so is a matrix whose rows Q4_1 does not divide.

    Raises:
      OSError: it cannot be written.
    """
    g = model.geometry
    writer = gguf.GGUFWriter(path, architecture(g))
    writer.add_context_length(g.max_positions)
    writer.add_embedding_length(g.hidden)
    writer.add_block_count(g.layers)
    writer.add_feed_forward_length(g.intermediate)
    writer.add_head_count(g.heads)
    writer.add_head_count_kv(g.kv_heads)
    writer.add_key_length(g.head_dim)
    writer.add_value_length(g.head_dim)
    writer.add_rope_dimension_count(g.head_dim)
    writer.add_rope_freq_base(g.rope_theta)
    writer.add_layer_norm_rms_eps(g.norm_eps)
    writer.add_vocab_size(g.vocab)
    writer.add_tokenizer_model("no_vocab")
    written = 0
    for slot in slots(g):
        tensor = _tensor(model, slot)
        quantised = kind == "Q4_1" and tensor.ndim == 2 and tensor.shape[1] % _Q4_1_BLOCK == 0
        if quantised:
            tensor = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q4_1)
        written += tensor.nbytes
        writer.add_tensor(
            gguf_name(slot), tensor, raw_dtype=gguf.GGMLQuantizationType.Q4_1 if quantised else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


_Q4_1_BLOCK = 32


def architecture(geometry: Geometry) -> str:
    """What llama.cpp calls it: Mistral is Llama there."""
    return "llama" if geometry.architecture == "mistral" else geometry.architecture


def rotates_pairs(geometry: Geometry) -> bool:
    """Whether llama.cpp's rotary embedding turns adjacent dimensions (2i, 2i + 1) instead of (i, i + D/2), so that it
    wants queries and keys in another order."""
    return architecture(geometry) == "llama"


def in_pairs(values: np.ndarray, axis: int) -> np.ndarray:
    """A head's dimensions along `axis` from (i, i + D/2) to (2i, 2i + 1)."""
    axis %= values.ndim
    halves = (*values.shape[:axis], 2, values.shape[axis] // 2, *values.shape[axis + 1 :])
    return values.reshape(halves).swapaxes(axis, axis + 1).reshape(values.shape)


def _tensor(model: Model, slot: Slot) -> np.ndarray:
    """In float32, and in llama.cpp's order."""
    weights, g = model.weights, model.geometry
    source = {**weights} if slot.layer is None else weights["layers"][slot.layer]
    tensor = np.asarray(source[slot.key], np.float32)
    heads = {"q": g.heads, "k": g.kv_heads}.get(slot.key.removesuffix("_bias"))
    if heads is None or not rotates_pairs(g):
        return tensor
    return in_pairs(tensor.reshape(heads, g.head_dim, *tensor.shape[1:]), 1).reshape(tensor.shape)
