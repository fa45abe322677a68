"""Geometries and plans that portability is checked for: shapes alone, no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portability_targets import Target

from swapkv_jax.errors import ModelError
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.models.hf_config import geometry_from_hf_config
from swapkv_jax.models.named import model_names, named_geometry
from swapkv_jax.plan import DType, Plan
from swapkv_jax.plan_files import load_plan
from swapkv_jax.planner import make_plan


@dataclass(frozen=True)
class Subject:
    """A model, and the batch and context that its plans are made for."""

    name: str
    geometry: Geometry
    batch: int
    context: int


_SIZES = {  # rows, and tokens per row
    "smollm2-135m": (8, 8192),
    "llama-3.1-8b": (8, 32_768),
    "qwen3-4b": (8, 32_768),
}
MODELS = tuple(_SIZES)
DEFAULT_PLANS = ("resident", "layer/dram", "layer/disk", "group")
# `group` attends groups of the planner's size by the platform's kernel for them, where it has one; `group/4` others.
PLANS = (*DEFAULT_PLANS, "group/xla", "group/4")
DTYPES: dict[str, DType] = {"cpu": "float32", "tpu": "bfloat16", "gpu": "bfloat16"}


def subject(source: str, batch: int | None, context: int | None) -> Subject:
    """A model that ships by name, or one whose Hugging Face `config.json` (or its directory) is named.

    Raises:
      ModelError: there is no such model, or not of a kind that is supported.
    """
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    geometry = None if path.is_file() else named_geometry(source)
    name = source if geometry is not None else path.parent.name
    try:
        geometry = geometry or geometry_from_hf_config(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: {error}; name a config.json, or one of {', '.join(model_names())}"
        ) from None
    rows, tokens = _SIZES.get(source, (8, min(8192, geometry.context_limit)))
    return Subject(name, geometry, batch or rows, context or tokens)


def plan_for(choice: str, chosen: Subject, target: Target) -> Plan:
    """The planner's plan of one of `PLANS` for a target.

    Raises:
      PlanError: the geometry or the sizes allow none.
    """
    policy, _, variant = choice.partition("/")
    fields: dict[str, Any] = {"cache": policy, "platform": target.kind, "capability": target.capability}
    if variant.isdigit():
        fields["group_tokens"] = int(variant)
    elif variant:
        fields["tier" if policy == "layer" else "attention"] = variant
    return make_plan(
        chosen.geometry,
        batch=chosen.batch,
        max_context=chosen.context,
        dtype=DTYPES[target.kind],
        **fields,
    )


def read_plan(path: Path) -> Plan:
    """A plan as `--dry-run` of decode prints it, or with what is known of it.

    Raises:
      PlanError: the file cannot be read, or holds no plan.
    """
    return load_plan(str(path))
