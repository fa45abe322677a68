"""Every strategy in the engine: exact with everything selected, its memory the plan's, its summary the rule's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import CONTEXT, GROUP, Decoded, assert_same, decode, prompts_of, resident_plan
from msgspec.structs import replace

from swapkv_jax import Engine, Plan, make_plan
from swapkv_jax.accounting import device_bytes, kv_bytes
from swapkv_jax.adapter import Adapter
from swapkv_jax.cache.group import GroupCache
from swapkv_jax.cache.resident import ResidentCache
from swapkv_jax.calibration import default_text
from swapkv_jax.models import Model
from swapkv_jax.models.blocks import split_block
from swapkv_jax.selection import Selection
from swapkv_jax.staging import fetch, host_view
from swapkv_jax.strategies.adapters import directions
from swapkv_jax.strategies.calibrate import calibrate_heads
from swapkv_jax.strategies.named import strategy_of

pytestmark = pytest.mark.usefixtures("shared_programs")

NEW = 10
LENGTHS = (1, GROUP + 1, CONTEXT - NEW)
TOLERANCE = 1e-4  # tokens lie in another order in the slots, so sums round otherwise
SIZES: dict[str, dict[str, Any]] = {
    "quest": {"group_tokens": GROUP, "rank": 32},
    "loki": {"group_tokens": 1, "rank": 8, "summary": "token"},
    "infinigen": {"group_tokens": 1, "rank": 8, "summary": "token"},
    "shadowkv": {"group_tokens": GROUP, "rank": 32, "outlier_groups": 2},
}


@pytest.fixture(scope="module")
def reference(deep: Model) -> tuple[Decoded, list[np.ndarray]]:
    """What `resident` decodes, and its keys [B, Hkv, D, S] of every layer."""
    with Engine(deep, resident_plan(deep, len(LENGTHS))) as engine:
        decoded = decode(engine, prompts_of(*LENGTHS), NEW)
        cache = engine._cache
        assert isinstance(cache, ResidentCache)
        return decoded, [host_view(k).copy() for k in cache._k]


def plan_of(model: Model, name: str, selected: int | None = None, **fields: Any) -> Plan:
    """All groups, or `selected` of them."""
    sizes = dict(SIZES[name])
    tokens = sizes.pop("group_tokens")
    groups = selected or CONTEXT // tokens
    known = {"selected_groups": groups, "reuse_slots": groups, "recent_groups": 1, "load_buckets": (4, 16)}
    return make_plan(
        model.geometry,
        cache="group",
        batch=len(LENGTHS),
        max_context=CONTEXT,
        group_tokens=tokens,
        record_alignment=512,
        prefill_chunks=(8, 20),
        kv_dtype="float32",
        selection=Selection(strategy=name, **{**known, **sizes, **fields}),  # type: ignore[arg-type]
    )


def adapter_of(model: Model, name: str) -> Adapter | None:
    if name in ("quest", "shadowkv"):
        return None
    return calibrate_heads(model, default_text()[:2000], strategy=name, window=100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "lookahead"),
    [
        ("quest", "step"),
        pytest.param("quest", "layer", marks=pytest.mark.slow),
        pytest.param("loki", "step", marks=pytest.mark.slow),
        ("infinigen", "layer"),
        ("shadowkv", "layer"),
        pytest.param("shadowkv", "step", marks=pytest.mark.slow),
    ],
)
def test_all_groups_selected_is_resident(
    deep: Model, reference: tuple[Decoded, list[np.ndarray]], tmp_path: Path, name: str, lookahead: str
) -> None:
    plan = plan_of(deep, name, lookahead=lookahead, summary_dtype="float32")
    adapter = adapter_of(deep, name)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        decoded = decode(engine, prompts_of(*LENGTHS), NEW)
        assert_same(decoded, reference[0], TOLERANCE)
        assert decoded.compiles == 0
        assert all(step == decoded.addresses[0] for step in decoded.addresses)
        memory, device = plan.memory(deep.geometry), device_bytes(engine)
        assert device.planned == device.compiled == memory.device
        buffers = {b.name: b.bytes for b in plan.buffers(deep.geometry)}
        summary = sum(size for key, size in buffers.items() if key.startswith("summary"))
        assert engine.use.summary_bytes == summary
        assert kv_bytes(plan, deep.geometry)["device"] == sum(
            size for key, size in buffers.items() if key.startswith(("summary", "pool", "rolling."))
        )
        cache = engine._cache
        assert isinstance(cache, GroupCache)
        summaries = [fetch(part) for part in cache._summary]
    adapters = directions(plan, adapter)
    if name == "shadowkv":
        return  # its summary has a test of its own
    strategy: Any = strategy_of(plan, split_block(deep.geometry, deep.dtype))
    for keys, written, vectors in zip(reference[1], summaries, adapters, strict=True):
        for row, length in enumerate(LENGTHS):
            places = (length + NEW - 1) // plan.place_tokens  # the last token's keys are not computed
            expected = np.asarray(strategy.summarise(keys[row][None], vectors))[0, :places]
            np.testing.assert_allclose(written[row, :places], expected, atol=2e-4)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in ("quest", "loki", "infinigen")] + ["shadowkv"],
)
def test_few_groups_selected(deep: Model, tmp_path: Path, name: str) -> None:
    """What a strategy selects is read and attended, without a word from another."""
    plan = plan_of(deep, name, 5)
    plan = replace(plan, transport="copy" if name == "shadowkv" else "alias")  # keys are made either way
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter_of(deep, name)) as engine:
        decoded = decode(engine, prompts_of(*LENGTHS), NEW)
        assert np.isfinite(decoded.logits).all()
        assert decoded.compiles == 0
        assert 0 < engine.use.groups_read < engine.use.groups_selected
        device = device_bytes(engine)
        assert device.planned == device.compiled
