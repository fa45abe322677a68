"""Weights of a Hugging Face directory: one `model.safetensors`, or shards listed by an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from swapkv_jax.errors import ModelError
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.models.weights import Progress, Slot, Weights, assemble

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_FLOATS = {"F64", "F32", "F16", "BF16"}
_OUTER = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_MODULES = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def hf_name(slot: Slot) -> str:
    """The Hugging Face name of a slot's tensor."""
    if slot.layer is None:
        return _OUTER[slot.key]
    key, kind = (slot.key[: -len("_bias")], "bias") if slot.key.endswith("_bias") else (slot.key, "weight")
    return f"model.layers.{slot.layer}.{_MODULES[key]}.{kind}"


def load_safetensors(
    directory: Path, geometry: Geometry, dtype: str, progress: Progress | None = None
) -> tuple[Weights, str]:
    """Weights of the directory in `dtype`, and their digest.

    Raises ModelError naming the file and tensor that is missing, damaged, misshapen or of a non-float type.
    """
    source = SafetensorsSource(directory)
    head = _OUTER["head"]
    if geometry.tied and head in source.names:
        _check_tied_head(source, head)

    def ignore(name: str) -> bool:
        # `inv_freq` buffers are derived from the configuration; a tied head repeats the embedding.
        return name.endswith("rotary_emb.inv_freq") or (geometry.tied and name == head)

    return assemble(geometry, source, hf_name, dtype, ignore=ignore, progress=progress)


def _check_tied_head(source: SafetensorsSource, head: str) -> None:
    """A tied model's own head is only redundant if it repeats the embedding.

    Hugging Face's releases disagree on which of two different ones counts, so neither is guessed.
    """
    embed = _OUTER["embed"]
    if embed in source.names and not np.array_equal(source.read(embed), source.read(head)):
        raise ModelError(
            f"{source.where(head)}: {head} differs from {embed} although the config ties them; "
            'set "tie_word_embeddings": false in config.json, or remove the tensor'
        )


class SafetensorsSource:
    """Tensors of all shards by name. Files are opened when first read and stay memory-mapped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._handles: dict[Path, Any] = {}
        self._file_of = self._files()

    def _files(self) -> dict[str, Path]:
        single, index = self._directory / SINGLE, self._directory / INDEX
        if single.is_file():
            return dict.fromkeys(self._open(single).keys(), single)
        if index.is_file():
            return self._sharded(index)
        if torch_files := sorted(self._directory.glob("*.bin")):
            raise ModelError(
                f"{torch_files[0]}: PyTorch .bin weights are not supported; "
                "save the model with safe_serialization=True to get model.safetensors"
            )
        raise ModelError(f"{self._directory}: no {SINGLE} and no {INDEX}; download the complete checkpoint")

    def _sharded(self, index: Path) -> dict[str, Path]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index}: unreadable index ({error!r}); download it again") from error
        files: dict[str, Path] = {}
        for name in names:
            shard = self._directory / name
            if not shard.is_file():
                raise ModelError(
                    f"{shard}: shard named by {INDEX} is missing; download the complete checkpoint"
                )
            # What the shard holds counts, not what the index claims: a stale index must not hide a tensor.
            for tensor in self._open(shard).keys():  # noqa: SIM118 - a safetensors handle is not iterable
                if tensor in files:
                    raise ModelError(f"{shard}: tensor {tensor} is also in {files[tensor].name}; keep one")
                files[tensor] = shard
        if absent := sorted(weight_map.keys() - files.keys()):
            shard = self._directory / weight_map[absent[0]]
            raise ModelError(f"{shard}: tensor {absent[0]} promised by {INDEX} is missing; download it again")
        return files

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            try:
                self._handles[path] = safe_open(path, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path}: damaged or truncated safetensors ({error}); download it again"
                ) from error
        return self._handles[path]

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def where(self, name: str) -> str:
        return str(self._file_of.get(name, self._directory))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(self._file_of[name]).get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        path = self._file_of[name]
        handle = self._open(path)
        stored = handle.get_slice(name).get_dtype()
        if stored not in _FLOATS:
            raise ModelError(
                f"{path}: tensor {name} is {stored}, not float weights; "
                f"supported: {', '.join(sorted(_FLOATS))}"
            )
        try:
            return handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: cannot read tensor {name} ({error}); download it again") from error
