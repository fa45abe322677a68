"""tools/benchmark.py on a tiny checkpoint: its rows, its peers, and what it refuses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_checkpoint
from tool_runs import Outcome, run_tool, small_benchmark

from swapkv_jax import load_model, make_plan

TOOLS = Path(__file__).parents[1] / "tools"
CONTEXT, BATCH, STEPS = 70, 2, 3  # one whole group of 64 tokens per row, and a few
ROW_KEYS = {
    "policy", "peer", "context", "batch", "tier", "tpot_s", "tpot_p90_s", "tokens_per_s", "ttft_s", "kv_bytes",
    "full_kv_bytes", "memory_fraction", "reuse_rate", "bytes_read_per_step", "wait_fraction", "hidden_fraction",
    "groups_read_per_step", "overflow_loads", "floor_s", "floor_memory_s", "floor_disk_s", "over_floor", "breakdown",
    "storage_profile", "prefill_s",
}  # fmt: skip
MACHINE_KEYS = {
    "cpu", "cores", "memory_bytes", "memory_bytes_per_s", "disk_bytes_per_s", "jax", "python", "date",
}  # fmt: skip
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("benchmark"))


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return small_benchmark(monkeypatch)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Some 1,800 tokens of the tiny tokenizer."""
    path = tmp_path / "text.txt"
    path.write_text("the rain in the west is on the eaves and in the halls " * 20)
    return path


