"""tools/search_policies.py: its walk on made-up costs, the files it writes, and what other tools take of them."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from engines import compile_once, geometry
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_checkpoint

from swapkv_jax import PlanError, UsageError
from swapkv_jax.tuner.search import Walker, least_loss
from swapkv_jax.tuner.trend import Trend

TOOLS = Path(__file__).parents[1] / "tools"
SMALL = geometry(layers=4, hidden=576, heads=9, kv_heads=3, head_dim=64, max_positions=8192)
AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "quest": {"group_tokens": (16, 32, 64), "rank": (0,)},
    "loki": {"group_tokens": (1, 2, 4), "rank": (4, 8, 12)},
    "group": {"group_tokens": (2, 4, 8), "rank": (16, 32, 64)},
    "shadowkv": {"group_tokens": (8, 16), "rank": (4, 8, 16)},
}


@pytest.fixture(scope="module")
def tools() -> Iterator[SimpleNamespace]:
    """The tool and its parts, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        names = (
            "search_policies",
            "policy_space",
            "policy_trials",
            "policies",
            "settings_file",
            "selection_flags",
            "equal_memory",
        )
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


# ---- the walk ------------------------------------------------------------------------------------------


class Downs:
    """Costs of points of a line with two valleys, of which the right one is lower."""

    def loss(self, point: int) -> float:
        return (4, 3, 2, 3, 5, 4, 3, 1, 2)[point]

    def seconds(self, point: int) -> float:
        return 1.0


def test_a_walk_ends_where_every_neighbour_is_higher_or_at_its_limit() -> None:
    def near(point: int) -> Iterator[int]:
        return (other for other in (point - 1, point + 1) if 0 <= other < 9)

    walker = Walker(Downs(), near)
    assert walker.descend(0, least_loss(lambda point, like: 0.0)) == 2
    assert walker.descend(5, least_loss(lambda point, like: 0.0)) == 7
    assert walker.measured[7].loss == 1
    assert not walker.stopped
    short = Walker(Downs(), near)
    assert short.descend(5, least_loss(lambda point, like: 0.0), limit=2) == 5
    assert short.stopped
    assert len(short.measured) == 2
    blind = Walker(Downs(), near)
    assert blind.descend(5, least_loss(lambda point, like: 9.0)) == 5  # nothing seems lower
    assert list(blind.measured) == [5]


