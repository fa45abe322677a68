"""The tuner: its search on made-up costs, its tables, its model of a step; and the replay against an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from engines import GROUP, geometry, prompts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax import Engine, Plan, PlanError, UsageError, make_plan
from swapkv_jax.adapter import Adapter
from swapkv_jax.calibration import calibrate, default_text
from swapkv_jax.capture import capture
from swapkv_jax.disk_curve import profile_curve
from swapkv_jax.graph import GraphSpec
from swapkv_jax.models import Geometry, Model
from swapkv_jax.planner.costs import DescribedDisk, DiskModel
from swapkv_jax.quality import divergence
from swapkv_jax.selection import Selection
from swapkv_jax.tiers.throttled import PROFILES
from swapkv_jax.tuner.choice import Choice, Space, held_bytes, plan_of
from swapkv_jax.tuner.host_work import Steps, fit_host_work
from swapkv_jax.tuner.replay import COLD, Replay
from swapkv_jax.tuner.search import search
from swapkv_jax.tuner.step_time import HostWork, step_time
from swapkv_jax.tuner.tables import Tables
from swapkv_jax.tuner.timing import GraphModel, Shape, time_graph

# ---- costs that are made up, but of the right form --------------------------------------------------------

SMALL = Space(
    group_tokens=(2, 4, 8, 16),
    selected_tokens=(128, 256, 384, 512),
    kept=(1.0, 1.5, 2.0),
    rank=(16, 32, 64),
    lookahead=("layer", "step"),
    refresh=(1, 2),
)
MODEL = geometry(layers=4, heads=9, kv_heads=3, head_dim=64, max_positions=8192)
GRAPHS = GraphModel(
    weights={
        "head": (4e-4, 1e-4),
        "segment": (5e-4, 1.5e-4, 1e-7),
        "predict": (1e-4, 1e-5, 0.0, 2e-10),
        "load": (1e-5, 0.0, 1e-10),
    }
)


class MadeUp:
    """Costs of the form that SmolLM2's have on calibration text: loss falls with tokens, slots and rank, and rises
    with G; misses fall with slots and, per token, with G. `scale` is the loss's. Times are the model of a step's."""

    def __init__(self, disk: DiskModel, *, batch: int = 8, scale: float = 1.0, geometry: Geometry = MODEL):
        self.disk, self.batch, self.scale, self.geometry = disk, batch, scale, geometry
        self.held = cache(self._held)

    def plan(self, choice: Choice) -> Plan:
        return plan_of(
            choice,
            self.geometry,
            batch=self.batch,
            max_context=self.geometry.context_limit,
            dtype="float32",
            platform="cpu",
        )

    def _held(self, choice: Choice) -> int:
        return held_bytes(self.plan(choice), self.geometry)

    def loss(self, choice: Choice) -> float:
        penalty = (1.6 if choice.lookahead == "step" else 1.0) * choice.refresh
        coarse = (choice.group_tokens / 4) ** 0.5
        attended = choice.selected_tokens**1.1 * choice.kept**0.6
        return self.scale * 0.034 * 256**1.1 / attended * (64 / choice.rank) ** 0.7 * coarse * penalty

    def misses(self, choice: Choice) -> float:
        share = 0.25 / choice.kept**1.3 * (4 / choice.group_tokens) ** 0.17
        return share * choice.selected_tokens / choice.group_tokens / choice.refresh

    def seconds(self, choice: Choice) -> float:
        return self._time(choice, self.misses(choice))

    def guess(self, choice: Choice, like: Choice) -> float:
        def expected(c: Choice) -> float:
            return c.selected_tokens / c.group_tokens / c.kept / c.refresh

        return self._time(choice, self.misses(like) * expected(choice) / expected(like))

    def _time(self, choice: Choice, misses: float) -> float:
        steps = [[misses] * self.geometry.layers]
        return step_time(self.plan(choice), steps, 1, GRAPHS, self.disk, HostWork(layer=2e-4)).total


DISKS = {name: profile_curve(profile) for name, profile in PROFILES.items()}


@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("share", [0.22, 0.3, 1.0])
def test_within_a_tenth_of_an_exhaustive_search(disk: str, share: float) -> None:
    """`share` is the memory's between what the smallest and the largest choice take."""
    oracle = MadeUp(DISKS[disk])
    held = [oracle.held(choice) for choice in SMALL]
    memory = int(min(held) + share * (max(held) - min(held)))
    allowed = [c for c in SMALL if oracle.held(c) <= memory and oracle.loss(c) <= 0.05]
    best = min(map(oracle.seconds, allowed))
    found = search(SMALL, oracle, memory=memory, loss=0.05)
    assert found.choice in allowed
    assert found.measured[found.choice][1] <= 1.1 * best
    assert len(found.measured) < len(list(SMALL)) / 6


