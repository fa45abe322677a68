"""Geometries by name, for planning without a checkpoint: shapes as the models' own `config.json` state them."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

from swapkv_jax.models.geometry import Geometry
from swapkv_jax.models.hf_config import geometry_from_hf_config


@cache
def model_names() -> tuple[str, ...]:
    """Names that `named_geometry` knows."""
    files = resources.files("swapkv_jax.models").joinpath("configs").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def named_geometry(name: str) -> Geometry | None:
    """The geometry of a model by its name in any case, with or without its organisation ("meta-llama/Llama-3.1-8B"),
    instruction-tuned or not; None for a name that is not known."""
    plain = name.lower().rpartition("/")[2].removesuffix("-instruct")
    if plain not in model_names():
        return None
    file = resources.files("swapkv_jax.models").joinpath("configs", f"{plain}.json")
    return geometry_from_hf_config(json.loads(file.read_bytes()))


def name_of(geometry: Geometry) -> str | None:
    """The name of a model of these shapes, whatever its positions and their scaling; None if it is not known."""
    for name in model_names():
        known = named_geometry(name)
        if known is not None and _shapes(known) == _shapes(geometry):
            return name
    return None


def _shapes(g: Geometry) -> tuple[object, ...]:
    return (
        g.architecture,
        g.layers,
        g.hidden,
        g.heads,
        g.kv_heads,
        g.head_dim,
        g.intermediate,
        g.vocab,
        g.tied,
    )
