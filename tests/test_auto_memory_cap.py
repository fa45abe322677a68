"""Under a memory limit `auto` chooses a plan that runs inside it, or says what the least would be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from memory_caps import Cgroup, memory_cap

pytestmark = pytest.mark.slow

ROWS, CONTEXT = 8, 7000  # 2,461 MiB of KV and 513 MiB of weights


@pytest.mark.parametrize(
    ("mebibytes", "flags", "policy"),
    [
        (1300, [], "group"),
        (1300, ["--exact"], "layer"),
        (1045, [], "layer"),  # too little for group
        (800, [], None),
    ],
)
def test_the_chosen_plan_runs_inside_the_limit(
    mebibytes: int, flags: list[str], policy: str | None, tmp_path: Path
) -> None:
    with memory_cap(mebibytes << 20) as cap:
        if not isinstance(cap, Cgroup):
            pytest.skip(f"the planner does not know of {cap.kind}")
        cap.tighten(0)
        report = tmp_path / "report.json"
        command = [
            sys.executable,
            "-m",
            "swapkv_jax.decode",
            "--raw",
            *["--prompt", "Once upon a time"] * ROWS,
        ]
        command += ["--max-context", str(CONTEXT), "--max-new-tokens", "6", "--ignore-eos", *flags]
        command += ["--store-dir", str(tmp_path), "--report", str(report)]
        done = subprocess.run(cap.inside(command), capture_output=True, text=True, check=False)
    if policy is None:
        assert done.returncode == 2, done.stderr
        assert "no plan fits: resident needs" in done.stderr
        assert "the smallest, layer, takes" in done.stderr
        return
    assert done.returncode == 0, done.stderr  # -9 is the kernel's doing
    assert "why: " in done.stderr
    assert json.loads(report.read_text())["policy"] == policy
