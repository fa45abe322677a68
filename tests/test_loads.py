"""Writes of KV: what one platform does in its own way equals what the others do, bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from engines import geometry

from swapkv_jax import make_plan
from swapkv_jax.group_graphs import load_groups
from swapkv_jax.writes import append_tokens, fill_layer, fill_records

HEADS, DIM, TOKENS, ROWS, RECORDS = 2, 16, 4, 3, 5
VALUES = 2 * HEADS * DIM * TOKENS + 24  # and what follows a payload


def both_ways(
    function: Any, arguments: list[Any], monkeypatch: pytest.MonkeyPatch, platform: str = "cuda"
) -> list[list[np.ndarray]]:
    """What the CPU's way and that of `platform` give, both on this CPU."""
    here = jax.jit(lambda *a: function(*a))(*arguments)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *operands, **ways: ways[platform](*operands))
    there = jax.jit(lambda *a: function(*a))(*arguments)
    return [[np.asarray(part) for part in jax.tree.leaves(parts)] for parts in (here, there)]


def records(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((RECORDS, VALUES), np.float32)


def test_groups_into_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, slots = np.random.default_rng(0), 7
    k = rng.standard_normal((ROWS, HEADS, DIM, slots * TOKENS), np.float32)
    v = k.swapaxes(2, 3).copy()
    rows = np.array([0, 0, 1, 2, 2], np.int32)
    places = np.array([6, 1, 1, 0, 5], np.int32)

    def load(*arguments: Any) -> Any:
        return load_groups(*arguments, tokens=TOKENS)

    looped, at_once = both_ways(load, [k, v, records(rng), rows, places], monkeypatch)
    for one, other in zip(looped, at_once, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(looped[0], k)


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
