"""Planned bytes are compiled bytes are bytes in use, for random geometries and plans."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, get_args

import jax
import msgspec
import numpy as np
import pytest
from engines import geometry, layer_plan, random_model
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from swapkv_jax import Engine, Plan, make_plan
from swapkv_jax.accounting import device_bytes, kv_bytes
from swapkv_jax.adapter import Adapter
from swapkv_jax.models import Geometry, Model
from swapkv_jax.selection import Lookahead, Selection


@st.composite
def cases(draw: st.DrawFn) -> tuple[Geometry, dict[str, Any]]:
    """A small geometry and choices for it. Compiling takes a second each, so draws are few."""
    kv_heads = draw(st.integers(1, 3))
    g = geometry(
        layers=draw(st.integers(2, 5)),
        hidden=8 * draw(st.integers(1, 6)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 12)),
        intermediate=draw(st.integers(1, 60)),
        vocab=draw(st.integers(2, 90)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    fields: dict[str, Any] = {
        "layers": g.layers,
        "kv_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "batch": draw(st.integers(1, 3)),
        "max_context": draw(st.integers(6, 70)),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        "group_tokens": draw(st.integers(1, 9)),
        "prefill_chunks": (draw(st.integers(1, 30)),),
        "record_alignment": draw(st.sampled_from([512, 4096])),
    }
    return g, fields


def any_adapter(model: Model) -> Adapter:
    """Directions at random: what they select is all the same here."""
    g = model.geometry
    size = g.kv_heads * g.head_dim
    vectors = np.linalg.qr(np.random.default_rng(0).standard_normal((g.layers, size, size)))[0]
    return Adapter(
        vectors=vectors.astype(np.float32),
        spectrum=np.ones((g.layers, size)),
        fingerprint=model.fingerprint,
        text_digest="",
        tokens=1,
    )


def check(g: Geometry, plan: Plan, store_dir: Path) -> None:
    model = random_model(g, plan.dtype)
    memory = plan.memory(g)
    gc.collect()
    others = jax.live_arrays()  # kept alive, so that their ids stay theirs
    before = {id(array) for array in others}

    def live() -> int:
        """Bytes of this engine's device arrays, weights left out; arrays over the same memory count once."""
        arrays = [a for a in jax.live_arrays() if id(a) not in before]
        arrays = [a for a in arrays if a.sharding.memory_kind != "pinned_host"]
        held: dict[int, int] = {}
        for a in arrays:
            if a.nbytes:
                at = a.unsafe_buffer_pointer()
                held[at] = max(a.nbytes, held.get(at, 0))  # staging is seen in several sizes
        for leaf in jax.tree.leaves(engine.params):
            held.pop(leaf.unsafe_buffer_pointer(), None)
        return sum(held.values())

    adapter = any_adapter(model) if plan.policy == "group" else None
    with Engine(model, plan, store_dir=store_dir, disk_limit=memory.disk or None, adapter=adapter) as engine:
        device = device_bytes(engine)
        assert device.planned == memory.device + memory.aliased
        assert device.compiled == device.planned
        assert device.aliased == memory.aliased
        assert device.prefill == memory.prefill
        assert device.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(engine.params))
        for graph in engine.program.decode_graphs:
            assert graph.memory.arguments == graph.memory.planned_arguments, graph.name
        # Rows as long as the plan allows: every tier then holds all it may.
        prompts = [[0] * (plan.max_context - 5) for _ in range(plan.batch)]
        steps = 0
        for _ in engine.generate(prompts, max_new_tokens=5):
            steps += 1
            if plan.policy == "resident":
                assert live() == memory.device
            elif plan.policy == "group" or plan.tier == "disk":
                slots = [b.bytes for b in plan.buffers(g) if b.name.startswith("staging")]
                fences = 4 * len(slots)  # one number each, beside what is planned
                if plan.transport == "alias":
                    least = most = memory.device + sum(slots)
                else:  # records are on their way, or have arrived and are gone
                    least, most = memory.device - sum(slots), memory.device
                assert least <= live() <= most + fences
            elif plan.transport == "alias":
                assert live() == memory.device + memory.dram  # all layers of the pool, as they are
            else:
                assert live() == memory.device
            assert engine.use.dram_used == memory.dram
            assert engine.use.disk_used <= memory.disk
            if plan.tier == "disk":
                records = (
                    plan.batch * plan.layers * (plan.max_context // plan.group_tokens) * plan.stride_bytes
                )
                assert engine.use.disk_used >= records
        assert steps == 5


EXAMPLES = settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would compile for minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@EXAMPLES
@given(cases(), st.data())
def test_resident(tmp_path: Path, case: tuple[Geometry, dict[str, Any]], data: st.DataObject) -> None:
    g, fields = case
    per_segment = data.draw(st.integers(1, g.layers))
    check(g, Plan(policy="resident", layers_per_segment=per_segment, **fields), tmp_path)


@pytest.mark.parametrize("transport", ["alias", "copy"])
@EXAMPLES
@given(cases(), st.data())
def test_layer_from_dram(
    tmp_path: Path, transport: Any, case: tuple[Geometry, dict[str, Any]], data: st.DataObject
) -> None:
    g, fields = case
    physical = data.draw(st.integers(2, g.layers))
    plan = Plan(policy="layer", tier="dram", transport=transport, physical_layers=physical, **fields)
    check(g, plan, tmp_path)


@pytest.mark.parametrize("transport", ["alias", "copy"])
@EXAMPLES
@given(cases(), st.data())
def test_layer_from_disk(
    tmp_path: Path, transport: Any, case: tuple[Geometry, dict[str, Any]], data: st.DataObject
) -> None:
    g, fields = case
    plan = Plan(
        policy="layer",
        tier="disk",
        transport=transport,
        physical_layers=data.draw(st.integers(2, g.layers)),
        staging_groups=data.draw(st.integers(1, 4)),
        staging_slots=data.draw(st.integers(2, 5)),
        **fields,
    )
    check(g, plan, tmp_path)


@EXAMPLES
@given(cases(), st.data())
def test_group(tmp_path: Path, case: tuple[Geometry, dict[str, Any]], data: st.DataObject) -> None:
    g, fields = case
    selected = data.draw(st.integers(2, 9))
    choice = Selection(
        selected_groups=selected,
        reuse_slots=data.draw(st.integers(selected, 12)),
        rank=data.draw(st.integers(1, g.kv_heads * g.head_dim)),
        recent_groups=1,
        summary=data.draw(st.sampled_from(["token", "group"])),
        summary_dtype=data.draw(st.sampled_from(["float32", "bfloat16"])),
        lookahead=data.draw(st.sampled_from(get_args(Lookahead))),
        load_buckets=(2, data.draw(st.integers(3, 20))),
    )
    rows = data.draw(st.none() | st.integers(1, fields["batch"]))
    plan = Plan(
        policy="group",
        tier="dram" if rows else "disk",
        dram_rows=rows,
        transport=data.draw(st.sampled_from(["alias", "copy"])),
        staging_slots=data.draw(st.integers(2, 4)),
        selection=choice,
        **fields,
    )
    check(g, plan, tmp_path)


@pytest.mark.parametrize("transport", ["dram-alias", "dram-copy", "disk-alias"])
def test_prefill_stays_within_what_is_planned(deep: Model, transport: str, tmp_path: Path) -> None:
    """Device memory during prefill: the plan's, and the prompt's hidden states."""
    g = deep.geometry
    plan = layer_plan(deep, transport, 3, physical_layers=3, prefill_chunks=(16,))
    memory = plan.memory(g)
    gc.collect()
    others = jax.live_arrays()  # kept alive, so that their ids stay theirs
    before = {id(array) for array in others}
    seen = []

    def measure(done: int, total: int) -> None:
        arrays = [a for a in jax.live_arrays() if id(a) not in before]
        arrays = [a for a in arrays if a.sharding.memory_kind != "pinned_host"]
        weights = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.params)}
        held = {a.unsafe_buffer_pointer(): a.nbytes for a in arrays}
        seen.append(sum(n for pointer, n in held.items() if pointer not in weights))

    with Engine(deep, plan, store_dir=tmp_path) as engine:
        list(engine.generate([[5] * 80] * 3, max_new_tokens=3, on_prefill=measure, ignore_eos=True))
    hidden = 96 * g.hidden * 4
    staging = sum(b.bytes for b in plan.buffers(g) if b.name.startswith("staging"))
    assert max(seen) <= memory.device + memory.prefill + hidden + (
        staging if transport == "disk-alias" else 0
    )


