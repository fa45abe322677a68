"""Policy `group` over a disk that fails, lies, fills up and dawdles, and under consumers slower than reads.

Selection follows from the tokens alone, so whatever the disk does short of giving up, logits keep their bits.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import pytest
from burn import late, rounds_for
from engines import (
    CONTEXT,
    GROUP,
    LAYERS,
    Decoded,
    assert_same,
    compile_once,
    decode,
    disks_through,
    prompts_of,
    resident_plan,
)
from faulty_disk import SECTOR, Always, Disk, Odd, Once, Short, Slow, Transfer, Wrong
from test_group_dram import random_adapter

from swapkv_jax import Engine, Plan, Sampling, TierError, group_graphs, make_plan
from swapkv_jax.adapter import Adapter, adapter_directory
from swapkv_jax.generation import Step
from swapkv_jax.group_graphs import GroupGraphs
from swapkv_jax.models import Geometry, Model
from swapkv_jax.models.blocks import split_block
from swapkv_jax.program import Program
from swapkv_jax.report import build_report, summarise
from swapkv_jax.selection import Lookahead, Selection
from swapkv_jax.text import RowText
from swapkv_jax.tiers import ScatteredReader, SequenceFile, Syscalls
from swapkv_jax.tiers.direct_io import probe_direct
from swapkv_jax.tiers.kernel_reads import KernelReads

pytestmark = pytest.mark.usefixtures("shared_programs")

NEW = 18
LENGTHS = (3, 13, 37, 78)  # row 0 completes a group with its very last token
LOOKAHEADS: tuple[Lookahead, ...] = get_args(Lookahead)


@pytest.fixture(params=["kernel", "threads"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """Read by the kernel asynchronously, or by threads."""
    if request.param == "kernel":
        try:
            KernelReads(1).close()
        except OSError as error:
            pytest.skip(f"no asynchronous reads here: {error}")
        if not probe_direct(tmp_path, Syscalls()).direct:
            pytest.skip("the kernel reads asynchronously only with O_DIRECT")
    disk = Disk(threads=request.param == "threads")
    with disks_through(disk):
        yield disk
    assert (disk.arrived > 0) == (not disk.threads), "not read that way"


@pytest.fixture(scope="module")
def adapter(deep: Model) -> Adapter:
    return random_adapter(deep)


def tight_plan(model: Model, **fields: Any) -> Plan:
    """A quarter of the groups selected, no slot to spare: each layer reads at nearly every step."""
    known = {"selected_groups": 6, "reuse_slots": 6, "rank": 8, "recent_groups": 2, "load_buckets": (2, 8)}
    selection = {name: fields.pop(name) for name in Selection.__struct_fields__ if name in fields}
    return make_plan(
        model.geometry,
        cache="group",
        tier="disk",
        batch=len(LENGTHS),
        max_context=CONTEXT,
        group_tokens=GROUP,
        record_alignment=SECTOR,
        prefill_chunks=(8, 20),
        selection=Selection(**{**known, **selection}),
        kv_dtype="float32",
        **fields,
    )


Expected = dict[Lookahead, Decoded]


@pytest.fixture(scope="module")
def expected(deep: Model, adapter: Adapter, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """What the tight plan decodes when nothing is in its way."""
    known: Expected = {}
    for lookahead in LOOKAHEADS:
        plan, store = tight_plan(deep, lookahead=lookahead), tmp_path_factory.mktemp("undisturbed")
        with Engine(deep, plan, store_dir=store, adapter=adapter) as engine:
            known[lookahead] = decode(engine, prompts_of(*LENGTHS), NEW)
            assert engine.use.groups_read > 2 * NEW * LAYERS, "too few reads to test anything"
    return known


def fails(
    engine: Engine, reference: Decoded, ready: int, arm: Callable[[], object], steps: list[Step]
) -> str:
    """Decodes into `steps` until a TierError ends it, and returns its message; `ready` steps in, calls `arm`.

    Every step that came had the logits of `reference`, bit for bit, and none comes later.
    """
    generation = engine.generate(
        prompts_of(*LENGTHS), max_new_tokens=NEW, return_logits=True, ignore_eos=True
    )
    steps.extend(itertools.islice(generation, ready))
    arm()
    with pytest.raises(TierError) as caught:
        steps.extend(generation)
    assert list(generation) == []
    assert [step.tokens for step in steps] == reference.tokens[: len(steps)]
    for step, logits in zip(steps, reference.logits, strict=False):
        np.testing.assert_array_equal(step.logits, logits)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- what passes ---


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("fault", [Once, Short, Odd, Wrong])
def test_faults_of_reads_that_pass(
    deep: Model,
    adapter: Adapter,
    expected: Expected,
    disk: Disk,
    tmp_path: Path,
    fault: type[Once],
    lookahead: Lookahead,
) -> None:
    plan = tight_plan(deep, lookahead=lookahead)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        disk.reading = behaviour = fault()
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), expected[lookahead])
        assert len(behaviour.seen) > NEW * LAYERS
        # A short read that gets on is no failure; but what came short of an asynchronous one is read again.
        assert (engine.use.retries > 0) == (fault is not Short or not disk.threads)


@pytest.mark.parametrize("fault", [Once, Short])
def test_faults_of_writes_that_pass(
    deep: Model, adapter: Adapter, expected: Expected, disk: Disk, tmp_path: Path, fault: type[Once]
) -> None:
    with Engine(deep, tight_plan(deep, lookahead="step"), store_dir=tmp_path, adapter=adapter) as engine:
        disk.writing = fault()
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), expected["step"])


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_slow_disk(
    deep: Model, adapter: Adapter, expected: Expected, disk: Disk, tmp_path: Path, lookahead: Lookahead
) -> None:
    """A group that was just completed is wanted at once, and its write takes several steps."""
    plan = tight_plan(deep, lookahead=lookahead)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        disk.reading, disk.writing = Slow(0, 0, 0.001, 0.004), Slow(0, 0.01, 0.06)
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), expected[lookahead])
        assert engine.use.wait_s > 0


def test_the_report_says_where_threads_read(
    deep: Model, adapter: Adapter, disk: Disk, tmp_path: Path
) -> None:
    prompts = prompts_of(*LENGTHS)
    with Engine(deep, tight_plan(deep), store_dir=tmp_path, adapter=adapter) as engine:
        generation = engine.generate(prompts, max_new_tokens=4, ignore_eos=True)
        for _ in generation:
            pass
        report = build_report(
            engine, generation, prompts, [RowText(deep.tokenizer, prompt, []) for prompt in prompts]
        )
    note = "no asynchronous reads here (Operation not permitted): threads read groups, more slowly"
    assert report["notes"] == ([note] if disk.threads else [])
    assert (note in summarise(report)) == disk.threads


# --- what does not pass ---


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("ready", [0, 1, 11])
def test_reads_that_keep_failing(
    deep: Model,
    adapter: Adapter,
    expected: Expected,
    disk: Disk,
    tmp_path: Path,
    ready: int,
    lookahead: Lookahead,
) -> None:
    """The generation ends before the step that wanted what could not be read. Then the disk recovers."""
    plan = tight_plan(deep, lookahead=lookahead)
    steps: list[Step] = []
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        always = Always(errno.EIO, steps)
        message = fails(engine, expected[lookahead], ready, lambda: setattr(disk, "reading", always), steps)
        assert "cannot read" in message
        assert f"errno {errno.EIO}" in message
        assert str(tmp_path) in message
        assert always.at is not None
        # What is read during a step is for the next one under `step`, for the step itself under `layer`.
        assert len(steps) <= always.at + (lookahead != "layer")
        disk.reading = None
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), expected[lookahead])
    assert list(tmp_path.glob("*.kv")) == []


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "free some space"), (errno.EIO, "check the disk")]
)
@pytest.mark.parametrize("ready", [1, NEW - 1])
def test_a_completed_group_that_cannot_be_written(
    deep: Model,
    adapter: Adapter,
    expected: Expected,
    disk: Disk,
    tmp_path: Path,
    ready: int,
    code: int,
    remedy: str,
    lookahead: Lookahead,
) -> None:
    """Even the very last group, which no step will want."""
    plan = tight_plan(deep, lookahead=lookahead)
    steps: list[Step] = []
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        always = Always(code, steps)
        message = fails(engine, expected[lookahead], ready, lambda: setattr(disk, "writing", always), steps)
        assert "cannot write" in message
        assert f"errno {code}" in message
        assert str(tmp_path) in message
        assert remedy in message
        disk.writing = None
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), expected[lookahead])
    assert list(tmp_path.glob("*.kv")) == []


def test_closing_over_a_failed_write_lets_go_of_everything(
    deep: Model, adapter: Adapter, disk: Disk, tmp_path: Path
) -> None:
    begun = threading.Event()

    def fails_later(transfer: Transfer, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        begun.set()
        time.sleep(0.5)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine = Engine(deep, tight_plan(deep), store_dir=tmp_path, adapter=adapter)
    generation = engine.generate(prompts_of(*LENGTHS), max_new_tokens=NEW, ignore_eos=True)
    next(generation)
    disk.writing = fails_later
    next(generation)  # row 0 completes a group
    assert begun.wait(60)
    with pytest.raises(TierError, match="cannot write"):
        engine.close()
    assert list(tmp_path.glob("*.kv")) == []
    engine.close()


def flipped(file: SequenceFile, at: int) -> None:
    with open(file.path, "r+b") as raw:
        raw.seek(at + 33)
        byte = raw.read(1)[0]
        raw.seek(at + 33)
        raw.write(bytes([byte ^ 1]))


def poisoned(file: SequenceFile, at: int) -> None:
    with open(file.path, "r+b") as raw:
        raw.seek(at)
        raw.write(np.full(file.header.payload_bytes // 4, np.nan, np.float32).tobytes())


def cut_off(file: SequenceFile, at: int) -> None:
    os.truncate(file.path, min(at, file.path.stat().st_size))


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flipped, "damaged or was never written"),
        (poisoned, "damaged or was never written"),
        (cut_off, "the file ends early"),
    ],
)
def test_records_damaged_between_two_steps(
    deep: Model,
    adapter: Adapter,
    expected: Expected,
    disk: Disk,
    tmp_path: Path,
    damage: Callable[[SequenceFile, int], None],
    words: str,
    lookahead: Lookahead,
) -> None:
    """Every record of a row's prompt is damaged. None reaches a token, in this generation or the next."""
    plan = tight_plan(deep, lookahead=lookahead)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        damaged: list[Path] = []

        def arm() -> None:
            file = engine._cache._tier.files[3]  # type: ignore[attr-defined]
            damaged.append(file.path)
            for layer in range(LAYERS):
                for run in file.runs(layer, 0, LENGTHS[3] // GROUP):
                    for group in range(run.groups):
                        damage(file, run.file_offset + group * file.stride)

        steps: list[Step] = []
        message = fails(engine, expected[lookahead], 4, arm, steps)
        assert str(damaged[0]) in message
        assert words in message
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), expected[lookahead])


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_interrupted_in_a_read(
    deep: Model, adapter: Adapter, expected: Expected, disk: Disk, tmp_path: Path, lookahead: Lookahead
) -> None:
    """Reads of the generation that is left are over when the next one fills the same buffers."""
    plan = tight_plan(deep, lookahead=lookahead)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        disk.reading = Slow(0, 0.02)
        generation = engine.generate(prompts_of(*LENGTHS), max_new_tokens=NEW, ignore_eos=True)
        next(generation)
        with patch.object(ScatteredReader, "finish", side_effect=KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                list(generation)
        assert list(generation) == []
        disk.reading = None
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), expected[lookahead])