@pytest.mark.parametrize("scale", [0.6, 1.0])
def test_a_slower_disk_gets_larger_groups(scale: float) -> None:
    """Where larger groups save nothing but reads, as on an accelerator."""
    chosen = {
        name: search(SMALL, MadeUp(disk, scale=scale), memory=1 << 40, loss=0.03).choice
        for name, disk in DISKS.items()
    }
    assert chosen["emmc-250MBps"].group_tokens > chosen["nvme-1.8GBps"].group_tokens


@settings(max_examples=10, deadline=None)
@given(
    layers=st.integers(2, 8),
    kv_heads=st.integers(1, 8),
    repeat=st.integers(1, 4),
    head_dim=st.sampled_from([32, 64, 128]),
    batch=st.integers(1, 8),
    context=st.integers(300, 8192),
    share=st.floats(0, 2),
    scale=st.floats(0.1, 3),
)
def test_budgets_are_honoured(layers, kv_heads, repeat, head_dim, batch, context, share, scale) -> None:
    """Whatever the model: the plan's bytes are within memory and the loss within its bound, or an error says what
    would do."""
    sizes = replace(
        MODEL,
        layers=layers,
        heads=kv_heads * repeat,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=context,
    )
    oracle = MadeUp(DISKS["nvme-1.8GBps"], batch=batch, scale=scale, geometry=sizes)
    space = replace(SMALL, group_tokens=(4, 8), selected_tokens=(128, 256), refresh=(1,))
    space = space.limited(sizes, context)
    held = [oracle.held(choice) for choice in space]
    memory = int(min(held) + share * (max(held) - min(held))) - (share < 0.1)
    if memory < min(held):
        with pytest.raises(PlanError, match=f"the smallest takes {min(held)}"):
            search(space, oracle, memory=memory, loss=0.05)
        return
    try:
        found = search(space, oracle, memory=memory, loss=0.05)
    except PlanError as error:
        reason = str(error)
    else:
        assert held_bytes(oracle.plan(found.choice), sizes) <= memory
        assert oracle.loss(found.choice) <= 0.05
        assert all(oracle.held(choice) <= memory for choice in found.measured)
        return
    assert "the least found is" in reason
    fitting = [c for c in space if oracle.held(c) <= memory and c.lookahead == "layer"]
    assert min(map(oracle.loss, fitting)) > 0.05


def test_a_bound_that_nothing_keeps_is_an_error_that_says_what_is_least() -> None:
    with pytest.raises(PlanError, match=r"the least found is .* \(G \d+, M·G \d+, C/M .*\): allow that much"):
        search(SMALL, MadeUp(DISKS["nvme-1.8GBps"]), memory=1 << 40, loss=1e-6)


def test_spaces_keep_to_the_model() -> None:
    space = Space().limited(geometry(layers=1), 200)
    assert space.selected_tokens == (128, 192)
    assert max(space.rank) == 32
    assert space.lookahead == ("layer",)
    near = space.neighbours(Choice(group_tokens=4, selected_tokens=192, kept=1.25, rank=16))
    assert len(near) == len(set(near))
    alone = [c for c in near if (c.selected_tokens, c.kept, c.rank) == (192, 1.25, 16)]
    assert sorted({c.group_tokens for c in alone}) == [2, 4, 8]
    assert {c.refresh for c in near} == {1, 2}
    assert not any(c.selected_tokens > 192 for c in near)
    assert any(c.kept == 1.5 and c.selected_tokens == 128 for c in near)  # up in one size, down in another


# ---- the model of a step -----------------------------------------------------------------------------------


def plan_for(selection: Selection, **fields) -> Plan:
    sizes = {"batch": 2, "max_context": 4096, "group_tokens": 4}
    return make_plan(MODEL, cache="group", selection=selection, **{**sizes, **fields})