def test_kv_bytes_are_those_of_keys_values_and_summaries() -> None:
    """By hand, for SmolLM2's sizes: 2 rows, G 4, M 70, C 140, rank 64, 7,680 tokens of float32."""
    g = geometry(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, max_positions=8192)
    batch, size, tokens, record = 2, 3 * 64, 7680, 8192  # 6,144 bytes of K and V and a footer, in whole pages
    groups = Selection(selected_groups=70, reuse_slots=140, rank=64, load_buckets=(8, 32))
    of_tokens = msgspec.structs.replace(groups, summary="token")
    for choice, summary_bytes in ((groups, 1920 * 64 * 2), (of_tokens, 7680 * 64 * 2)):
        group = make_plan(
            g,
            cache="group",
            batch=batch,
            max_context=tokens,
            group_tokens=4,
            selection=choice,
            kv_dtype="float32",
        )
        held = kv_bytes(group, g)
        slots, rolling = 2 * 141 * 4 * size * 4, 2 * 4 * size * 4
        assert held["device"] == 30 * batch * (slots + rolling + summary_bytes)
        assert held["dram"] == (2 * 32 + 30 * batch) * record  # two staging slots, and the rolling records
        assert held["disk"] >= 30 * batch * tokens // 4 * record
    resident = make_plan(g, cache="resident", batch=batch, max_context=tokens)
    assert kv_bytes(resident, g) == {"device": resident.full_kv_bytes, "dram": 0, "disk": 0}
    aliased = make_plan(g, cache="layer", tier="dram", batch=batch, max_context=tokens)
    assert kv_bytes(aliased, g) == {"device": 0, "dram": aliased.full_kv_bytes, "disk": 0}