# --- consumers slower than reads ---


@lru_cache
def slow_graphs(consumer: str, rounds: int, plan: Plan, geometry: Geometry) -> GroupGraphs:
    """The policy's graphs, where the load burns before it reads staging memory, or the segment before it
    reads the slots, which of them are in use, and the rolling buffer."""
    load_groups, group_segment = group_graphs.load_groups, group_graphs.group_segment

    def load_of(*arguments: Any) -> Any:
        load = load_groups(*arguments)
        return lambda pool, records, *where: load(pool, late(records, rounds), *where)

    def segment_of(*arguments: Any, **options: Any) -> Any:
        segment = group_segment(*arguments, **options)

        def slow(params: Any, adapter: Any, x: Any, *buffers: Any) -> Any:
            pool, used, lengths, after, rolling, *rest = buffers
            pool, used, rolling = late((pool, used, rolling), rounds)
            return segment(params, adapter, x, pool, used, lengths, after, rolling, *rest)

        return slow

    slow = {"load": ("load_groups", load_of), "segment": ("group_segment", segment_of)}[consumer]
    with patch.object(group_graphs, *slow):
        return group_graphs.compile_group_graphs(plan, split_block(geometry, plan.dtype), geometry)


@pytest.fixture(scope="module")
def burn_rounds() -> int:
    return rounds_for(0.003)


