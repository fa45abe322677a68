"""Each strategy against a direct NumPy statement of its rule: summaries, scores and what is selected."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax import Engine, Plan, PlanError, UsageError, make_plan
from swapkv_jax.cache.resident import ResidentCache
from swapkv_jax.calibration import default_text, encode
from swapkv_jax.models import Model
from swapkv_jax.models.blocks import query_weights, split_block
from swapkv_jax.predictor import select
from swapkv_jax.selection import Selection
from swapkv_jax.staging import host_view
from swapkv_jax.strategies.adapters import directions, plan_adapter
from swapkv_jax.strategies.calibrate import queries_and_keys
from swapkv_jax.strategies.infinigen import infinigen_directions
from swapkv_jax.strategies.loki import loki_directions
from swapkv_jax.strategies.named import strategy_of
from swapkv_jax.strategies.sizes import check_strategy, summary_width

EXAMPLES = settings(deadline=None, max_examples=5)


def plan_of(
    choice: Selection, *, batch: int, kv_heads: int, head_dim: int, group_tokens: int, groups: int
) -> Plan:
    return Plan(
        policy="group",
        tier="disk",
        transport="alias",
        staging_slots=2,
        layers=1,
        batch=batch,
        kv_heads=kv_heads,
        head_dim=head_dim,
        group_tokens=group_tokens,
        max_context=groups * group_tokens,
        selection=choice,
    )


def compiled(plan: Plan) -> Any:
    """The plan's strategy, each function as one graph: a third of what its operations take to compile one by one."""
    strategy = strategy_of(plan)
    names = ("summarise", "place", "score")
    return SimpleNamespace(**{name: jax.jit(getattr(strategy, name)) for name in names})


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes, and random keys [B, Hkv, D, S], queries [B, Hkv, R, D] and lengths of them."""
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    repeat, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 6]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    return {"batch": batch, "kv_heads": kv_heads, "repeat": repeat, "head_dim": head_dim, "rng": rng}


def draw_keys(case: dict[str, Any], tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng, shape = case["rng"], (case["batch"], case["kv_heads"])
    k = rng.standard_normal((*shape, case["head_dim"], tokens)).astype(np.float32)
    q = rng.standard_normal((*shape, case["repeat"], case["head_dim"])).astype(np.float32)
    lengths = rng.integers(0, tokens + 1, case["batch"]).astype(np.int32)
    return k, q, lengths


def put_together(logits: np.ndarray, complete: int, aggregate: str, scale: float) -> np.ndarray:
    """Scores [N] of one row from each query head's logits [Hq, N], of which `complete` groups exist."""
    scores = np.full(logits.shape[1], -np.inf)
    there = logits[:, :complete].astype(np.float64)
    if aggregate == "sum":
        scores[:complete] = there.mean(axis=0)
    elif complete:
        weights = np.exp(scale * there - (scale * there).max(axis=1, keepdims=True))
        scores[:complete] = (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
    return scores


_select = jax.jit(select, static_argnums=(2, 3, 4))


def check_scores(scores: Any, expected: np.ndarray, lengths: np.ndarray, plan: Plan) -> None:
    """Equal scores, and the groups selected are those that score most."""
    np.testing.assert_allclose(scores, expected, rtol=2e-5, atol=2e-5)
    choice = plan.selection
    assert choice is not None
    complete: Any = lengths // plan.group_tokens
    sizes = (choice.selected_groups, choice.sink_groups, choice.recent_groups)
    chosen = np.asarray(_select(scores, complete, *sizes))
    for row, count in enumerate(complete):
        pinned = {*range(min(choice.sink_groups, count)), *range(max(0, count - choice.recent_groups), count)}
        others = sorted(set(range(count)) - pinned, key=lambda group: -expected[row, group])
        best = pinned | set(others[: choice.selected_groups - len(pinned)])
        assert {g for g in chosen[row].tolist() if g >= 0} == best


# ---- quest ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["sum", "softmax"])
@EXAMPLES
@given(case=cases(), group_tokens=st.integers(1, 5), groups=st.integers(1, 9))
def test_quest_bounds_the_keys_of_a_group(
    aggregate: Any, case: dict[str, Any], group_tokens: int, groups: int
) -> None:
    sizes = {name: case[name] for name in ("batch", "kv_heads", "head_dim")}
    choice = Selection(
        strategy="quest",
        selected_groups=3,
        reuse_slots=3,
        rank=case["kv_heads"] * case["head_dim"],
        sink_groups=0,
        recent_groups=1,
        aggregate=aggregate,
    )
    plan = plan_of(choice, group_tokens=group_tokens, groups=groups, **sizes)
    strategy = compiled(plan)
    k, q, lengths = draw_keys(case, plan.capacity)

    by_group = k.reshape(*k.shape[:3], groups, group_tokens)
    least, largest = by_group.min(-1), by_group.max(-1)  # [B, Hkv, D, N]
    summary = np.concatenate([strategy.summarise(row[None], ()) for row in k])
    assert summary.shape == (
        case["batch"],
        groups,
        summary_width(choice, case["kv_heads"], case["head_dim"]),
    )
    np.testing.assert_array_equal(
        summary.reshape(case["batch"], groups, case["kv_heads"], 2, case["head_dim"]),
        np.stack([least, largest], axis=2).transpose(0, 4, 1, 2, 3),
    )
    last = k[..., -group_tokens:].swapaxes(2, 3)  # [B, Hkv, G, D]
    np.testing.assert_array_equal(
        strategy.place(last[:, :, -1], last if group_tokens > 1 else None, ())[:, 0], summary[:, -1]
    )

    bound = np.maximum(q[..., None] * least[:, :, None], q[..., None] * largest[:, :, None]).sum(axis=3)
    exact = np.einsum("bkrd,bkdng->bkrng", q, by_group)
    assert (bound[..., None] >= exact - 1e-4).all()
    expected = np.stack(
        [
            put_together(
                bound[row].reshape(-1, groups),
                int(lengths[row]) // group_tokens,
                aggregate,
                case["head_dim"] ** -0.5,
            )
            for row in range(case["batch"])
        ]
    )
    summary[np.arange(groups) >= (lengths // group_tokens)[:, None]] = np.nan  # takes no part
    check_scores(strategy.score(q, (), summary, lengths), expected, lengths, plan)


# ---- loki and infinigen --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "aggregate"), [("loki", "softmax"), ("infinigen", "sum")])
@EXAMPLES
@given(case=cases(), group_tokens=st.integers(1, 3), groups=st.integers(1, 9), data=st.data())
def test_single_tokens_are_scored_by_a_few_directions_of_each_head(
    name: Any, aggregate: Any, case: dict[str, Any], group_tokens: int, groups: int, data: st.DataObject
) -> None:
    kv_heads, head_dim = case["kv_heads"], case["head_dim"]
    rank = data.draw(st.integers(1, head_dim))
    choice = Selection(
        strategy=name,
        selected_groups=3,
        reuse_slots=3,
        rank=rank,
        sink_groups=1,
        recent_groups=1,
        summary="token",
        aggregate=aggregate,
    )
    plan = plan_of(
        choice,
        group_tokens=group_tokens,
        groups=groups,
        batch=case["batch"],
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    strategy = compiled(plan)
    k, q, lengths = draw_keys(case, plan.capacity)
    basis = np.linalg.qr(case["rng"].standard_normal((kv_heads, head_dim, head_dim)))[0][..., :rank]
    adapter = basis.reshape(-1, rank).astype(np.float32)

    coordinates = np.einsum("bkds,kdr->bskr", k, basis)
    summary = np.concatenate([strategy.summarise(row[None], adapter) for row in k])
    assert summary.shape == (case["batch"], plan.capacity, summary_width(choice, kv_heads, head_dim))
    np.testing.assert_allclose(summary, coordinates.reshape(summary.shape), atol=1e-5)
    np.testing.assert_allclose(strategy.place(k[..., -1], None, adapter)[:, 0], summary[:, -1], atol=1e-5)

    logits = np.einsum("bkrd,kde,bske->bkrs", q, basis, coordinates)
    best = logits.reshape(case["batch"], -1, groups, group_tokens)
    if aggregate == "sum":  # heads are put together token by token, then a group's best token counts
        best = np.broadcast_to(best.mean(axis=1, keepdims=True), best.shape)
    expected = np.stack(
        [
            put_together(best[row].max(axis=-1), int(lengths[row]) // group_tokens, aggregate, head_dim**-0.5)
            for row in range(case["batch"])
        ]
    )
    summary[np.arange(plan.capacity) >= (lengths // group_tokens * group_tokens)[:, None]] = np.nan
    check_scores(strategy.score(q, adapter, summary, lengths), expected, lengths, plan)


@pytest.fixture(scope="module")
def seen(deep: Model) -> tuple[list[list[int]], list[tuple[np.ndarray, np.ndarray]]]:
    """Windows of tokens, and the queries and keys of every layer that they give rise to."""
    ids = encode(deep, default_text(), 170)
    windows = [ids[:70], ids[70:140], ids[140:]]
    return windows, list(queries_and_keys(deep, windows))


def test_the_queries_and_keys_of_a_text(
    deep: Model, seen: tuple[list[list[int]], list[tuple[np.ndarray, np.ndarray]]]
) -> None:
    """Keys are those of `resident`'s prefill; queries make the scores that the layer's input makes."""
    windows, layers = seen
    g = deep.geometry
    plan = make_plan(g, cache="resident", batch=len(windows), max_context=72)
    with Engine(deep, plan) as engine:
        next(engine.generate(windows, max_new_tokens=1))
        cache = engine._cache
        assert isinstance(cache, ResidentCache)
        for (queries, keys), resident in zip(layers, cache._k, strict=True):
            assert queries.shape == (170, g.kv_heads, g.query_per_kv, g.head_dim)
            kept = host_view(resident)
            rows = [kept[row, :, :, : len(ids)].transpose(2, 0, 1) for row, ids in enumerate(windows)]
            np.testing.assert_allclose(keys, np.concatenate(rows), atol=1e-5)
    block = split_block(g, deep.dtype)
    x = np.asarray(deep.params["embed"])[windows[0]]
    positions = np.arange(70, dtype=np.int32)
    weights = query_weights(deep.params["layers"][0], g, g.heads * g.head_dim)
    expected = block.queries(deep.params["layers"][0], weights, x, positions, np.full(70, 70, np.int32))
    np.testing.assert_allclose(layers[0][0][:70], expected, atol=1e-5)


def test_loki_finds_the_principal_components_of_each_head(
    seen: tuple[list[list[int]], list[tuple[np.ndarray, np.ndarray]]],
) -> None:
    queries, keys = seen[1][3]
    vectors, variances = loki_directions(queries, keys)
    for head in range(keys.shape[1]):
        centred = keys[:, head] - keys[:, head].mean(axis=0)
        _, singular, right = np.linalg.svd(centred.astype(np.float64), full_matrices=False)
        np.testing.assert_allclose(variances[head], singular**2 / len(keys), atol=1e-8)
        np.testing.assert_allclose(np.abs(right @ vectors[head]), np.eye(keys.shape[2]), atol=1e-5)


def test_infinigen_skews_each_head_by_its_queries(
    seen: tuple[list[list[int]], list[tuple[np.ndarray, np.ndarray]]],
) -> None:
    """Columns are right singular vectors of the queries, in the order of what partial scores are made of; all of
    them together change no score."""
    queries, keys = seen[1][3]
    vectors, weights = infinigen_directions(queries, keys)
    for head in range(keys.shape[1]):
        q, k = queries[:, head].reshape(-1, keys.shape[2]).astype(np.float64), keys[:, head]
        right = np.linalg.svd(q, full_matrices=False)[2]
        same = np.abs(right @ vectors[head])
        np.testing.assert_allclose(np.sort(same, axis=0)[-1], 1, atol=1e-5)  # each is one of them
        assert sorted(same.argmax(axis=0)) == list(range(keys.shape[2]))
        expected = [np.abs(q @ column).mean() + np.abs(k @ column).mean() for column in vectors[head].T]
        np.testing.assert_allclose(weights[head], expected)
        assert expected == sorted(expected, reverse=True)
        np.testing.assert_allclose((q @ vectors[head]) @ (k @ vectors[head]).T, q @ k.T, atol=1e-4)


def test_an_adapter_of_heads_is_kept(deep: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrated once, found again, and not taken for another strategy's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("swapkv_jax.calibration.default_text", lambda: default_text()[:2000])
    plans = {
        name: plan_of(
            selection(strategy=name, summary="token"),
            batch=1, kv_heads=2, head_dim=16, group_tokens=1, groups=20,
        )
        for name in ("loki", "infinigen")
    }  # fmt: skip
    plans = {name: msgspec.structs.replace(plan, layers=7) for name, plan in plans.items()}
    made, note = plan_adapter(deep, plans["loki"])
    assert note is not None
    assert "calibrated on" in note
    assert made is not None
    assert (made.strategy, made.vectors.shape) == ("loki", (7, 32, 16))
    gram = np.einsum("lkdr,lkds->lkrs", *[made.vectors.reshape(7, 2, 16, 16)] * 2)
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(16), gram.shape), atol=1e-5)
    again, note = plan_adapter(deep, plans["loki"])
    assert again is not None
    assert note is not None
    assert note.startswith("adapter: loaded")
    np.testing.assert_array_equal(again.vectors, made.vectors)
    kept = made.variance_kept(8)
    assert ((kept > 0) & (kept < 1)).all()
    assert directions(plans["loki"], made)[0].shape == (32, 8)
    with pytest.raises(UsageError, match="one of strategy loki, the plan's is infinigen"):
        directions(plans["infinigen"], made)
    with pytest.raises(UsageError, match="infinigen needs an adapter"):
        directions(plans["infinigen"], None)


# ---- what cannot work ----------------------------------------------------------------------------------


def selection(**fields: Any) -> Selection:
    return Selection(**{"selected_groups": 10, "reuse_slots": 10, "rank": 8, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "quest"}, "rank must be Hkv·D = 32, not 8"),
        ({"strategy": "quest", "rank": 32, "summary": "token"}, "summary must be group"),
        ({"strategy": "loki"}, "summary must be token, not group"),
        ({"strategy": "infinigen", "summary": "token", "rank": 17}, "per KV head, of D = 16"),
    ],
)
def test_choices_that_a_strategy_does_not_have(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_strategy(selection(**fields), 2, 16)


def test_a_plan_without_a_strategy_is_one_of_kvswap() -> None:
    """So that plans from before there was a choice keep their bytes."""
    named = selection(strategy="kvswap")
    assert named == selection()
    assert named.strategy_name == "kvswap"
    plan = plan_of(named, batch=1, kv_heads=2, head_dim=16, group_tokens=4, groups=20)
    assert "strategy" not in plan.to_json()
    quest = plan_of(
        selection(strategy="quest", rank=32), batch=1, kv_heads=2, head_dim=16, group_tokens=4, groups=20
    )
    assert Plan.from_json(quest.to_json()) == quest
    assert quest.selection is not None
    assert quest.selection.strategy_name == "quest"
