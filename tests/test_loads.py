"""Writes of KV: what one platform does in its own way equals what the others do, bit for bit."""

from __future__ import annotations

from typing import Any, get_args

import jax
import numpy as np
import pytest
from engines import geometry

from swapkv_jax import make_plan
from swapkv_jax.attention_choice import Attention
from swapkv_jax.plan import KVDType
from swapkv_jax.selection import Selection
from swapkv_jax.slot_layouts import slot_layout
from swapkv_jax.writes import append_tokens, fill_layer, fill_records

HEADS, TOKENS, ROWS, RECORDS = 2, 4, 3, 5


def both_ways(
    function: Any, arguments: list[Any], monkeypatch: pytest.MonkeyPatch, platform: str = "cuda"
) -> list[list[np.ndarray]]:
    """What the CPU's way and that of `platform` give, both on this CPU."""
    here = jax.jit(lambda *a: function(*a))(*arguments)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *operands, **ways: ways[platform](*operands))
    there = jax.jit(lambda *a: function(*a))(*arguments)
    return [[np.asarray(part) for part in jax.tree.leaves(parts)] for parts in (here, there)]


@pytest.mark.parametrize(
    ("attention", "kv_dtype"),
    [
        *((attention, "bfloat16") for attention in get_args(Attention)),
        ("xla", "float32"),
        ("xla", "int8"),
        ("mosaic_gpu", "float32"),
    ],
)
def test_groups_into_slots(attention: Attention, kv_dtype: KVDType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that every layout has each record's K and V where they belong, and nothing else changes."""
    dim, tokens = (64, 8) if attention == "mosaic_hopper" else (80, TOKENS)
    model = geometry(head_dim=dim)
    selection = Selection(selected_groups=4, reuse_slots=6, rank=8, sink_groups=0, recent_groups=1)
    plan = make_plan(
        model,
        cache="group",
        batch=ROWS,
        max_context=96,
        group_tokens=tokens,
        selection=selection,
        attention=attention,
        kv_dtype=kv_dtype,
    )
    rng = np.random.default_rng(0)
    parts = plan.pool_parts(selection.reuse_slots + 1)
    held = parts[next(iter(parts))].dtype

    def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return (8 * rng.standard_normal(shape, np.float32)).astype(dtype)

    pool = tuple(
        numbers(part.shape, kv_dtype).view(held) if part.dtype == held else numbers(part.shape, part.dtype)
        for part in parts.values()
    )
    records = numbers((RECORDS, plan.stride_bytes // plan.itemsize), kv_dtype)
    sides = 2 * model.kv_heads * dim * tokens  # numbers of a record; of int8 their steps come after them
    steps = numbers((RECORDS, model.kv_heads, 2), "float32")
    if kv_dtype == "int8":
        records[:, sides : plan.payload_bytes] = steps.reshape(RECORDS, -1).view(np.int8)
    rows = np.array([0, 0, 1, 2, 2], np.int32)
    slots = np.array([6, 1, 1, 0, 5], np.int32)
    looped, at_once = both_ways(slot_layout(plan).load, [pool, records, rows, slots], monkeypatch)
    for one, other in zip(looped, at_once, strict=True):
        np.testing.assert_array_equal(one, other)
    heads, size = model.kv_heads, sides // 2
    k, v = slots_of(pool, dim, tokens)
    for i, (record, row, slot) in enumerate(zip(records.view(held), rows, slots, strict=True)):
        k[row, :, slot] = record[:size].reshape(heads, dim, tokens).swapaxes(1, 2)
        v[row, :, slot] = record[size : 2 * size].reshape(heads, tokens, dim)
        if kv_dtype == "int8":
            pool[2][row, :, :, slot] = steps[i]
    if kv_dtype == "int8":
        np.testing.assert_array_equal(looped[2], pool[2])
    for loaded, expected in zip(slots_of(tuple(looped[:-1]), dim, tokens), (k, v), strict=True):
        np.testing.assert_array_equal(loaded, expected)


def slots_of(pool: tuple[np.ndarray, ...], dim: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V [B, Hkv, C1, G, D] of a pool, as views of it."""
    if len(pool) == 1:
        return pool[0][..., :dim], pool[0][..., dim : 2 * dim]
    k, v = pool[:2]
    return (
        k.reshape(*k.shape[:3], -1, tokens).transpose(0, 1, 3, 4, 2),
        v.reshape(*v.shape[:2], -1, tokens, dim),
    )


def test_records_into_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = geometry()
    plan = make_plan(
        model,
        cache="layer",
        tier="disk",
        batch=ROWS,
        max_context=96,
        group_tokens=TOKENS,
        record_alignment=512,
    )
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal(shape).astype(np.float32) for shape in plan.layer_shapes(ROWS))
    stored = rng.standard_normal((RECORDS, plan.stride_bytes // 4)).astype(np.float32)
    arguments = [k, v, stored, np.int32(1), np.int32(3)]
    looped, at_once = both_ways(fill_records(plan), arguments, monkeypatch)
    for one, other in zip(looped, at_once, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(looped[0], k)


@pytest.mark.parametrize(("rows", "heads"), [(3, 2), (1, 2), (1, 1)])
def test_a_layer_into_a_slot(monkeypatch: pytest.MonkeyPatch, rows: int, heads: int) -> None:
    rng = np.random.default_rng(2)
    k_slot, k = rng.standard_normal((2, rows, heads, 8, 12), np.float32)
    v_slot, v = rng.standard_normal((2, rows, heads, 12, 8), np.float32)
    whole, by_part = both_ways(fill_layer, [k_slot, v_slot, k, v], monkeypatch, "tpu")
    for parts in (whole, by_part):
        np.testing.assert_array_equal(parts[0], k)
        np.testing.assert_array_equal(parts[1], v)


def test_new_tokens_into_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, one in the middle, the last; a row that is full keeps all but its last token."""
    rng = np.random.default_rng(3)
    lengths = np.array([0, 5, 11, 12], np.int32)
    ks = list(rng.standard_normal((2, 4, HEADS, 8, 12), np.float32))
    vs = list(rng.standard_normal((2, 4, HEADS, 12, 8), np.float32))
    news = list(rng.standard_normal((2, 2, 4, HEADS, 8), np.float32))
    by_row, at_once = both_ways(append_tokens, [ks, vs, news, lengths], monkeypatch)
    for one, other in zip(by_row, at_once, strict=True):
        np.testing.assert_array_equal(one, other)
    for layer in range(2):
        expected = ks[layer].copy()
        for row, at in enumerate(lengths):
            expected[row, :, :, min(at, 11)] = news[layer][0, row]
        np.testing.assert_array_equal(by_row[layer], expected)
