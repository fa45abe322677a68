"""Each strategy against a direct NumPy statement of its rule: summaries, scores and what is selected."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from engines import geometry
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax import Engine, Plan, PlanError, UsageError, make_plan
from swapkv_jax.cache.resident import ResidentCache
from swapkv_jax.calibration import default_text, encode
from swapkv_jax.models import Model
from swapkv_jax.models.blocks import query_weights, split_block
from swapkv_jax.models.geometry import RopeScaling
from swapkv_jax.predictor import select
from swapkv_jax.selection import Selection
from swapkv_jax.staging import host_view
from swapkv_jax.strategies.adapters import directions, plan_adapter
from swapkv_jax.strategies.calibrate import queries_and_keys
from swapkv_jax.strategies.infinigen import infinigen_directions
from swapkv_jax.strategies.loki import loki_directions
from swapkv_jax.strategies.named import shadowkv_of, strategy_of
from swapkv_jax.strategies.sizes import Part, check_strategy, summary_parts

NO_BLOCK: Any = None  # of no use to strategies of places
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
    strategy = strategy_of(plan, NO_BLOCK)
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
    assert summary_parts(plan) == Part(summary.shape, choice.summary_dtype)
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
    assert summary_parts(plan) == Part(summary.shape, choice.summary_dtype)
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


# ---- shadowkv ------------------------------------------------------------------------------------------


def turned(keys: np.ndarray, positions: np.ndarray, by: int) -> np.ndarray:
    """RoPE put into (`by` 1) or taken out of (-1) keys [n, Hkv, D]."""
    half = keys.shape[2] // 2
    angles = by * positions[:, None] / 1e4 ** (np.arange(half) / half)
    pairs = (keys[..., :half] + 1j * keys[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def cosine_of_the_worst(k: np.ndarray) -> np.ndarray:
    """[N] of keys [Hkv, D, N, G]: of each group's tokens with their mean, the heads' mean of the least."""
    mean = k.mean(axis=3, keepdims=True)
    cosine = (k * mean).sum(axis=1) / np.linalg.norm(k, axis=1) / np.linalg.norm(mean, axis=1)
    return cosine.min(axis=2).mean(axis=0)


@pytest.mark.parametrize("aggregate", ["softmax", pytest.param("sum", marks=pytest.mark.slow)])
@settings(deadline=None, max_examples=3)
@given(case=cases(), group_tokens=st.integers(1, 4), groups=st.integers(2, 9), data=st.data())
def test_shadowkv_makes_keys_of_a_prompts_factors(
    aggregate: Any, case: dict[str, Any], group_tokens: int, groups: int, data: st.DataObject
) -> None:
    sizes = {name: case[name] for name in ("batch", "kv_heads", "head_dim")}
    size, rows = case["kv_heads"] * case["head_dim"], range(case["batch"])
    rank, outliers = data.draw(st.integers(1, size)), data.draw(st.integers(0, 2))
    choice = Selection(
        strategy="shadowkv",
        selected_groups=outliers + 5,
        reuse_slots=outliers + 5,
        rank=rank,
        sink_groups=0,
        recent_groups=1,
        aggregate=aggregate,
        summary_dtype="float32",
        outlier_groups=outliers,
    )
    g = geometry(
        layers=1,
        heads=case["kv_heads"] * case["repeat"],
        kv_heads=case["kv_heads"],
        head_dim=case["head_dim"],
    )
    plan = plan_of(choice, group_tokens=group_tokens, groups=groups, **sizes)
    plan.validate(g)
    assert plan.payload_bytes == size * group_tokens * 4  # values alone
    strategy = shadowkv_of(plan, split_block(g, "float32"))
    k, q, lengths = draw_keys(case, plan.capacity)
    lengths = np.minimum(lengths, plan.capacity - 1)
    parts = summary_parts(plan)
    assert isinstance(parts, dict)
    summary: Any = {name: np.full(part.shape, -1, part.dtype) for name, part in parts.items()}
    fill, keys_of = jax.jit(strategy.fill), jax.jit(strategy.keys)
    for row in rows:
        beyond = np.where(np.arange(plan.capacity) < lengths[row], k[row], np.nan)  # takes no part
        summary = fill(summary, (), beyond[None], np.int32(row), lengths[row])
    assert {name: Part(a.shape, str(a.dtype)) for name, a in summary.items()} == parts

    by_group = k.reshape(*k.shape[:3], groups, group_tokens)
    expected = np.full((case["batch"], groups), -np.inf)
    for row in rows:
        complete = int(lengths[row]) // group_tokens
        landmarks = by_group[row, :, :, :complete].mean(axis=-1)  # [Hkv, D, N]
        np.testing.assert_allclose(
            summary["landmarks"][row, :complete], landmarks.reshape(size, -1).T, atol=1e-5
        )
        logits = np.einsum("krd,kdn->krn", q[row], landmarks).reshape(g.heads, complete)
        expected[row, :complete] = put_together(logits, complete, aggregate, case["head_dim"] ** -0.5)
        found = {i for i in np.asarray(summary["exact_ids"][row]).tolist() if i >= 0}
        cosines = cosine_of_the_worst(by_group[row])[: max(0, complete - 1)]
        worst = np.argsort(cosines)[:outliers]
        exact = {*worst.tolist(), *([complete - 1] if complete else [])}
        # Of groups that are equally bad (all are, of one token) rounding chooses.
        if np.unique(np.round(cosines, 5)).size == cosines.size:
            assert found == exact
        else:
            assert len(found) == len(exact)
            assert found >= exact - {*worst.tolist()}
        exact = found
        expected[row, np.array([*exact], int)] = 1e30

        positions = np.arange(lengths[row])
        before = turned(k[row, :, :, : lengths[row]].transpose(2, 0, 1), positions, -1).reshape(-1, size)
        left, values, right = np.linalg.svd(before, full_matrices=False)
        low = (left[:, :rank] * values[:rank]) @ right[:rank]
        made = turned(low.reshape(-1, case["kv_heads"], case["head_dim"]), positions, 1).transpose(1, 2, 0)
        keys = keys_of(summary, np.full(groups, row, np.int32), np.arange(groups, dtype=np.int32))
        for group in range(complete):
            source = k[row] if group in exact else made
            tokens = source[:, :, group * group_tokens : (group + 1) * group_tokens]
            np.testing.assert_allclose(keys[group], tokens, atol=2e-3)
    check_scores(jax.jit(strategy.score)(q, (), summary, lengths), expected, lengths, plan)

    newest = case["rng"].standard_normal((*k.shape[:3],)).astype(np.float32)
    rolling = np.zeros((case["batch"], case["kv_heads"], group_tokens, case["head_dim"]), np.float32)
    for row, length in enumerate(lengths.tolist()):
        first = length // group_tokens * group_tokens
        rolling[row, :, : length - first] = k[row, :, :, first:length].swapaxes(1, 2)
        rolling[row, :, length - first] = newest[row]
    after: Any = jax.jit(strategy.advance)(summary, (), newest, rolling, lengths)
    for row, length in enumerate(lengths.tolist()):
        group = length // group_tokens
        before = turned(newest[row][None], np.array([length]), -1).reshape(-1)
        np.testing.assert_allclose(
            after["coordinates"][row, length], before @ np.asarray(after["basis"][row]), atol=1e-4
        )
        np.testing.assert_allclose(
            after["landmarks"][row, group].reshape(newest.shape[1:]), rolling[row].mean(axis=1), atol=1e-5
        )
        kept = keys_of(after, np.full(groups, row, np.int32), np.full(groups, group, np.int32))[0]
        np.testing.assert_array_equal(kept, rolling[row].swapaxes(1, 2))
        np.testing.assert_array_equal(
            after["coordinates"][row, :length], summary["coordinates"][row, :length]
        )


# ---- what cannot work ----------------------------------------------------------------------------------


def selection(**fields: Any) -> Selection:
    return Selection(**{"selected_groups": 10, "reuse_slots": 10, "rank": 8, **fields})


def test_shadowkv_refuses_rotations_that_cannot_be_taken_back() -> None:
    dynamic = geometry(rope_scaling=RopeScaling(kind="dynamic", factor=2.0, original_max_positions=128))
    with pytest.raises(PlanError, match="which dynamic scaling rotates"):
        check_strategy(selection(strategy="shadowkv", outlier_groups=0, recent_groups=1), dynamic)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "quest"}, "rank must be Hkv·D = 32, not 8"),
        ({"strategy": "quest", "rank": 32, "summary": "token"}, "summary must be group"),
        ({"strategy": "loki"}, "summary must be token, not group"),
        ({"strategy": "infinigen", "summary": "token", "rank": 17}, "per KV head, of D = 16"),
        ({"strategy": "shadowkv"}, "needs outlier_groups"),
        ({"strategy": "shadowkv", "outlier_groups": 1, "summary": "token"}, "summary must be group"),
        (
            {"strategy": "shadowkv", "outlier_groups": 1, "recent_groups": 5},
            "use selected_groups of at least 12",
        ),
        ({"outlier_groups": 1}, "belongs to strategy shadowkv, not kvswap"),
    ],
)
def test_choices_that_a_strategy_does_not_have(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_strategy(selection(**fields), geometry())


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