def test_a_step_s_time_is_put_together_from_its_parts() -> None:
    plan = plan_for(Selection(selected_groups=96, reuse_slots=128, rank=32, load_buckets=(8, 32)))
    disk = DescribedDisk(bandwidth=1e9, read_s=1e-4)
    misses = [[10] * 4, [0] * 4]  # of one row: 20 and 0 of the plan's two
    graphs = {name: lambda shape, name=name: GRAPHS.seconds(name, shape) for name in GRAPHS.weights}
    shape = Shape(batch=2, tokens=512, places=1024, rank=32)
    layer = graphs["segment"](shape) + graphs["predict"](shape)
    load = graphs["load"](Shape(batch=2, records=32, record_bytes=plan.stride_bytes))
    read = 20 * (1e-4 + plan.stride_bytes / 1e9)
    assert read > layer
    step = step_time(plan, misses, 1, GRAPHS, disk, HostWork(layer=1e-4, row=2e-5, miss=1e-5))
    assert step.compute == pytest.approx(4 * layer + 4 * load / 2 + graphs["head"](shape))
    assert step.read == pytest.approx(4 * read / 2)
    assert step.exposed == pytest.approx(4 * (read - layer) / 2)
    assert step.host == pytest.approx(4 * (1e-4 + 2 * 2e-5) + 4 * 20 * 1e-5 / 2)
    assert step.total == pytest.approx(step.compute + step.exposed + step.host)


def test_what_hides_reads() -> None:
    choice = Selection(selected_groups=96, reuse_slots=128, rank=32)
    disk, misses = DescribedDisk(bandwidth=1e9, read_s=5e-5), [[30, 0] * 2]

    def exposed(selection: Selection, **fields) -> float:
        return step_time(plan_for(selection, **fields), misses, 2, GRAPHS, disk, HostWork()).exposed

    by_layer = exposed(choice)
    assert by_layer > 0
    # A whole step hides what half of the layers read too much for the one before them; rows in DRAM read nothing.
    assert exposed(msgspec.structs.replace(choice, lookahead="step")) == 0
    assert exposed(choice, tier="dram") == 0


def test_host_work_is_found_again() -> None:
    disk, work = DescribedDisk(bandwidth=1e9), HostWork(layer=3e-4, row=5e-5, miss=2e-5)
    timed = []
    for batch, misses in ((1, 3.0), (1, 12.0), (2, 12.0), (8, 40.0)):
        plan = plan_for(Selection(selected_groups=96, reuse_slots=128, rank=32), batch=batch)
        seconds = step_time(plan, [[misses] * 4], batch, GRAPHS, disk, work).total
        timed.append((plan, Steps(seconds=seconds, misses=misses)))
    fitted = fit_host_work(timed, GRAPHS, disk)
    assert msgspec.structs.astuple(fitted) == pytest.approx(msgspec.structs.astuple(work))


def test_graph_times_are_fitted_and_never_negative() -> None:
    shapes = [Shape(batch=b, tokens=t) for b in (1, 4, 8) for t in (256, 1024)]
    true = GraphModel(weights={"segment": (1e-3, 1e-4, 2e-7)})
    fitted = GraphModel.fit({"segment": [(s, true.seconds("segment", s)) for s in shapes]})
    assert fitted.weights["segment"] == pytest.approx(true.weights["segment"])
    falling = [(s, 1e-3 / s.batch) for s in shapes]
    assert min(GraphModel.fit({"segment": falling}).weights["segment"]) >= 0


def test_a_graph_is_timed_with_its_donated_arguments_given_back() -> None:
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    number = jax.ShapeDtypeStruct((), jnp.int32)

    def step(weights, state, at):
        return jax.lax.dynamic_update_slice(state, weights[:1], (at, at * 0))

    assert 0 < time_graph(GraphSpec("step", step, [shape, shape, number], (1,))) < 1


# ---- tables ----------------------------------------------------------------------------------------------


def test_tables_give_back_what_was_kept(tmp_path: Path) -> None:
    key = ["model", (1, 2), Choice(group_tokens=4, selected_tokens=128, kept=1.0, rank=8)]
    tables = Tables(tmp_path / "tables")
    assert tables.find("host", key, HostWork) is None
    tables.keep("host", key, HostWork(layer=1.0))
    assert Tables(tmp_path / "tables").find("host", key, HostWork) == HostWork(layer=1.0)
    assert tables.find("host", ["other"], HostWork) is None
    assert Tables(tmp_path / "tables", fresh=True).find("host", key, HostWork) is None


