"""What the decode command is given and cannot use: flags, plans, models. One line each, and nothing written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli import Runner


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt"),
        (["--prompt", ""], "prompt 1 is empty"),
        (["--prompt", "hi", "--prompt", ""], "prompt 2 is empty"),
        (["--prompt-file", "/nonexistent"], "/nonexistent"),
        (["--prompt", "hi", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--prompt", "hi", "--max-new-tokens", "9999"], "lower --max-new-tokens to"),
        (["--prompt", "hi", "--max-context", "9999"], "use at most 256"),
        (["--prompt", "hi", "--max-context", "5"], "over the limit of 5"),
        (["--prompt", "hi", "--physical-layers", "1"], "at least 2"),
        (["--prompt", "hi", "--physical-layers", "99"], "use 2 to 4"),
        (["--prompt", "hi", "--cache", "resident", "--tier", "disk"], "contradicts"),
        (["--prompt", "hi", "--cache", "resident", "--physical-layers", "2"], "contradicts"),
        (["--prompt", "hi", "--cache", "nonsense"], "invalid choice"),
        (["--prompt", "hi", "--chat", "--raw"], "not allowed with"),
        (["--prompt", "hi", "--temperature", "-1"], "temperature must be"),
        (["--prompt", "hi", "--temperature", "1e-38"], "temperature must be"),
        (["--prompt", "hi", "--dry-run", "--temperature", "nan"], "temperature must be"),
        (["--prompt", "hi", "--cache", "group", "--tier", "dram", "--dram-memory", "64KiB"], "in DRAM too"),
        (["--prompt", "hi", "--cache", "group", "--physical-layers", "3"], "contradicts"),
        (["--prompt", "hi", "--plan", "x", "--max-context", "6"], "--max-context"),
        (["--prompt", os.fsdecode(b"\xff\xfe")], "not UTF-8"),
        (["--prompt", "hi", "--report", "/dev/null"], "regular file"),
        (["--prompt", "hi", "--top-p", "0.5"], "--temperature"),
        (["--prompt", "hi", "--temperature", "1", "--top-p", "1.5"], "top_p must be"),
        (["--prompt", "hi", "--temperature", "1", "--seed", "-1"], "seed must be"),
        (["--prompt", "hi", "--device-memory", "lots"], "'lots' is not a size"),
        (["--prompt", "hi", "--device-memory", "600KiB", "--cache", "resident"], "over the budget of 614400"),
        (["--prompt", "hi", "--tier", "dram", "--dram-memory", "1KiB"], "bytes over the budget of 1024 bytes"),
        (["--prompt", "hi", "--tier", "disk", "--disk-space", "1KiB"], "--disk-space"),
        (["--prompt", "hi", "--report", "/nonexistent/report.json"], "cannot write the report"),
        (["--prompt", "hi", "--plan", "/nonexistent.json"], "cannot read plan"),
        (["--prompt", "hi", "--tier", "disk", "--store-dir", "/proc/nowhere"], "--store-dir"),
    ],
)  # fmt: skip
def test_usage_errors(run: Runner, arguments: list[str], message: str) -> None:
    code, out, err, report = run(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert len([line for line in err.splitlines() if "error:" in line]) == 1
    assert out == ""
    assert report is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bogus": 1}, "unknown field `bogus`"),
        ({"layers": 30}, "its layers is 30, the model's 4"),
        ({"batch": "many"}, "Expected `int`"),
        ({"batch": 2}, "2 row(s)"),
        ({"max_context": 4}, "less than the"),
        ({"policy": "layer"}, "physical_layers must be at least 2"),
    ],
)
def test_plans_that_cannot_be_used(
    run: Runner, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    plan = json.loads(run("--prompt", "hi", "--max-new-tokens", "4", "--cache", "resident", "--dry-run")[1])
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**plan, **change}))
    code, _, err, _ = run("--prompt", "hi", "--max-new-tokens", "4", "--plan", str(file))
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def _truncate(directory: Path) -> Path:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return directory


def _unknown_architecture(directory: Path) -> Path:
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _corrupt_gguf(directory: Path) -> Path:
    path = directory / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)))
    return path


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda directory: directory / "missing", "no such model"),
        (_truncate, "model.safetensors"),
        (_corrupt_gguf, "model.gguf"),
        (_unknown_architecture, "mamba"),
    ],
)
def test_models_that_cannot_be_read(
    run: Runner, tiny_llama: Path, tmp_path: Path, spoil: Callable[[Path], Path], message: str
) -> None:
    source = spoil(Path(shutil.copytree(tiny_llama, tmp_path / "model")))
    code, out, err, report = run("--model", str(source), "--raw", "--prompt", "hi", own_model=True)
    assert code == 1
    assert message in err.lower()
    assert "Traceback" not in err
    assert out == ""
    assert report is None
