"""Peers of tools/benchmark.py: they decode what our engines do, from the same prefill, under every setting."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import tiny_checkpoint
from tool_runs import Outcome, run_tool, small_benchmark

from swapkv_jax import load_model
from swapkv_jax.models.gguf_file import GGUFFile
from swapkv_jax.models.gguf_loader import geometry_from_gguf, load_gguf_weights

STEPS = 3
NAMES = ["llama", "llama-untied-bias", "mistral", "qwen2", "qwen3-bias"]
Run = Callable[..., Outcome]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return small_benchmark(monkeypatch)


@pytest.fixture
def run(benchmark: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    def run(name: str, *flags: str) -> Outcome:
        out = tmp_path / "out.json"
        base = ["--model", str(tiny_checkpoint(name, tmp_path / name)), "--context", "70", "--batch", "2"]
        base += ["--policies", "resident", "--steps", str(STEPS), "--burst", "1", "--breakdown", "0"]
        return run_tool(
            benchmark.main,
            [*base, "--store-dir", str(tmp_path / "s"), "--json", str(out), *flags],
            out,
            capfd,
        )

    return run


@pytest.mark.parametrize(
    ("name", "prefill"), [*((name, "once") for name in NAMES), ("llama", "real"), ("llama", "random")]
)
@pytest.mark.parametrize(("peer", "module"), [("transformers", "torch"), ("llama-cpp", "llama_cpp")])
@pytest.mark.filterwarnings("ignore")  # the peers' own
def test_a_peer_decodes_the_same(run: Run, name: str, peer: str, module: str, prefill: str) -> None:
    """Whatever computed the prefill: keys and values that are handed over must be in the peer's own order."""
    pytest.importorskip(module)
    code, out, _, report = run(name, "--peers", peer, "--prefill", prefill)
    assert code == 0
    if (name, peer) == ("qwen3-bias", "llama-cpp"):  # biases that its Qwen3 does not have
        assert "does not load" in report["skipped"][peer]
        return
    ours, *peers = report["rows"]
    ours_alike = [row for row in [*peers, *report["trials"]] if row["precision"] == "float32"]
    assert len(ours_alike) == 1 + 2  # the fastest of two settings, and both in their trial
    for row in ours_alike:
        assert (row["peer"], row["policy"], row["tier"]) == (peer, None, None)
        assert row["kv_bytes"]["device"] > 0
        assert (row["ttft_s"] is None) == (prefill != "real")
    for row in (row for row in peers if row["precision"] == "float32"):
        assert row["tokens_as_first"] == ours["tokens_as_first"] == 3 + STEPS
        assert row["floor_s"] > 0
    taken = [row["setting"] for row in report["trials"] if row["taken"]]
    assert taken == [row["setting"] for row in peers]
    assert "takes part" in out


@pytest.mark.filterwarnings("ignore")
def test_settings_that_cannot_run_are_named(run: Run) -> None:
    pytest.importorskip("torch")
    skipped = run("llama", "--peers", "transformers", "--prefill", "random")[3]["skipped"]
    assert skipped.keys() == {"transformers offloaded"}
    assert "CUDA" in skipped["transformers offloaded"]