@pytest.fixture
def slow_consumer(burn_rounds: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a consumer, load or segment, of the test's next engines burn."""

    def slow(consumer: str) -> None:
        def compiled(plan: Plan, geometry: Geometry, sampling: Sampling) -> Program:
            graphs = slow_graphs(consumer, burn_rounds, plan, geometry)
            return replace(compile_once(plan, geometry, sampling), group=graphs)

        monkeypatch.setattr("swapkv_jax.engine.compile_program", compiled)

    return slow


@pytest.mark.parametrize("consumer", ["load", "segment"])
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_consumers_slower_than_reads(
    deep: Model,
    adapter: Adapter,
    expected: Expected,
    slow_consumer: Callable[[str], None],
    tmp_path: Path,
    consumer: str,
    lookahead: Lookahead,
) -> None:
    """Whatever is refilled while it may still be read changes logits, or makes them NaN."""
    slow_consumer(consumer)
    plan = tight_plan(deep, lookahead=lookahead)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        decoded = decode(engine, prompts_of(*LENGTHS), NEW)
        assert_same(decoded, expected[lookahead])
        assert decoded.compiles == 0
        assert engine.use.overflow_loads > 0


@pytest.mark.slow
def test_slow_loads_of_everything(
    deep: Model, adapter: Adapter, slow_consumer: Callable[[str], None], tmp_path: Path
) -> None:
    """All groups selected is `resident`: the first step fills every slot through one small staging buffer."""
    with Engine(deep, resident_plan(deep, len(LENGTHS))) as engine:
        reference = decode(engine, prompts_of(*LENGTHS), NEW)
    slow_consumer("load")
    every = CONTEXT // GROUP
    plan = tight_plan(deep, selected_groups=every, reuse_slots=every, load_buckets=(2, 8))
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), reference, 1e-4)
        assert engine.use.overflow_loads > LAYERS


