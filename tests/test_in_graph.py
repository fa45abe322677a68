"""Policy `layer` as one graph that copies layers out of pinned host memory: equal to `resident`, its bytes as
planned, and by a TPU's compiler no more layers on the device than the plan says."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from engines import CHUNKS, CONTEXT, GROUP, assert_same, decode, geometry, prompts_of, resident_plan
from jax.experimental import topologies

from swapkv_jax import Engine, Plan, PlanError, Sampling, make_plan
from swapkv_jax.accounting import device_bytes, kv_bytes
from swapkv_jax.cache.in_graph import InGraphLayerCache
from swapkv_jax.graph import GraphSpec
from swapkv_jax.models import Model
from swapkv_jax.program import decode_specs

NEW = 9
LENGTHS = (1, GROUP + 1, CONTEXT - NEW)


def plan_of(model: Any, **fields: Any) -> Plan:
    known = {"batch": len(LENGTHS), "max_context": CONTEXT, "group_tokens": GROUP, "prefill_chunks": CHUNKS}
    choices = {"transport": "in_graph", "physical_layers": 2}
    return make_plan(model, cache="layer", tier="dram", **{**known, **choices, **fields})


@pytest.mark.parametrize("physical", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_decode_equals_resident(deep: Model, physical: int) -> None:
    """Twice on one engine, whose pool holds what must not be used: NaN in K, the largest finite number in V."""
    with Engine(deep, resident_plan(deep, len(LENGTHS))) as engine:
        expected = decode(engine, prompts_of(*LENGTHS), NEW, finish={1: 4})
    with Engine(deep, plan_of(deep.geometry, physical_layers=physical)) as engine:
        cache = engine._cache
        assert isinstance(cache, InGraphLayerCache)
        for k, v in zip(cache._k, cache._v, strict=True):
            k[...], v[...] = np.nan, np.finfo(np.float32).max
        for _ in range(2):
            ours = decode(engine, prompts_of(*LENGTHS), NEW, finish={1: 4})
            assert_same(ours, expected, 1e-5)
            assert ours.compiles == 0
            assert all(step == ours.addresses[0] for step in ours.addresses)
        held = device_bytes(engine)
        assert held.planned == held.compiled
        layer = 2 * CONTEXT * len(LENGTHS) * deep.geometry.kv_heads * deep.geometry.head_dim * 4
        assert engine.use.dram_used == deep.geometry.layers * layer
        assert kv_bytes(engine.plan, deep.geometry)["device"] == physical * layer + layer // 2
        assert held.prefill == physical * layer + layer // 2


def test_the_planner_has_a_tpu_copy_in_its_graph() -> None:
    model = geometry(layers=5)
    plan = make_plan(model, cache="layer", tier="dram", platform="tpu", max_context=64)
    assert (plan.transport, plan.layers_per_segment, plan.physical_layers) == ("in_graph", 5, 2)
    assert plan.segments == 1
    others: tuple[dict[str, Any], ...] = ({"tier": "disk"}, {"tier": "dram", "transport": "copy"})
    for other in others:
        plan = make_plan(model, cache="layer", platform="tpu", max_context=64, **other)
        assert (plan.transport, plan.layers_per_segment) == ("copy", 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"layers_per_segment": 1},
            "in one graph over transport in_graph: layers_per_segment must be 5, not 1",
        ),
        ({"transport": "copy"}, "by the layer over transport copy: layers_per_segment must be 1, not 5"),
        ({"tier": "disk", "staging_groups": 1, "staging_slots": 2}, "in_graph copies from DRAM"),
    ],
)
def test_plans_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(
            geometry(layers=5),
            cache="layer",
            max_context=64,
            **{"tier": "dram", "transport": "in_graph", "layers_per_segment": 5, **fields},
        )
    with pytest.raises(PlanError, match="transport in_graph belongs to policy layer"):
        make_plan(geometry(), cache="group", max_context=64, transport="in_graph")


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch) -> jax.sharding.Sharding:
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    described = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    return jax.sharding.SingleDeviceSharding(described.devices[0])


@pytest.mark.parametrize("physical", [2, 3])
def test_a_tpus_graph_copies_a_layer_while_the_ones_before_compute(
    tpu: jax.sharding.Sharding, physical: int
) -> None:
    """Each copy is asynchronous and starts only when the layer whose slot it takes has been used: so many layers are
    on the device, and no more."""
    layers = 6
    model = geometry(
        layers=layers, hidden=512, heads=8, kv_heads=2, head_dim=128, intermediate=1024, max_positions=8192
    )
    plan = plan_of(model, batch=8, max_context=8192, physical_layers=physical, dtype="bfloat16")
    (spec,) = (s for s in decode_specs(plan, model, [Sampling()]) if s.name == "segment")
    assert isinstance(spec, GraphSpec)
    compiled = spec.trace(tpu).lower().compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.host_argument_size_in_bytes == spec.host_bytes
    # At this size one libtpu (0.0.42) does without the spare, another (0.0.50) places K and V of one layer more.
    slots = {b.name: b.bytes for b in plan.buffers(model) if b.phase == "graph"}
    spare = slots.pop("slot.spare")
    assert sum(slots.values()) <= memory.temp_size_in_bytes < 1.05 * (sum(slots.values()) + 2 * spare)
    text = compiled.as_text()
    assert text is not None
    spans = copies(text)
    assert len(spans) == 2 * layers
    # More than one layer's K and V at once, so that one arrives while another is attended.
    assert max(sum(first <= at <= last for first, last in spans) for at, _ in spans) == 2 * physical


def copies(text: str) -> list[tuple[int, int]]:
    """Of each asynchronous slice in a scheduled module: the lines where it starts and where it is last used."""
    lines = text[text.index("ENTRY") :].splitlines()
    spans = []
    for at, line in enumerate(lines):
        if start := re.match(r"\s+(%dynamic-slice-start[.\d]*) = ", line):
            (done,) = (
                found[1]
                for other in lines
                if (
                    found := re.match(rf"\s+(%dynamic-slice-done[.\d]*) = .*\({re.escape(start[1])}\)", other)
                )
            )
            used = re.compile(re.escape(done) + r"[,)]")
            spans.append((at, max(i for i, other in enumerate(lines) if used.search(other))))
    return spans
