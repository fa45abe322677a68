"""tools/policies.py, and the two tools that know policies by name: the literature's plans, and equal memory."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest
from engines import compile_once, geometry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_checkpoint
from tool_runs import Outcome, run_tool, small_benchmark

from swapkv_jax import Plan, PlanError, UsageError, load_model
from swapkv_jax.accounting import kv_bytes
from swapkv_jax.planner import SELECTION
from swapkv_jax.selection import Selection
from swapkv_jax.strategies.sizes import pinned_groups

TOOLS = Path(__file__).parents[1] / "tools"
EMMA = Path(__file__).parent / "texts" / "emma.txt"
SMOLLM2 = geometry(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, max_positions=8192)
BASELINES = ["quest", "loki", "infinigen", "shadowkv"]


@pytest.fixture(scope="module")
def policies() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        yield importlib.import_module("policies")


def slot_bytes(plan: Plan) -> int:
    """Of a slot of every layer and row: keys and values, whatever a record holds."""
    return plan.layers * plan.batch * 2 * plan.kv_heads * plan.head_dim * plan.group_tokens * plan.itemsize


def test_flags_take_the_defaults_that_they_name(policies: ModuleType) -> None:
    flags = importlib.import_module("selection_flags")
    for field, hint in get_type_hints(Selection).items():
        value = getattr(SELECTION, field)
        assert flags.parse_value(flags.written(value), hint) == value, field


def test_the_literature_starts_from_its_papers(policies: ModuleType) -> None:
    known = {
        name: policies.policy_plan(SMOLLM2, name, {}, batch=2, max_context=7680) for name in policies.POLICIES
    }
    found = {
        name: (plan.policy, plan.tier, plan.group_tokens, plan.selection.selected_groups, plan.selection.rank)
        for name, plan in known.items()
        if plan.selection is not None
    }
    assert found == {
        "group": ("group", "disk", 8, 96, 64),
        "quest": ("group", "disk", 16, 25, 192),
        "loki": ("group", "disk", 1, 400, 16),
        "infinigen": ("group", "disk", 1, 400, 19),
        "shadowkv": ("group", "disk", 8, 50 + 11 + 8, 30),
    }
    for name in BASELINES:
        assert known[name].selection.strategy_name == name
        assert known[name].selection.sink_groups == 0
    assert (known["flexgen"].policy, known["flexgen"].tier) == ("layer", "disk")


@pytest.mark.parametrize(
    ("name", "fraction"),
    [
        *itertools.product(["group", *BASELINES], [1 / 13]),
        *itertools.product(["group", "quest", "loki", "infinigen"], [1 / 34]),
    ],
)
def test_equal_memory(policies: ModuleType, name: str, fraction: float) -> None:
    """The paper's two settings: everyone's bytes are within one slot of the same."""
    plan = policies.policy_plan(SMOLLM2, name, {}, memory=fraction, batch=8, max_context=7680)
    held = kv_bytes(plan, SMOLLM2)
    budget = fraction * plan.full_kv_bytes
    slot = slot_bytes(plan)
    assert budget - slot < held["device"] + held["dram"] <= budget
    assert plan.selection.selected_groups <= plan.selection.reuse_slots
    assert pinned_groups(plan.selection) < plan.selection.selected_groups


@pytest.mark.parametrize(
    ("name", "request_", "fixed"),
    [
        ("shadowkv", {"batch": 8, "max_context": 7680}, {}),
        ("quest", {"batch": 2, "max_context": 4032}, {}),
        ("quest", {"batch": 8, "max_context": 7680}, {"group_tokens": 16}),
    ],
)
def test_what_a_policy_needs_at_least_is_said(
    policies: ModuleType, name: str, request_: dict[str, Any], fixed: dict[str, Any]
) -> None:
    """1/34 of so short a context is too little for bounds or landmarks of groups, and slots of as many tokens; what
    the error names is enough, with the sizes it names."""
    with pytest.raises(PlanError, match=f"policy {name} needs 0.0.*0.0294; raise --kv-memory") as raised:
        policies.policy_plan(SMOLLM2, name, fixed, memory=1 / 34, **request_)
    found = re.search(r"needs (0\.\d+) .*group_tokens (\d+), rank (\d+)\)", str(raised.value))
    assert found is not None
    least, tokens = float(found[1]), int(found[2])
    sizes = fixed | {"group_tokens": tokens}
    sizes |= {} if name == "quest" else {"rank": int(found[3]), "outlier_groups": 0, "recent_groups": 1}
    plan = policies.policy_plan(SMOLLM2, name, sizes, memory=least + 1e-4, **request_)
    held = kv_bytes(plan, SMOLLM2)
    assert held["device"] + held["dram"] <= (least + 1e-4) * plan.full_kv_bytes
    with pytest.raises(PlanError, match="choose smaller sizes"):
        policies.policy_plan(SMOLLM2, name, sizes, memory=least - 1e-3, **request_)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["group", *BASELINES]),
    fraction=st.floats(0.005, 1),
    batch=st.integers(1, 9),
    context=st.integers(64, 8192),
)
def test_memory_is_never_exceeded(
    policies: ModuleType, name: str, fraction: float, batch: int, context: int
) -> None:
    """As many slots as fit, and no more than there can be groups; or it is said that nothing fits."""
    request: dict[str, Any] = {"batch": batch, "max_context": context}
    try:
        plan: Plan = policies.policy_plan(SMOLLM2, name, {}, memory=fraction, **request)
    except PlanError as error:
        assert "raise --kv-memory" in str(error)  # noqa: PT017
        return
    plan.validate(SMOLLM2)
    budget = fraction * plan.full_kv_bytes
    held = kv_bytes(plan, SMOLLM2)
    assert held["device"] + held["dram"] <= budget
    assert plan.selection is not None
    if plan.selection.reuse_slots < plan.groups:
        slot = slot_bytes(plan)
        assert held["device"] + held["dram"] > budget - slot


def test_what_was_chosen_stays(policies: ModuleType) -> None:
    given = policies.parse_settings(["loki.rank=10", "loki.selected_groups=900", "quest.group-tokens=32"])
    assert given == {"loki": {"rank": 10, "selected_groups": 900}, "quest": {"group_tokens": 32}}
    loki = policies.policy_plan(SMOLLM2, "loki", given["loki"], memory=1 / 13, batch=8, max_context=7680)
    assert loki.selection.rank == 10
    assert loki.selection.selected_groups == loki.selection.reuse_slots < 600  # all that there is room for
    quest = policies.policy_plan(SMOLLM2, "quest", given["quest"], memory=1 / 13, batch=8, max_context=7680)
    assert quest.group_tokens == 32
    assert (quest.selection.selected_groups, quest.selection.reuse_slots) == (13, 26)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("loki.ranks=8", "not POLICY.FIELD=VALUE; policies: group, quest"),
        ("flexgen.rank=8", "not POLICY.FIELD=VALUE"),
        ("loki.strategy=quest", "not POLICY.FIELD=VALUE"),
        ("loki.rank", "not POLICY.FIELD=VALUE"),
        ("loki.rank=x", "'x' does not fit"),
    ],
)
def test_settings_that_are_none(policies: ModuleType, setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        policies.parse_settings([setting])


# ---- the tools -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("policies"))


@pytest.fixture
def run(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """Runs a tool by name on the tiny checkpoint, with adapters of little text."""
    tools = {"benchmark": small_benchmark(monkeypatch), "evaluate": importlib.import_module("evaluate")}
    monkeypatch.setattr(importlib.import_module("contenders"), "RANDOM_READS", 128)
    monkeypatch.setattr(importlib.import_module("scan"), "_MORE_THAN_CACHES", 1 << 20)
    monkeypatch.setattr("swapkv_jax.strategies.calibrate.compile_program", compile_once)
    monkeypatch.setattr("swapkv_jax.calibration.compile_program", compile_once)
    monkeypatch.setattr("swapkv_jax.calibration.default_text", lambda: EMMA.read_text()[:4000])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(tool: str, *flags: str) -> Outcome:
        out = tmp_path / "out.json"
        base = ["--model", str(checkpoint), "--store-dir", str(tmp_path / "store"), "--json", str(out)]
        return run_tool(tools[tool].main, [*base, *flags], out, capfd)

    return run


SMALL = [
    "shadowkv.group_tokens=4", "shadowkv.record_alignment=512", "shadowkv.load_buckets=4", "shadowkv.rank=4",
    "shadowkv.outlier_groups=1", "shadowkv.recent_groups=1",
    "loki.rank=4", "loki.selected_groups=20", "loki.load_buckets=16",
]  # fmt: skip


@pytest.mark.slow
def test_policies_side_by_side(run: Callable[..., Outcome], tmp_path: Path) -> None:
    """One run of the benchmark: each under its own name, with its memory; the adapters were made on the way."""
    flags = ["--policies", "flexgen,shadowkv,loki"]
    flags += [flag for setting in SMALL for flag in ("--set", setting)]
    code, out, err, report = run(
        "benchmark", *flags, "--context", "180", "--steps", "2", "--burst", "1", "--kv-memory", "3/5"
    )
    assert code == 0, err
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["flexgen", "shadowkv", "loki"]
    assert [row["policy"] for row in rows.values()] == ["layer", "group", "group"]
    assert rows["loki"]["ratio_to"].keys() == {"flexgen disk", "shadowkv disk"}
    assert rows["shadowkv"]["selection"]["strategy"] == "shadowkv"
    assert (rows["loki"]["selection"]["rank"], rows["loki"]["selection"]["selected_groups"]) == (4, 20)
    for name in ("shadowkv", "loki"):
        assert rows[name]["memory_fraction"] <= 0.6
        assert rows[name]["compiles_during_decode"] == 0
    assert report["kv_memory"] == 0.6
    assert "loki disk" in out
    kept = {path.parent.name for path in (tmp_path / "cache").glob("**/adapter.json")}
    assert kept == {"loki"}


@pytest.mark.slow
def test_what_each_policy_loses(run: Callable[..., Outcome]) -> None:
    """An exact one nothing; a selecting one something, at the same memory."""
    model_flags = ["--texts", str(EMMA), "--rows", "2", "--batch", "2", "--context", "180", "--tokens", "3"]
    code, _, err, report = run(
        "evaluate", "--task", "text", *model_flags, "--policies", "flexgen,infinigen", "--kv-memory", "0.6",
        "--set", "infinigen.load_buckets=16", "--set", "infinigen.selected_groups=10",
    )  # fmt: skip
    assert code == 0, err
    flexgen, infinigen = report["plans"]
    assert [flexgen["name"], infinigen["name"]] == ["flexgen", "infinigen"]
    assert flexgen["kl"] < 1e-6
    assert infinigen["kl"] > flexgen["kl"]
    assert infinigen["memory_fraction"] <= 0.6
    code, _, err, _ = run("evaluate", "--task", "text", *model_flags, "--policies", "resident")
    assert code == 2
    assert "unknown policy 'resident'" in err
    code, _, err, _ = run("evaluate", "--task", "text", *model_flags, "--kv-memory", "2")
    assert code == 2
    assert "'2' is not a fraction" in err


def test_adapters_are_taken_by_their_own_strategy_alone(policies: ModuleType, checkpoint: Path) -> None:
    adapters, randoms = importlib.import_module("adapters"), importlib.import_module("random_adapters")
    model = load_model(str(checkpoint))
    made = randoms.random_adapters(model)
    for name, strategy in (("group", "kvswap"), ("loki", "loki"), ("infinigen", "infinigen")):
        plan = policies.policy_plan(model.geometry, name, {"rank": 4})
        assert adapters.adapter_of(made, plan).strategy == strategy
    quest = policies.policy_plan(model.geometry, "quest", {})
    assert adapters.adapter_of(made, quest) is None
    assert adapters.adapter_of(made, policies.policy_plan(model.geometry, "flexgen", {})) is None