# --- killed ---

PROMPTS = ("the end of the road and of the story is in sight", "on")


@pytest.mark.parametrize(
    "moments",
    [
        (("decode", 0.1),),
        pytest.param(
            (("prefill", 0.0), ("decode", 0.0), ("prefill", 0.03), ("decode", 0.2), ("decode", 0.37)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["once", "often"],
)
def test_killed(
    deep: Model,
    adapter: Adapter,
    expected: Expected,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moments: tuple[tuple[str, float], ...],
) -> None:
    """Each run opens the store that the one before it left behind, and the orphans in it go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    adapter.save(adapter_directory(deep.fingerprint, GROUP))
    store = tmp_path / "store"
    orphans: list[Path] = []
    for phase, delay_s in moments:
        _kill(deep.source, store, orphans, phase, delay_s)
        left = sorted(store.glob("*.kv"))
        assert len(left) == len(PROMPTS)
        assert not set(left) & set(orphans)
        orphans = left
    with Engine(deep, tight_plan(deep, lookahead="step"), store_dir=store, adapter=adapter) as engine:
        assert list(store.iterdir()) == []
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), expected["step"])


def _kill(model: str, store: Path, orphans: list[Path], phase: str, delay_s: float) -> None:
    """Starts the decode command and kills it so long after its files were made, or its first text came."""
    command = [sys.executable, "-m", "swapkv_jax.decode", "--model", model, "--raw", "--quiet"]
    command += [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    command += ["--cache", "group", "--tier", "disk", "--store-dir", str(store)]
    command += ["--ignore-eos", "--max-new-tokens", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        if phase == "decode":
            child.stdout.read(30)  # the heading of the first prompt, and some text
        else:
            while child.poll() is None and len({*store.glob("*.kv")} - {*orphans}) < len(PROMPTS):
                time.sleep(0.002)
        time.sleep(delay_s)
        child.kill()
        _, err = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, err.decode()