@settings(deadline=None, max_examples=30)
@given(
    slopes=st.lists(st.floats(-1, 1), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
    level=st.floats(0.01, 100),
)
def test_a_trend_is_learned_and_what_is_unknown_may_be_good(
    slopes: list[float], seed: int, level: float
) -> None:
    trend = Trend([0.0, 0.0, 0.0], spread=0.5, noise=0.01)
    here, there = [0.0, 0.0, 0.0], [1.0, -2.0, 1.0]
    assert trend.guess(there, here, 2.0) == pytest.approx(2 * np.exp(-0.5 * 6**0.5))
    assert trend.guess(here, here, 2.0) == 2.0
    for point in np.random.default_rng(seed).uniform(-3, 3, (40, 3)):
        trend.learn(point.tolist(), level * float(np.exp(point @ slopes)))
    assert trend.guess(there, here, 2.0) == pytest.approx(2 * np.exp(np.dot(slopes, there)), rel=0.1)


class MadeUp:
    """Costs of the form that a policy's have: loss falls with the tokens kept and the rank, and rises with groups and
    the time between selections; time is of what is read, and of scoring."""

    def __init__(self, tools: SimpleNamespace, space: Any, coarse: float):
        self._tools, self._space, self._coarse = tools, space, coarse
        trial = tools.settings_file.Trial
        self._guesses = tools.policy_trials.Trials(SimpleNamespace(trial=self._made_up), space)
        self._trial, self.tried = trial, 0

    def _made_up(self, plan: Any) -> Any:
        s = plan.selection
        self.tried += 1
        attended, refresh = s.reuse_slots * plan.group_tokens, max(s.refresh, default=1)
        loss = 30 * plan.group_tokens**self._coarse / attended * (64 / s.rank) ** 0.3 * refresh**0.5
        loss *= 0.8 if s.aggregate == "softmax" else 1.0
        loss *= (s.reuse_slots / s.selected_groups) ** 0.2
        seconds = 1e-3 + 1e-6 * s.selected_groups * plan.group_tokens**0.7 / refresh
        seconds += 1e-4 if s.aggregate == "softmax" else 0.0
        return self._trial(
            kl=loss, top1=0.9, seconds=seconds, read_bytes=0.0, reuse=0.9, memory=0.07,
            selected_groups=s.selected_groups, reuse_slots=s.reuse_slots, plan=plan.hash,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        return getattr(self._guesses, name)


def small_space(tools: SimpleNamespace, policy: str, memory: float = 1 / 13) -> Any:
    axes = {
        **{"share": (0.5, 1.0), "recent_tokens": (0, 32), "sink": (False,), "outliers": (0.0,)},
        **{"aggregate": ("sum", "softmax"), "lookahead": ("layer",), "refresh": (1, 2), "filled": (0.5, 1.0)},
        **AXES[policy],
    }
    request = {"batch": 2, "max_context": 4032}
    return tools.policy_space.Space(policy=policy, geometry=SMALL, memory=memory, request=request, axes=axes)


@pytest.mark.parametrize(
    ("policy", "coarse"),
    [
        *itertools.product(["quest", "loki"], [0.3]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(AXES, [0.1, 0.6])),
    ],
)
def test_the_best_of_an_exhaustive_search_is_found(
    tools: SimpleNamespace, policy: str, coarse: float
) -> None:
    every = MadeUp(tools, space := small_space(tools, policy), coarse)
    losses = {setting: every.loss(setting) for setting in space}
    bound = 1.3 * min(losses.values())
    quickest = min(every.seconds(setting) for setting, loss in losses.items() if loss <= bound)
    costs = MadeUp(tools, small_space(tools, policy), coarse)
    found = tools.search_policies.search_policy(costs._space, costs, loss=bound, limit=1000)
    assert found.best["least-loss"].trial.kl <= 1.02 * min(losses.values())
    assert found.best["fastest"].trial.kl <= bound
    assert found.best["fastest"].trial.seconds <= 1.1 * quickest  # of which 8 % are given for less loss
    assert costs.tried < 0.8 * len(losses)
    assert not found.notes
    plans = [point.trial.plan for point in found.points]
    assert len(plans) == len(set(plans))
    for point in (*found.best.values(), *found.points[:3]):  # what is written makes the plan that was tried
        plan = tools.policies.policy_plan(
            SMALL, policy, point.choices, memory=1 / 13, batch=2, max_context=4032
        )
        assert plan.hash == point.trial.plan


def test_what_keeps_a_search_from_its_goal_is_said(tools: SimpleNamespace) -> None:
    space = small_space(tools, "quest")
    costs = MadeUp(tools, space, 0.3)
    found = tools.search_policies.search_policy(space, costs, loss=1e-6, limit=4)
    assert set(found.best) == {"least-loss"}
    bound, limit = found.notes
    assert "no setting loses as little as 1e-06 nats" in bound
    assert "limit of 4 settings" in limit
    assert costs.tried == 4
    alone = tools.search_policies.search_policy(space, MadeUp(tools, space, 0.3), loss=None, limit=4)
    assert set(alone.best) == {"least-loss"}
    assert alone.notes == (limit,)
    tight = small_space(tools, "shadowkv", 1 / 60)
    found = tools.search_policies.search_policy(tight, MadeUp(tools, tight, 0.3), loss=1.0, limit=4)
    assert not found.best
    assert "policy shadowkv needs 0.0" in found.notes[0]


@pytest.mark.parametrize("policy", AXES)
def test_settings_keep_to_the_memory(tools: SimpleNamespace, policy: str) -> None:
    """The tools' own axes: starts and what is near them have plans of no more than the memory, each another."""
    space = tools.policy_space.Space.of(policy, SMALL, 1 / 13, batch=2, max_context=4032)
    for start in space.starts():
        near = list(space.neighbours(start))
        assert len({space.plan(setting).hash for setting in [start, *near]}) == 1 + len(near)
        for setting in [start, *near]:
            plan = space.plan(setting)
            most = setting.filled / 13
            assert 0.9 * most < tools.equal_memory.memory_fraction(plan, SMALL) <= most
            assert len(space.features(setting)) == tools.policy_space.FEATURES
    with pytest.raises(PlanError, match=f"policy {policy} needs 0.0"):
        tools.policy_space.Space.of(policy, SMALL, 1 / 500, batch=2, max_context=4032).starts()


def test_what_is_fixed_is_in_every_plan(tools: SimpleNamespace) -> None:
    """As the paper has its baselines: everything selected is read, in loads of as much; no axis undoes it."""
    fixed = {"replacement": "all", "kv_dtype": "int8", "lookahead": "layer", "refresh": ()}
    of = tools.policy_space.Space.of
    space = of("quest", SMALL, 1 / 13, fixed=fixed, batch=2, max_context=4032)
    for start in space.starts():
        for setting in [start, *space.neighbours(start)]:
            plan = space.plan(setting)
            choice = plan.selection
            assert (choice.replacement, plan.kv_dtype, choice.lookahead) == ("all", "int8", "layer")
            assert choice.refresh == ()
            assert choice.load_buckets == (2 * choice.selected_groups,)
            again = tools.policies.policy_plan(
                SMALL, "quest", space.chosen(setting), memory=1 / 13, batch=2, max_context=4032
            )
            assert again == plan
    rare = of("group", SMALL, 1 / 13, fixed={"refresh": (4, 8, 8, 4)}, batch=2, max_context=4032)
    assert {rare.plan(start).selection.refresh for start in rare.starts()} == {(4, 8, 8, 4)}
    with pytest.raises(UsageError, match=r"--set quest.reuse_slots is what the search is for"):
        of("quest", SMALL, 1 / 13, fixed={"reuse_slots": 9}, batch=2, max_context=4032)


# ---- files ---------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tools: SimpleNamespace, tmp_path: Path) -> Path:
    """A file with both goals for loki, the least loss alone for quest, and nothing for infinigen."""
    s = tools.settings_file
    trial = s.Trial(
        kl=0.1, top1=0.9, seconds=0.1, read_bytes=1.0, reuse=0.5, memory=0.07, selected_groups=4, reuse_slots=8,
        plan="p",
    )  # fmt: skip
    first = s.Point(choices={"rank": 8, "refresh": [2, 2, 2, 2]}, trial=trial)
    second = s.Point(choices={"rank": 4, "aggregate": "softmax"}, trial=trial)
    quest = s.Point(choices={"group_tokens": 32}, trial=trial)
    file = s.SettingsFile(
        model="m", dtype="float32", kv_memory=1 / 13, memory="1/13", context=4000, batch=2, rows=2, tokens=16,
        texts=("a",), storage_profile=None, loss=0.1, machine="here",
        policies={
            "loki": s.Outcome(best={"least-loss": first, "fastest": second}, points=(first, second)),
            "quest": s.Outcome(best={"least-loss": quest}, points=(quest,), notes=("why",)),
            "infinigen": s.Outcome(best={}, points=(), notes=("why",)),
        },
    )  # fmt: skip
    path = tmp_path / "kept.json"
    path.write_bytes(file.to_json())
    return path


def flags(tools: SimpleNamespace, *given: str) -> argparse.Namespace:
    """What the tools' common flags say."""
    parser = argparse.ArgumentParser()
    tools.selection_flags.add_selection_flags(parser)
    tools.policies.add_policy_flags(parser)
    return parser.parse_args(given)


def test_tools_take_what_was_found(tools: SimpleNamespace, kept: Path) -> None:
    """A goal that was not met falls back on the least loss; flags go before the file, --set before flags."""
    chosen = tools.policies.given_by_policy
    args = flags(tools, "--settings", str(kept), "--kv-memory", "1/13")
    found = chosen(args, args.kv_memory)
    assert found["loki"] == {"rank": 8, "refresh": (2, 2, 2, 2)}
    assert found["quest"] == {"group_tokens": 32}
    assert found["infinigen"] == found["group"] == {}
    args = flags(tools, "--kv-dtype", "int8", "--set", "shadowkv.kv_dtype=float16")
    assert {name: found["kv_dtype"] for name, found in chosen(args, None).items()} == {
        **dict.fromkeys(tools.policies.SELECTIVE, "int8"),
        "shadowkv": "float16",
    }
    more = ["--goal", "fastest", "--rank", "16", "--set", "loki.rank=2", "--set", "group.rank=24"]
    args = flags(tools, "--settings", str(kept), *more)
    found = chosen(args, 1 / 13)
    assert found["loki"] == {"rank": 2, "aggregate": "softmax"}
    assert found["quest"] == {"group_tokens": 32}
    assert found["group"] == {"rank": 24}
    with pytest.raises(UsageError, match=r"no --settings for --kv-memory 0.1: .*kept.json is for 1/13"):
        chosen(args, 0.1)
    with pytest.raises(UsageError, match="is for 1/13; give one of those"):
        chosen(args, None)
    kept.write_text(kept.read_text().replace('"loss": 0.1,', '"loss": null,'))
    with pytest.raises(UsageError, match="nothing was searched for --goal fastest"):
        chosen(args, 1 / 13)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: None, "No such file"),
        (lambda text: "{", "is not of search_policies.py"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "is not of search_policies.py"),
        (lambda text: text.replace('"rank": 8', '"ranks": 8'), "'ranks'"),
        (lambda text: text.replace('"rank": 8', '"rank": "many"'), "is not of search_policies.py"),
        (lambda text: text.replace('"loss"', '"lost"'), "lost"),
    ],
)
def test_files_that_are_none(tools: SimpleNamespace, kept: Path, change: Any, message: str) -> None:
    text = change(kept.read_text())
    kept.unlink() if text is None else kept.write_text(text)
    with pytest.raises(UsageError, match=message):
        tools.settings_file.load_settings(kept)


