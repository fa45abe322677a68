"""The model that an analysis is about: known by its shapes, without weights."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swapkv_jax.errors import ModelError, UsageError
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.models.hf_config import geometry_from_hf_config
from swapkv_jax.models.named import model_names, named_geometry


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What an analysis needs of a model.

    `geometry` is None where this engine cannot decode the model; `note` says why, and what is unknown then.
    `weights_known`: whether the geometry tells how many bytes the weights take.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    context_limit: int | None
    geometry: Geometry | None
    weights_known: bool = True
    note: str | None = None

    @classmethod
    def of(cls, name: str, geometry: Geometry, note: str | None = None) -> Subject:
        """A model of a geometry; with a note its checkpoint is not one that this engine decodes."""
        return cls(
            name=name,
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            context_limit=geometry.context_limit,
            geometry=geometry if note is None else None,
            weights_known=note is None,
            note=note,
        )


def find_subject(model: str) -> Subject:
    """A model by the directory of its Hugging Face `config.json`, the file itself, a GGUF file, or a known name.

    Raises:
      UsageError: there is no such model.
      ModelError: it cannot be read, or its configuration does not say what KV a token leaves behind.
    """
    # os.path: its tests are False, not errors, for names that no file can have.
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        path = path / "config.json"
    elif not os.path.isfile(path) and (geometry := named_geometry(model)) is not None:
        return Subject.of(model, geometry)
    if path.suffix == ".gguf" and os.path.isfile(path):
        from swapkv_jax.models.loader import open_model

        return Subject.of(path.stem, open_model(str(path)).geometry)
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON ({error})"
        raise (ModelError if os.path.exists(path) else UsageError)(
            f"{path}: {reason}; give a config.json, its directory, a GGUF file, or one of {', '.join(model_names())}"
        ) from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not a model's configuration; give a config.json")
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    try:
        return _from_config(name, config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _from_config(name: str, config: dict[str, Any]) -> Subject:
    try:
        return Subject.of(name, geometry_from_hf_config(config))
    except ModelError as error:
        refusal = error
    if config.get("quantization_config"):
        # The KV cache does not care how the weights are kept.
        unquantised = {key: value for key, value in config.items() if key != "quantization_config"}
        return Subject.of(name, geometry_from_hf_config(unquantised), _note(refusal))
    return _kv_alone(name, config, refusal)


def _kv_alone(name: str, config: dict[str, Any], refusal: ModelError) -> Subject:
    """A model that is unknown but for its attention, as long as that is full attention in every layer."""
    other_kv = set(config.get("layer_types") or ()) - {"full_attention"} or config.get("kv_lora_rank")
    windowed = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    sizes = {key: config.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")}
    sizes["num_key_value_heads"] = config.get("num_key_value_heads") or sizes["num_attention_heads"]
    sizes["head_dim"] = config.get("head_dim") or _quotient(
        sizes["hidden_size"], sizes["num_attention_heads"]
    )
    needed = [sizes[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim")]
    sound = [size for size in needed if isinstance(size, int) and size > 0]
    if other_kv or windowed or len(sound) < len(needed):
        raise refusal
    limit = config.get("max_position_embeddings")
    layers, kv_heads, head_dim = sound
    return Subject(
        name=name,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_limit=limit if isinstance(limit, int) and limit > 0 else None,
        geometry=None,
        weights_known=False,
        note=_note(refusal),
    )


def _quotient(hidden: Any, heads: Any) -> int | None:
    whole = isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0
    return hidden // heads if whole else None


def _note(refusal: ModelError) -> str:
    return f"analysed only: {refusal}; give --weights-bytes, since the configuration does not tell"
