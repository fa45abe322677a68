"""Policy `group` decodes where the whole KV cache does not fit: inside a memory cap, at nearly full speed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from memory_caps import Cgroup, MemoryCap, memory_cap

from swapkv_jax import load_model, make_plan

pytestmark = pytest.mark.slow

CONTEXT, BATCH = 7680, 8
WARM_UP, PAIRS = 4, 20  # steps; pairs of a capped and an uncapped one
NEW = 1 + WARM_UP + 2 * (2 * PAIRS)  # the pairs may be measured twice
CAP = 1536 << 20

# Waits for a line before it takes any memory, and then for one before every step.
CHILD = """
import json, sys
from pathlib import Path
import jax
from swapkv_jax import Engine, load_model, make_plan
from swapkv_jax.prefilled import RandomPrefill

policy, store, context, batch, new = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])

def say(value):
    print(json.dumps(value), flush=True)

say(jax.default_backend())
sys.stdin.readline()
model = load_model("smollm2-135m")
plan = make_plan(model.geometry, cache=policy, batch=batch, max_context=context + new)
with Engine(model, plan, store_dir=store) as engine:
    prompts = [[5] * context] * batch
    generation = engine.generate(
        prompts, max_new_tokens=new, ignore_eos=True, prefilled=RandomPrefill(model, prompts)
    )
    next(generation)
    say(engine.use.notes)
    for _ in sys.stdin:
        next(generation)
        say(generation.step_s[-1])
    for _ in generation:
        pass
    say({"reasons": generation.finish_reasons, "steps": len(generation.step_s), "disk": engine.use.disk_used})
"""


class Child:
    """A generation in a process of its own, which takes its first byte of KV under the cap."""

    def __init__(self, cap: MemoryCap, policy: str, store: Path) -> None:
        arguments = [policy, str(store), str(CONTEXT), str(BATCH), str(NEW)]
        self.cap = cap
        self.process = subprocess.Popen(
            cap.inside([sys.executable, "-c", CHILD, *arguments]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.backend = self.hear()
        cap.tighten(self.process.pid)

    def hear(self) -> Any:
        """The next thing the child says; AssertionError with its stderr where it ended instead."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait()}: {self.process.stderr.read()}"
        return json.loads(line)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def step(self, *, capped: bool) -> float:
        """Seconds of the next step."""
        (self.cap.tighten if capped else self.cap.loosen)(self.process.pid)
        self.go_on()
        return self.hear()


@contextmanager
def started(cap: MemoryCap, policy: str, store: Path) -> Iterator[Child]:
    child = Child(cap, policy, store)
    with child.process:  # closes its pipes and waits for it
        try:
            yield child
        finally:
            child.process.kill()


@pytest.fixture
def cap() -> Iterator[MemoryCap]:
    geometry = load_model("smollm2-135m").geometry
    resident = make_plan(geometry, cache="resident", batch=BATCH, max_context=CONTEXT + NEW)
    assert resident.full_kv_bytes > 1.5 * CAP
    with memory_cap(CAP) as cap:
        print(cap.kind)
        yield cap


def relative_speed(child: Child) -> float:
    """Capped speed over uncapped speed: medians of steps taken in turn, so that whatever else the machine
    does slows both alike."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(PAIRS):
        for capped in (pair % 2 == 0, pair % 2 == 1):
            seconds[capped].append(child.step(capped=capped))
    capped, free = median(seconds[True]), median(seconds[False])
    print(f"capped {capped * 1e3:.0f} ms, uncapped {free * 1e3:.0f} ms per step")
    return free / capped


def test_group_goes_on_where_the_whole_cache_would_not_fit(cap: MemoryCap, tmp_path: Path) -> None:
    with started(cap, "group", tmp_path) as child:
        if child.backend != "cpu":
            pytest.skip(f"on a {child.backend} KV is not in the memory that this test caps")
        child.go_on()
        assert child.hear() == [], "the store directory takes no O_DIRECT"
        for _ in range(WARM_UP):
            child.step(capped=True)
        assert any(relative_speed(child) >= 0.8 for _ in range(2))  # the second time only if it must
        cap.tighten(child.process.pid)
        assert child.process.stdin is not None
        child.process.stdin.close()
        end = child.hear()
        assert end["reasons"] == ["length"] * BATCH
        assert end["steps"] == NEW - 1
        assert end["disk"] > CAP / 2  # all of it in int8, a quarter of what `resident` would hold
        assert child.process.wait() == 0


def test_resident_does_not(cap: MemoryCap, tmp_path: Path) -> None:
    with started(cap, "resident", tmp_path) as child:
        child.go_on()
        with pytest.raises(AssertionError, match="ended with"):
            child.hear()
        if isinstance(cap, Cgroup):
            assert child.process.returncode == -signal.SIGKILL
        else:
            assert child.process.returncode == 1


def test_the_command_says_so(cap: MemoryCap, tmp_path: Path) -> None:
    if not isinstance(cap, Cgroup):
        pytest.skip(f"the planner does not know of {cap.kind}")
    cap.tighten(0)
    command = [sys.executable, "-m", "swapkv_jax.decode", *["--prompt", "hi"] * BATCH, "--quiet", "--dry-run"]
    command += ["--max-context", str(CONTEXT + NEW), "--store-dir", str(tmp_path)]
    done = {
        policy: subprocess.run(
            cap.inside([*command, "--cache", policy]), capture_output=True, text=True, check=False
        )
        for policy in ("resident", "group")
    }
    assert done["group"].returncode == 0, done["group"].stderr
    refused = done["resident"]
    assert refused.returncode == 2
    assert "no plan fits: resident needs" in refused.stderr
    assert "of this machine's memory" in refused.stderr
