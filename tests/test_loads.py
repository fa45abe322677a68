"""Records into slots: what a GPU does at once equals the loop of the other platforms, bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from engines import geometry

from swapkv_jax import make_plan
from swapkv_jax.group_graphs import load_groups
from swapkv_jax.program import _fill_records

HEADS, DIM, TOKENS, ROWS, RECORDS = 2, 16, 4, 3, 5
VALUES = 2 * HEADS * DIM * TOKENS + 24  # and what follows a payload


def as_on_a_gpu(*operands: jax.Array, cuda: Any, **_: Any) -> Any:
    return cuda(*operands)


def both_ways(function: Any, arguments: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[list[np.ndarray]]:
    looped = jax.jit(lambda *a: function(*a))(*arguments)
    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_a_gpu)
    at_once = jax.jit(lambda *a: function(*a))(*arguments)
    return [[np.asarray(part) for part in parts] for parts in (looped, at_once)]


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
    looped, at_once = both_ways(_fill_records(plan), arguments, monkeypatch)
    for one, other in zip(looped, at_once, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(looped[0], k)