@pytest.fixture
def run(benchmark: ModuleType, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the tool on the tiny checkpoint."""

    def run(*flags: str) -> Outcome:
        out = tmp_path / "out.json"
        base = ["--model", str(checkpoint), "--context", str(CONTEXT), "--steps", str(STEPS), "--burst", "1"]
        base += ["--store-dir", str(tmp_path / "store"), "--json", str(out), "--breakdown", "0"]
        return run_tool(benchmark.main, [*base, *flags], out, capfd)

    return run


def test_rows(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    code, out, _, report = run("--batch", str(BATCH), "--tier", "dram,disk")
    assert code == 0
    assert report["machine"].keys() >= MACHINE_KEYS
    assert report["machine"]["disk_bytes_per_s"] > 1e6
    rows = report["rows"]
    assert [(row["policy"], row["tier"]) for row in rows] == [
        ("resident", None),
        ("layer", "dram"),
        ("layer", "disk"),
    ]
    geometry = load_model(str(checkpoint)).geometry
    new = 1 + 2 + STEPS  # the prefill's, the warm-up's, the timed
    for row in rows:
        assert row.keys() >= ROW_KEYS
        assert (row["context"], row["batch"], row["peer"], row["reuse_rate"]) == (CONTEXT, BATCH, None, None)
        assert 0 < row["tpot_s"] <= row["tpot_p90_s"]
        assert row["tokens_per_s"] == pytest.approx(BATCH / row["tpot_s"])
        assert row["ttft_s"] > row["tpot_s"]
        assert row["full_kv_bytes"] == BATCH * (CONTEXT + new) * geometry.kv_bytes_per_token(4)
        assert row["tokens_as_first"] == new
        assert row["compiles_during_decode"] == 0
        assert row["floor_s"] == max(row["floor_memory_s"], row["floor_disk_s"]) > 0
        assert row["over_floor"] == row["tpot_s"] / row["floor_s"]
        assert (
            row["memory_fraction"] * row["full_kv_bytes"]
            == row["kv_bytes"]["device"] + row["kv_bytes"]["dram"]
        )
        assert str(round(row["tpot_s"] * 1e3, 1)) in out
    resident, dram, disk = rows
    assert dram["ratio_to"].keys() == {"resident", "layer disk"}
    assert resident["kv_bytes"]["device"] >= resident["full_kv_bytes"]
    assert resident["kv_bytes"]["dram"] == dram["kv_bytes"]["device"] == 0
    assert dram["kv_bytes"]["dram"] >= dram["full_kv_bytes"]
    assert 0 < disk["kv_bytes"]["device"] < disk["kv_bytes"]["disk"]
    assert resident["bytes_read_per_step"] is dram["bytes_read_per_step"] is None
    plan = make_plan(geometry, cache="layer", tier="disk", batch=BATCH, max_context=CONTEXT + new)
    assert disk["bytes_read_per_step"] == geometry.layers * BATCH * plan.stride_bytes
    assert 0 <= disk["wait_fraction"] < 1
    assert disk["plain_reader_bytes_per_s"] > 1e6
    assert disk["ratio_to_plain_reader"] > 0
    assert list((tmp_path / "store").iterdir()) == []


def test_random_prefill_is_the_same_under_every_policy(run: Run) -> None:
    code, out, _, report = run("--prefill", "random", "--tier", "disk")
    assert code == 0
    assert report["prefill"] == "random"
    assert "random prefill" in out
    for row in report["rows"]:
        assert row["ttft_s"] is None
        assert row["tokens_as_first"] == 3 + STEPS
        assert row["tpot_s"] > 0


def test_a_storage_profile_slows_every_reader(run: Run) -> None:
    flags = ("--policies", "layer", "--prefill", "random", "--tier", "disk")
    code, _, _, report = run(*flags, "--storage-profile", "emmc-250MBps")
    assert code == 0
    assert report["storage_profiles"] == ["emmc-250MBps"]
    (row,) = report["rows"]
    assert row["storage_profile"] == "emmc-250MBps"
    assert 0 < row["plain_reader_bytes_per_s"] < 250e6
    # Each layer is read in one piece at least, 0.18 ms each, two at a time.
    assert row["tpot_s"] > 2 * 0.18e-3 / 2
    code, _, err, _ = run("--storage-profile", "own,floppy")
    assert code == 2
    assert "floppy" in err


def test_prefill_once_is_shared_and_removed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, _, real = run("--batch", str(BATCH), "--tier", "dram,disk")
    assert code == 0
    monkeypatch.setattr("swapkv_jax.engine.Generation._prefill", None)  # no engine prefills for itself
    code, out, err, report = run("--batch", str(BATCH), "--tier", "dram,disk", "--prefill", "once")
    assert code == 0
    assert report["prefill"] == "once"
    assert "once prefill" in out
    assert "prefill (layers)" in err
    for row, ordinary in zip(report["rows"], real["rows"], strict=True):
        assert row["ttft_s"] is None
        assert row["tokens_as_first"] == 3 + STEPS
        assert row["kv_bytes"] == ordinary["kv_bytes"]
    assert list((tmp_path / "store").iterdir()) == []


def test_every_batch(run: Run) -> None:
    code, _, _, report = run("--policies", "resident", "--context", "5", "--batch", "1,2", "--steps", "1")
    assert code == 0
    assert [(row["context"], row["batch"]) for row in report["rows"]] == [(5, 1), (5, 2)]
    assert report["machine"]["disk_bytes_per_s"] is None


def test_prompt_file(run: Run, text: Path) -> None:
    code, out, _, report = run("--policies", "resident", "--prompt-file", str(text))
    assert (code, report["prompt"], report["prefill"], report["forced"]) == (0, "text.txt", "real", True)
    assert report["rows"][0]["tokens_as_first"] is None  # they are given
    assert "the text's own tokens" in out
    code, _, err, _ = run("--policies", "resident", "--prompt-file", str(text), "--batch", "90")
    assert code == 2
    assert "texts, or lower --context, --batch or --steps" in err


def test_every_contender_follows_the_text(benchmark: ModuleType, checkpoint: Path, tmp_path: Path) -> None:
    contenders, peer_decode = (importlib.import_module(name) for name in ("contenders", "peer_decode"))
    following = [[5, 6, 7, 8], [9, 10, 11, 12]]
    work = contenders.Workload(prompts=[[1, 2, 3]] * 2, new_tokens=4, following=following)
    model, given = load_model(str(checkpoint)), []
    peer_run = SimpleNamespace(
        prefill=lambda prompts: [0, 0], step=lambda tokens: given.append(tokens) or [0, 0]
    )
    plan = make_plan(model.geometry, cache="resident", batch=2, max_context=7)
    ours = contenders.OurEngine(model, plan, tmp_path)
    peer = peer_decode.PeerDecode("peer", "1.0", SimpleNamespace(name="fast"), peer_run)
    for contender in (ours, peer):
        contender.prefill(work)
        contender.measure(samples := contenders.Samples(), 3)
        assert (samples.steps, len(samples.seconds)) == ([3], 1)
        assert contender.tokens == [list(tokens) for tokens in zip(*following, strict=True)]
    ours.close()
    assert given == peer.tokens[:3]


def test_captured_prefill_is_kept_and_used_again(run: Run, text: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    flags = ["--policies", "resident,layer", "--prompt-file", str(text), "--capture-dir", str(kept)]
    assert run(*flags)[3]["prefill"] == "once"
    times = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert len(times) == 3  # one row
    code, _, err, _ = run(*flags)
    assert code == 0
    assert "prefill (layers)" not in err
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == times


def test_missing_peer_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, err, report = run("--policies", "resident", "--peers", "transformers")
    assert code == 0
    line = 'transformers: skipped (not installed; pip install "swapkv-jax[transformers]")'
    assert line in err
    assert line in out
    assert report["skipped"].keys() == {"transformers"}
    assert [row["peer"] for row in report["rows"]] == [None]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--policies", "resident,paged"], 2, "unknown policy 'paged'; known: resident, layer, flexgen"),
        (["--tier", "tape"], 2, "unknown tier 'tape'"),
        (["--peers", "vllm"], 2, "unknown peer 'vllm'; known: transformers, llama-cpp"),
        (["--steps", "0"], 2, "'0' is not a positive number"),
        (["--context", "12,x"], 2, "'x' is not a positive number"),
        (["--context", "4000"], 2, "use at most 256"),
        (["--physical-layers", "1"], 2, "physical_layers must be at least 2"),
        (["--dtype", "int8"], 2, "supported: float32"),
        (["--json", "/no/such/place/out.json"], 2, "give --json a file"),
        (["--store-dir", "/proc/none"], 2, "choose another --store-dir"),
        (["--prompt-file", "/no/such/text"], 2, "give --prompt-file UTF-8 texts"),
        (["--capture-dir", "x", "--prefill", "random"], 2, "leave one of them out"),
        (["--weights", "some"], 2, "invalid choice: 'some'"),
        (["--policies", "group", "--group-tier", "tape"], 2, "unknown tier 'tape'"),
        (["--kv-dtype", "fp8"], 2, "invalid choice: 'fp8'"),
        (["--policies", "group", "--rank", "99"], 2, "rank 99 is not between"),
        (["--policies", "group", "--rank", "8", "--adapter", "/no/such/adapter"], 1, "/no/such/adapter"),
        (["--model", "/no/such/model"], 1, "no such model"),
    ],
)
def test_bad_flags(run: Run, flags: list[str], code: int, message: str) -> None:
    got, out, err, report = run(*flags)
    assert got == code
    assert message in err
    assert (out, report) == ("", None)


def test_an_interrupted_run_goes_on(
    run: Run, benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is measured again only if it may be another now; a whole report leaves nothing behind."""
    shapes = importlib.import_module("benchmark_shapes")
    measured, interleave = [], shapes.interleave

    def interrupted(contenders: Any, work: Any, *how: Any) -> Any:
        measured.append(len(work.prompts[0]))
        if len(measured) == 2:
            raise KeyboardInterrupt
        return interleave(contenders, work, *how)

    monkeypatch.setattr(shapes, "interleave", interrupted)
    flags = ["--policies", "resident", "--context", "6,8", "--steps", "1"]
    parts = tmp_path / "out.json.parts"
    code, _, err, report = run(*flags)
    assert (code, report, measured) == (130, None, [6, 8])
    assert "the same command goes on" in err
    assert len(list(parts.rglob("*.json"))) == 1
    code, _, _, report = run(*flags)
    assert (code, measured) == (0, [6, 8, 8])
    assert [row["context"] for row in report["rows"]] == [6, 8]
    assert report["notes"] == ["1 measurements are those of an earlier run that was interrupted"]
    assert not parts.exists()
    assert run(*flags)[3]["notes"] == []
    assert measured == [6, 8, 8, 6, 8]


@pytest.mark.parametrize("change", ["flag", "fresh", "code", "machine", "damage"])
def test_what_was_kept_is_never_stale(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    kept_runs = importlib.import_module("kept_runs")
    measured = []

    def get(kept: Any, key: dict[str, Any]) -> dict[str, Any]:
        return kept.get("shapes", key, lambda: measured.append(1) or {"rows": [len(measured)]})

    for expected in (1, 1):
        kept = kept_runs.KeptRuns(tmp_path / "o.json", {"model": "m"}, fresh=False)
        assert get(kept, {"context": 1}) == {"rows": [expected]}
    common = {"model": "other" if change == "flag" else "m"}
    if change == "code":
        monkeypatch.setattr(kept_runs, "code_digest", lambda: "other")
    if change == "machine":
        monkeypatch.setenv("XLA_FLAGS", "--other")
    if change == "damage":
        (path,) = kept.directory.rglob("*.json")
        path.write_bytes(path.read_bytes()[:-5])
    kept = kept_runs.KeptRuns(tmp_path / "o.json", common, fresh=change == "fresh")
    assert get(kept, {"context": 1}) == {"rows": [2]}
    assert kept.reused == 0
    kept.forget()
    assert not kept.directory.exists()


def test_plots_and_several_disks(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--policies", "resident", "--context", "6,8", "--steps", "1", "--breakdown", "1"]
    flags += ["--storage-profile", "own,nvme-1.8GBps", "--plots", str(tmp_path / "plots")]
    code, out, _, report = run(*flags)
    assert code == 0
    assert [(r["context"], r["storage_profile"]) for r in report["rows"]] == [
        (context, profile) for context in (6, 8) for profile in ("own", "nvme-1.8GBps")
    ]
    for row in report["rows"]:
        split = row["breakdown"]
        assert split["compute"] > 0
        assert split["predict"] is split["transfer"] is None
        assert split["compute"] + split["wait"] + split["host"] == pytest.approx(split["step_s"])
    names = [
        f"{what}-context-b1-{disk}.png"
        for what in ("memory", "throughput")
        for disk in ("own", "nvme-1.8GBps")
    ]
    names += [
        f"throughput-policies-{context}-{disk}.png" for context in (6, 8) for disk in ("own", "nvme-1.8GBps")
    ]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(names)
    assert "tokens/s against context, batch 1, disk own" in out
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err, _ = run(*flags)
    assert code == 2
    assert "swapkv-jax[plots]" in err
