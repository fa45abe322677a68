"""Geometries and plans that portability is checked for: shapes alone, no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portability_targets import Target

from swapkv_jax.errors import ModelError, UsageError
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.models.hf_config import geometry_from_hf_config
from swapkv_jax.plan import DType, Plan
from swapkv_jax.planner import make_plan


@dataclass(frozen=True)
class Subject:
    """A model, and the batch and context that its plans are made for."""

    name: str
    geometry: Geometry
    batch: int
    context: int


_CONFIGS: dict[str, tuple[dict[str, Any], int, int]] = {  # with rows and tokens per row
    "smollm2-135m": (
        {
            "model_type": "llama",
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100_000.0,
            "tie_word_embeddings": True,
        },
        8,
        8192,
    ),
    "llama-3.1-8b": (
        {
            "model_type": "llama",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        8,
        32_768,
    ),
    "qwen3-4b": (
        {
            "model_type": "qwen3",
            "num_hidden_layers": 36,
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 9728,
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": True,
        },
        8,
        32_768,
    ),
}
MODELS = tuple(_CONFIGS)
DEFAULT_PLANS = ("resident", "layer/dram", "layer/disk", "group")
PLANS = (*DEFAULT_PLANS, "group/xla")  # `group` attends by the kernel of the platform, where it has one
DTYPES: dict[str, DType] = {"cpu": "float32", "tpu": "bfloat16", "gpu": "bfloat16"}


def subject(source: str, batch: int | None, context: int | None) -> Subject:
    """A built-in model by name, or one whose Hugging Face `config.json` (or its directory) is named.

    Raises:
      ModelError: there is no such model, or not of a kind that is supported.
    """
    if source in _CONFIGS:
        config, rows, tokens = _CONFIGS[source]
        return Subject(source, geometry_from_hf_config(config), batch or rows, context or tokens)
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        geometry = geometry_from_hf_config(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}; name a config.json, or one of {', '.join(MODELS)}") from None
    return Subject(path.parent.name, geometry, batch or 8, context or min(8192, geometry.context_limit))


def plan_for(choice: str, chosen: Subject, target: Target) -> Plan:
    """The planner's plan of one of `PLANS` for a target.

    Raises:
      PlanError: the geometry or the sizes allow none.
    """
    policy, _, variant = choice.partition("/")
    fields: dict[str, Any] = {"cache": policy, "platform": target.kind, "capability": target.capability}
    if variant:
        fields["tier" if policy == "layer" else "attention"] = variant
    return make_plan(
        chosen.geometry,
        batch=chosen.batch,
        max_context=chosen.context,
        dtype=DTYPES[target.kind],
        **fields,
    )


def read_plan(path: Path) -> Plan:
    """A plan as `--dry-run` of decode prints it.

    Raises:
      UsageError: the file cannot be read. PlanError: it is not a plan.
    """
    try:
        return Plan.from_json(path.read_bytes(), source=str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a file that holds a plan") from None