@pytest.mark.parametrize("spoil", [lambda c: c.replace(b"1.0", b"9.0"), lambda c: c[:-9], lambda _: b""])
def test_damaged_tables_are_measured_again(tmp_path: Path, spoil) -> None:
    Tables(tmp_path).keep("host", "key", HostWork(layer=1.0))
    (path,) = tmp_path.glob("host/*.json")
    path.write_bytes(spoil(path.read_bytes()))
    assert Tables(tmp_path).find("host", "key", HostWork) is None


def test_tables_need_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="choose another --tables"):
        Tables(tmp_path / "file" / "tables")


# ---- the replay against an engine ------------------------------------------------------------------------

NEW = 14


@pytest.fixture(scope="module")
def adapter(deep: Model) -> Adapter:
    return calibrate(deep, default_text()[:40_000], tokens=1024, window=128, place_tokens=GROUP)


BASE = Selection(
    selected_groups=5, reuse_slots=7, rank=12, sink_groups=1, recent_groups=2, summary_dtype="float32"
)
SELECTIONS = {
    "kept": BASE,
    "selected": msgspec.structs.replace(BASE, attended="selected"),
    "step": msgspec.structs.replace(BASE, lookahead="step", summary_dtype="bfloat16"),
    "layer-then-step": msgspec.structs.replace(
        BASE, lookahead="layer-then-step", opening_steps=3, refresh=(2,) * 7
    ),
    "refresh": msgspec.structs.replace(BASE, refresh=(2,) * 7),
}


@pytest.mark.slow
@pytest.mark.parametrize("selection", list(SELECTIONS.values()), ids=list(SELECTIONS))
def test_the_replay_loses_and_reads_what_an_engine_does(
    deep: Model, adapter: Adapter, tmp_path: Path, selection: Selection, shared_programs: None
) -> None:
    prompts = prompts_of(51, 51)
    following = [np.random.default_rng(row).integers(4, 304, NEW).tolist() for row in range(2)]
    captured = capture(deep, prompts, tmp_path / "prefill")
    plan = make_plan(
        deep.geometry,
        cache="group",
        batch=2,
        max_context=52 + NEW,
        group_tokens=GROUP,
        selection=selection,
        kv_dtype="float32",
    )
    resident = make_plan(deep.geometry, cache="resident", batch=2, max_context=52 + NEW)
    logits, read = {}, []
    for name, one in (("group", plan), ("resident", resident)):
        with Engine(deep, one, store_dir=tmp_path / "store", adapter=adapter) as engine:
            steps = engine.generate(
                prompts,
                max_new_tokens=NEW + 1,
                ignore_eos=True,
                forced=[[*row, 4] for row in following],
                return_logits=True,
                prefilled=captured,
            )
            logits[name] = []
            for step in steps:
                if name == "group":
                    read.append(engine.use.groups_read)
                logits[name].append(step.logits)
    # An engine's first step comes out of the prefill; each later one decodes the token before.
    expected = divergence(np.stack(logits["resident"][1:]), np.stack(logits["group"][1:]))
    replayed = Replay(deep, captured, prompts, following).run(plan, adapter)
    assert replayed.kl == pytest.approx(float(expected.mean()), rel=0.05, abs=1e-4)
    assert replayed.kl > 1e-4
    ours = sum(map(sum, replayed.misses))
    theirs = read[-1] - read[COLD]
    if selection.by_step(NEW):  # the engine has read for the step after the last one, too
        assert abs(ours - theirs) <= 0.15 * theirs
    else:
        assert ours == pytest.approx(theirs, rel=0.03)


def test_the_replay_loses_nothing_where_everything_is_attended(
    deep: Model, adapter: Adapter, tmp_path: Path
) -> None:
    prompts, following = prompts_of(40), [[5, 6, 7, 8, 9]]
    captured = capture(deep, prompts, tmp_path)
    plan = make_plan(
        deep.geometry,
        cache="group",
        max_context=45,
        group_tokens=GROUP,
        selection=Selection(selected_groups=12, reuse_slots=12, rank=4),
        kv_dtype="float32",
    )
    replayed = Replay(deep, captured, prompts, following).run(plan, adapter)
    assert replayed.kl == pytest.approx(0, abs=1e-9)
    assert replayed.top1 == 1
    assert json.loads(msgspec.json.encode(replayed))["rows"] == 1
