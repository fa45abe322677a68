"""One way in to any model: a Hugging Face directory or hub id, a GGUF file, or the embedded model's name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from swapkv_jax.errors import ModelError
from swapkv_jax.models.embedded import EMBEDDED_NAME, embedded_path
from swapkv_jax.models.fuse import Params, fuse
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.models.gguf_file import MAGIC, GGUFFile
from swapkv_jax.models.gguf_loader import geometry_from_gguf, load_gguf_weights
from swapkv_jax.models.gguf_tokenizer import load_gguf_tokenizer
from swapkv_jax.models.hf_config import geometry_from_hf_config
from swapkv_jax.models.hf_tokenizer import load_hf_tokenizer, read_json
from swapkv_jax.models.hub import fetch_from_hub
from swapkv_jax.models.safetensors_loader import load_safetensors
from swapkv_jax.models.tokenizer import Tokenizer
from swapkv_jax.models.weights import Progress, Weights, dtype_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SOURCES = f"pass a Hugging Face directory, a hub id (org/name), a GGUF file, or {EMBEDDED_NAME}"


@dataclass(frozen=True)
class Model:
    """A model in host memory.

    `fingerprint` (32 hex digits) covers geometry with RoPE, dtype and every weight: KV computed by models of
    equal fingerprint is interchangeable. `eos_token_ids` end a generation; they may be none. `weights` is
    the checkpoint as loaded, until the first use of `params` takes it over.
    """

    geometry: Geometry
    weights: Weights
    tokenizer: Tokenizer
    dtype: str
    fingerprint: str
    source: str
    name: str
    eos_token_ids: frozenset[int]

    @cached_property
    def params(self) -> Params:
        """The weights as the decoder block takes them, made on first use out of `weights`, which is empty then."""
        return fuse(self.weights)


@dataclass(frozen=True)
class ModelSource:
    """A model that was found and is supported, before its weights are read: enough to plan with."""

    geometry: Geometry
    tokenizer: Tokenizer
    source: str
    name: str
    eos_token_ids: frozenset[int]
    read_weights: Callable[[str, Progress | None], tuple[Weights, str]]
    """(dtype, progress) → weights and their digest."""

    def load(self, dtype: str = "float32", progress: Progress | None = None) -> Model:
        """Reads the weights, cast to `dtype`. Raises ModelError for damaged ones, UsageError for the dtype."""
        dtype_of(dtype)
        weights, digest = self.read_weights(dtype, progress)
        return Model(
            geometry=self.geometry,
            weights=weights,
            tokenizer=self.tokenizer,
            dtype=dtype,
            fingerprint=_fingerprint(self.geometry, dtype, digest),
            source=self.source,
            name=self.name,
            eos_token_ids=self.eos_token_ids,
        )


def load_model(source: str, dtype: str = "float32", progress: Progress | None = None) -> Model:
    """Loads a model, its weights cast to `dtype` ("float32", "bfloat16" or "float16").

    `source` is `smollm2-135m` (fetched once, then cached), a directory, a GGUF file, or a hub id; what exists
    on disk wins over a hub id of the same spelling. `progress(what, done, total)` is called while fetching
    and reading. Raises ModelError naming what is missing, damaged or unsupported; UsageError for the dtype.
    """
    dtype_of(dtype)
    return open_model(source, progress).load(dtype, progress)


def open_model(source: str, progress: Progress | None = None) -> ModelSource:
    """Finds a model as `load_model` does and reads its configuration and tokenizer, but no weights."""
    if source == EMBEDDED_NAME:
        return _open_gguf(embedded_path(progress), source, EMBEDDED_NAME)
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _open_directory(path, source, path.resolve().name)
        if path.is_file():
            _check_gguf(path)
            return _open_gguf(path, source, path.stem)
    except PermissionError as error:
        raise ModelError(f"{path}: {error.strerror}; make it readable") from error
    if path.suffix != ".gguf" and _HUB_ID.fullmatch(source):
        return _open_directory(fetch_from_hub(source, progress), source, source)
    raise ModelError(f"{source}: no such model; {_SOURCES}")


def _open_directory(directory: Path, source: str, name: str) -> ModelSource:
    path = directory / "config.json"
    if not path.is_file():
        ggufs = sorted(directory.glob("*.gguf"))
        hint = f"pass the file {ggufs[0]}" if ggufs else _SOURCES
        raise ModelError(f"{directory}: no config.json, so no Hugging Face model; {hint}")
    config = read_json(path)
    try:
        geometry = geometry_from_hf_config(config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    tokenizer = load_hf_tokenizer(directory, geometry.vocab)
    return ModelSource(
        geometry=geometry,
        tokenizer=tokenizer,
        source=source,
        name=name,
        eos_token_ids=_hf_eos(read_json(directory / "generation_config.json"), config, tokenizer),
        read_weights=lambda dtype, progress: load_safetensors(directory, geometry, dtype, progress),
    )


def _open_gguf(path: Path, source: str, name: str) -> ModelSource:
    file = GGUFFile(path)
    geometry = geometry_from_gguf(file)
    tokenizer, eos_token_ids = load_gguf_tokenizer(file, geometry.vocab)
    return ModelSource(
        geometry=geometry,
        tokenizer=tokenizer,
        source=source,
        name=name,
        eos_token_ids=eos_token_ids,
        read_weights=lambda dtype, progress: load_gguf_weights(file, geometry, dtype, progress),
    )


def _check_gguf(path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
    if magic == MAGIC:
        return
    if path.suffix == ".gguf":
        raise ModelError(f"{path}: damaged GGUF (it starts with {magic!r}); download it again")
    raise ModelError(f"{path}: not a GGUF file; {_SOURCES}")


def _fingerprint(geometry: Geometry, dtype: str, weights_digest: str) -> str:
    record = {"geometry": geometry.to_dict(), "dtype": dtype, "weights": weights_digest}
    return xxhash.xxh3_128(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _hf_eos(generation: dict[str, Any], config: dict[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end a generation: the first of the files that names any, as Hugging Face's `generate`."""
    for record in (generation, config):
        ids = record.get("eos_token_id")
        if isinstance(ids, int):
            return frozenset({ids})
        if isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids):
            return frozenset(ids)
        if ids is not None and ids != []:
            raise ModelError(f"eos_token_id is {ids!r}; it must be a token id or a list of them")
    own = tokenizer.id_of(tokenizer.eos_token) if tokenizer.eos_token else None
    return frozenset() if own is None else frozenset({own})