def test_the_settings_that_are_shipped(tools: SimpleNamespace) -> None:
    """Each makes the plan that was tried, for what it was tried on."""
    for path in sorted((TOOLS / "settings").glob("*.json")):
        file = tools.settings_file.load_settings(path)
        assert file.model.startswith("smollm2")
        for policy, outcome in file.policies.items():
            assert outcome.best or outcome.notes
            assert all(point.trial.memory <= file.kv_memory for point in outcome.points), (path, policy)


# ---- the tool ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--kv-memory", "much"], "neither a fraction nor a size; use one like 1/13"),
        (["--kv-memory", "9GiB"], "is not a part of the whole KV's"),
        (["--kv-memory", "1/2", "--tokens", "3"], "too few to time a step"),
        (["--kv-memory", "1/2", "--rows", "3"], "multiple of --batch"),
        (
            ["--kv-memory", "1/2", "--policies", "quest", "--set", "loki.rank=8"],
            "--set is for loki, which is not searched",
        ),
        (["--kv-memory", "1/2", "--set", "quest.rank"], "is not POLICY.FIELD=VALUE"),
        (["--kv-memory", "1/2", "--loss", "0"], "not a positive number of nats"),
        (["--kv-memory", "1/2", "--policies", "flexgen"], "unknown policy 'flexgen'; known: group, quest"),
        (["--kv-memory", "1/2", "--json", "missing/out.json"], "give --json a file in a directory"),
    ],
)
def test_flags_that_cannot_work(
    tools: SimpleNamespace,
    checkpoint: Path,
    tmp_path: Path,
    given: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run(tools.search_policies, checkpoint, tmp_path, *given)
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("search"))


