"""tools/tune.py: from flags to a plan file that decodes; what was interrupted goes on."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
from tiny import tiny_checkpoint

from swapkv_jax import rates
from swapkv_jax.plan_files import PlanFile, parse_plan


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The tool, with a cache of its own and little to measure."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(rates, "_MEMORY_BYTES", 4 << 20)
    monkeypatch.setattr("swapkv_jax.tuner.timing._MORE_THAN_CACHES", 1 << 20)
    return importlib.import_module("tune")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--memory", "1MiB", "--loss", "-1"], "not a positive number of nats"),
        (["--memory", "much"], "is not a size"),
        (["--memory", "1MiB", "--storage-profile", "floppy"], "floppy"),
        ([], "--memory"),
    ],
)
def test_bad_flags(
    tune: ModuleType, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        tune.main(flags)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_where_the_plan_cannot_be_written_is_said_first(
    tune: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "missing" / "plan.json"
    assert tune.main(["--memory", "1GiB", "--out", str(out), "--tables", str(tmp_path / "tables")]) == 2
    assert f"cannot write {out}; give --out a file" in capsys.readouterr().err
    assert not (tmp_path / "tables").exists(), "before anything was measured"


@pytest.mark.slow
def test_a_plan_is_tuned_checked_and_tuned_again_from_tables(
    tune: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("the rain in the west is on the eaves and in the halls " * 40)
    out = tmp_path / "plan.json"
    flags = [
        "--model",
        str(checkpoint),
        "--texts",
        str(text),
        "--context",
        "120",
        "--tokens",
        "12",
        "--quiet",
    ]
    flags += ["--batch", "2", "--max-context", "160", "--groups", "2,4", "--out", str(out)]
    flags += ["--tables", str(tmp_path / "tables"), "--store-dir", str(tmp_path / "store")]
    assert tune.main([*flags, "--memory", "2MiB", "--loss", "0.5", "--check"]) == 0
    shown = capsys.readouterr().out
    assert "within 25 %" in shown
    points = json.loads(shown.splitlines()[-1])
    assert len(points) >= 4
    assert all(point["measured_s"] > 0 for point in points)
    file = parse_plan(out.read_bytes(), str(out))
    assert isinstance(file, PlanFile)
    assert (file.status, file.plan.policy, file.plan.batch) == ("predicted", "group", 2)
    held, loss = file.predicted["held_bytes"], file.predicted["loss"]
    assert isinstance(held, int)
    assert isinstance(loss, float)
    assert held <= 2 << 20
    assert loss <= 0.5

    monkeypatch.setattr("swapkv_jax.tuner.replay.Replay.__init__", None)  # nothing is measured again
    monkeypatch.setattr("swapkv_jax.tuner.tune.time_graph", None)
    assert tune.main([*flags, "--memory", "2MiB", "--loss", "0.5"]) == 0
    again = parse_plan(out.read_bytes(), str(out))
    assert isinstance(again, PlanFile)
    assert (again.plan, again.predicted) == (file.plan, file.predicted)

    assert tune.main([*flags, "--memory", "1KiB", "--loss", "0.5"]) == 2
    assert "the smallest takes" in capsys.readouterr().err
