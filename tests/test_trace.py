"""A trace shows the steps, the graphs, and the tiers' reads, writes and waits, on one clock."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli import Runner

STEPS = 8
pytestmark = pytest.mark.usefixtures("shared_programs")


def test_a_trace_of_reads_and_steps(run: Runner, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    prompt = ["--prompt", "the quick brown fox " * 8, "--max-new-tokens", "14", "--ignore-eos"]
    untraced = run(*prompt, "--tier", "disk")[3]
    code, _, err, report = run(*prompt, "--tier", "disk", "--trace", str(path))
    assert code == 0, err
    assert report["generated"] == untraced["generated"]
    events = [
        e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") in ("X", "M")
    ]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    steps = [e for e in spans if e["name"] == "step"]
    assert len(steps) == STEPS
    assert any("segment" in e["name"] for e in spans)
    by_lane: dict[str, list[dict[str, Any]]] = {}
    for event in spans:
        by_lane.setdefault(lanes.get((event["pid"], event["tid"]), "?"), []).append(event)
    reads = [e for lane, some in by_lane.items() if lane.startswith("reads ") for e in some]
    layers = Counter(e["name"].split(",")[0] for e in reads)
    assert set(layers) == {f"layer {i}" for i in range(4)}
    assert (
        STEPS - 1 <= layers["layer 0"] <= STEPS + 2
    )  # read ahead: one more at the end, the first one before
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    within = [begin <= e["ts"] <= e["ts"] + e["dur"] <= end for e in reads]
    assert sum(within) >= 0.7 * len(
        reads
    )  # all but those ahead of the first step and of the one after the last
    for lane, some in by_lane.items():
        if lane.startswith(("reads ", "writes ", "waits")):
            some.sort(key=lambda e: e["ts"])
            for one, next_one in pairwise(some):
                assert one["ts"] + one["dur"] <= next_one["ts"] + 1, lane


def test_a_trace_of_fewer_steps_and_one_that_cannot_be_written(run: Runner, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert run("--prompt", "a b c", "--max-new-tokens", "3", "--ignore-eos", "--trace", str(path))[0] == 0
    events = json.loads(path.read_bytes())["traceEvents"]
    assert sum(e.get("name") == "step" for e in events) in (2, 3)  # the last one finds that there is none
    code, _, err, _ = run("--prompt", "a", "--trace", str(tmp_path / "none" / "trace.json"))
    assert code == 2
    assert "cannot write the trace" in err