def run(tool: ModuleType, checkpoint: Path, place: Path, *given: str) -> int:
    text = place / "text.txt"
    text.write_text("the rain in the west is on the eaves and in the halls " * 60)
    base = ["--model", str(checkpoint), "--texts", str(text), "--context", "180", "--tokens", "6", "--quiet"]
    base += ["--tables", str(place / "tables"), "--store-dir", str(place / "store")]
    try:
        return tool.main([*base, "--json", str(place / "out.json"), *given])
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.slow
def test_a_search_goes_on_where_it_was(
    tools: SimpleNamespace,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was tried is not tried again; anew it loses the same, whatever its time."""
    monkeypatch.setattr("swapkv_jax.capture.compile_program", compile_once)
    bench = tools.policy_trials.Bench
    tried, run_one = [], bench._tried

    def counted(self: Any, plan: Any, adapter: Any) -> Any:
        if len(tried) == 2:
            raise KeyboardInterrupt
        tried.append(plan.hash)
        return run_one(self, plan, adapter)

    given = ["--kv-memory", "3/5", "--policies", "quest,shadowkv", "--limit", "2", "--loss", "5"]
    monkeypatch.setattr(bench, "_tried", counted)
    assert run(tools.search_policies, checkpoint, tmp_path, *given) == 1
    assert "the same command goes on where it was" in capsys.readouterr().err
    first, tried[:] = list(tried), []
    monkeypatch.setattr(bench, "_tried", lambda *args: (tried.append(args[1].hash), run_one(*args))[1])
    assert run(tools.search_policies, checkpoint, tmp_path, *given) == 0
    assert not set(first) & set(tried)
    shown, found = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert "| quest | " in shown
    assert "least-loss" in shown
    tried.clear()
    assert run(tools.search_policies, checkpoint, tmp_path, *given) == 0
    assert not tried
    assert json.loads((tmp_path / "out.json").read_text()) == found
    assert run(tools.search_policies, checkpoint, tmp_path, *given, "--limit", "1", "--fresh") == 0
    anew = json.loads((tmp_path / "out.json").read_text())
    assert tried
    for policy in ("quest", "shadowkv"):
        point, before = (one["policies"][policy]["points"][0] for one in (anew, found))
        assert point["choices"] == before["choices"]
        assert {**point["trial"], "seconds": 0} == {**before["trial"], "seconds": 0}
        assert before["trial"]["memory"] <= 0.6
    assert run(tools.search_policies, checkpoint, tmp_path, *given, "--goals", "least-loss") == 0
    untimed = json.loads((tmp_path / "out.json").read_text())
    assert untimed["loss"] is None
    assert all(one["trial"]["seconds"] is None for one in untimed["policies"]["quest"]["points"])
    file = msgspec.json.decode(json.dumps(found), type=tools.settings_file.SettingsFile)
    assert file.kv_memory == 0.6
    assert file.policies["quest"].best
