"""Each strategy against a direct NumPy statement of its rule: summaries, scores and what is selected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax import Plan, PlanError
from swapkv_jax.predictor import select
from swapkv_jax.selection import Selection
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


def check_scores(scores: Any, expected: np.ndarray, lengths: np.ndarray, plan: Plan) -> None:
    """Equal scores, and the groups selected are those that score most."""
    np.testing.assert_allclose(scores, expected, rtol=2e-5, atol=2e-5)
    choice = plan.selection
    assert choice is not None
    complete = lengths // plan.group_tokens
    chosen = np.asarray(
        select(scores, complete, choice.selected_groups, choice.sink_groups, choice.recent_groups)
    )
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
    strategy: Any = strategy_of(plan)
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


# ---- what cannot work ----------------------------------------------------------------------------------


def selection(**fields: Any) -> Selection:
    return Selection(**{"selected_groups": 10, "reuse_slots": 10, "rank": 8, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "quest"}, "rank must be Hkv·D = 32, not 8"),
        ({"strategy": "quest", "rank": 32, "summary": "token"}, "summary must be group"),
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