def test_the_fastest_of_each_precision_takes_part(benchmark: ModuleType) -> None:
    peer_decode, peers, contenders = (
        importlib.import_module(name) for name in ("peer_decode", "peers", "contenders")
    )
    clock = SimpleNamespace(now=0.0)

    class Timed:
        def __init__(self, seconds: float):
            self.seconds, self.kv_bytes = seconds, 1

        def prefill(self, prompts: Any) -> list[int]:
            return [0]

        def step(self, tokens: Any) -> list[int]:
            clock.now += self.seconds
            return [0]

        def close(self) -> None: ...

    def setting(name: str, precision: str) -> Any:
        return peers.Setting(
            name=name, precision=precision, kv_dtype=precision, weight_bytes=1, token_bytes=1
        )

    takes = {"a": 3.0, "b": 2.0, "c": 5.0, "d": 1.0}
    settings = [setting(name, "float32" if name in "ab" else "bfloat16") for name in takes]

    def open_run(setting: Any, batch: int, capacity: int) -> Timed:
        if setting.name == "c":
            raise peers.PeerUnavailable("no room")
        return Timed(takes[setting.name])

    peer = SimpleNamespace(version="1", settings=settings, skipped={}, open=open_run)
    work = contenders.Workload(prompts=[[1, 2]], new_tokens=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_decode.time, "perf_counter", lambda: clock.now)
        steps = importlib.import_module("rounds").Steps(timed=2, burst=1)
        found = peer_decode.choose_settings({"p": peer}, 1, 9, work, steps, dtype="float32")
    assert [(name, setting.name) for name, setting in found.settings] == [("p", "b"), ("p", "d")]
    assert {row["steps"] for row in found.trials} == {2}
    assert [(row["setting"], row["tpot_s"], row["taken"]) for row in found.trials] == [
        ("a", 3.0, False),
        ("b", 2.0, True),
        ("d", 1.0, True),
    ]
    assert found.skipped == {"p c": "skipped (no room)"}


# ---- what llama.cpp reads ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_weights_written_for_llama_cpp_read_back_the_same(
    benchmark: ModuleType, name: str, tmp_path: Path
) -> None:
    gguf_out = importlib.import_module("gguf_out")
    model = load_model(str(tiny_checkpoint(name, tmp_path / "model")))
    sizes = {kind: gguf_out.write_gguf(model, tmp_path / f"{kind}.gguf", kind) for kind in ("F32", "Q4_1")}
    exact = GGUFFile(tmp_path / "F32.gguf")
    geometry = geometry_from_gguf(exact)
    weights, _ = load_gguf_weights(exact, geometry, "float32")
    flat = [
        ("", {k: v for k, v in model.weights.items() if k != "layers"}),
        *enumerate(model.weights["layers"]),
    ]
    for where, tensors in flat:
        read = weights if where == "" else weights["layers"][where]
        for key, tensor in tensors.items():
            np.testing.assert_array_equal(read[key], tensor, err_msg=f"{key} of layer {where}")
    for field in (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "vocab",
        "tied",
        "norm_eps",
        "rope_theta",
    ):
        assert getattr(geometry, field) == pytest.approx(getattr(model.geometry, field))
    assert sizes["Q4_1"] < 0.4 * sizes["F32"]
    coarse = load_gguf_weights(GGUFFile(tmp_path / "Q4_1.gguf"), geometry, "float32")[0]
    embed = model.weights["embed"]
    assert np.abs(coarse["embed"] - embed).max() < 0.1 * np.abs(embed).max()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_saved_sequence_has_its_parts_in_order(benchmark: ModuleType, transposed: bool) -> None:
    state = importlib.import_module("llama_state").SequenceState(
        rows=3, layers=2, width=4, dtype=np.dtype(np.float16), transposed=transposed
    )
    blob, ks, vs = state.empty(1, 5, b"magic")
    rng = np.random.default_rng(0)
    for part in (*ks, *vs):
        assert part.shape == ((4, 5) if transposed and part is not ks[0] and part is not ks[1] else (5, 4))
        part[...] = rng.standard_normal(part.shape)
    cells = b"".join(struct.pack("<iIi", position, 1, 1) for position in range(5))
    expected = b"magic" + struct.pack("<III", 3, 0, 5) + cells + struct.pack("<II", transposed, 2)
    expected += b"".join(struct.pack("<iQ", 1, 8) + k.tobytes() for k in ks)
    head = struct.pack("<iII", 1, 2, 4) if transposed else struct.pack("<iQ", 1, 8)
    expected += b"".join(head + v.tobytes() for v in vs) + struct.pack("<I", 0)
    assert blob.tobytes() == expected
    assert state.header(blob, 1, 5) == b"magic"
    assert state.header(blob, 0, 5) is None
    assert state.header(blob[:-1], 1, 5) is None
    assert state.header(np.frombuffer(json.dumps({}).encode(), np.uint8), 1, 5) is None
