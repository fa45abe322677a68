"""Commands that get a signal at moments spread over all they do: each ends with one line, and nothing is lost."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli import Runner, decode_command, heeding_interrupts

from swapkv_jax.store import main as store

_COMPLETE = "complete"  # the signal came when all was done, and changed nothing

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_programs")]


def _handles_signals(process: subprocess.Popen[str]) -> bool:
    """Whether it handles SIGTERM, which Python itself does not: `run_command` has been reached. What comes before it,
    Python's own start and the search for the module, ends as Python has it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (caught,) = re.findall(r"SigCgt:\s*([0-9a-f]+)", status) or ["0"]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def _run(command: list[str], after: float | None, number: signal.Signals) -> tuple[int, str, float]:
    """Sends the signal that many seconds (None: never) after signals are handled. Exit code, stderr, and the seconds
    from then on that the command took."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not _handles_signals(process):
            time.sleep(0.001)
        begun = time.perf_counter()
        if after is not None:
            time.sleep(after)
            process.send_signal(number)
        _, err = process.communicate(timeout=300)
    return process.returncode, err, time.perf_counter() - begun


def _how_it_ended(code: int, err: str, number: signal.Signals, complete: set[int]) -> str:
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    lines = [line for line in err.splitlines() if "interrupted" in line]
    if not lines:
        assert code in complete, err
        return _COMPLETE
    assert code == (143 if number == signal.SIGTERM else 1), err
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "number", "moments"),
    [
        (["--session", "fox", "--max-new-tokens", "180"], signal.SIGINT, 40),
        (["--tier", "disk", "--max-new-tokens", "60"], signal.SIGTERM, 20),
    ],
)
def test_decode_at_any_moment(
    tiny_llama: Path, tmp_path: Path, run: Runner, flags: list[str], number: signal.Signals, moments: int
) -> None:
    command = decode_command(tiny_llama, "--quiet", "--prompt", "the quick brown fox", "--ignore-eos", *flags)
    report, directory = tmp_path / "whole.json", tmp_path / "whole"
    command += ["--report", str(report), "--store-dir"]
    with heeding_interrupts():
        code, err, span = _run([*command, str(directory)], None, number)
        assert (code, err) == (0, "")
        whole = json.loads(report.read_text())
        ends = []
        for moment in range(moments):
            report.unlink(missing_ok=True)
            directory = tmp_path / "store"  # one for all: what one leaves the next must do with
            code, err, _ = _run([*command, str(directory)], span * moment / moments, number)
            ends.append(_how_it_ended(code, err, number, {0}))
            assert report.exists() == (ends[-1] == _COMPLETE)
            if "--session" in flags:
                _check_session(run, directory, whole)
            else:
                assert not list(directory.glob("*.kv*"))
    kinds = {kind: ends.count(kind) for kind in set(ends)}
    at_once = kinds.get("swapkv-decode: interrupted", 0)
    later = sum(kinds.values()) - at_once - kinds.get(_COMPLETE, 0)
    assert at_once >= moments / 8, kinds  # at the start
    assert later >= moments / 8, kinds  # in the middle
    assert len(kinds) <= 3, kinds


def _check_session(run: Runner, directory: Path, whole: dict) -> None:
    """What is stored is intact, and holds a beginning of what an uninterrupted run decoded; forgets it."""
    if not (directory / "catalog.sqlite").exists():
        return
    common = ["--store-dir", str(directory), "--quiet"]
    assert store([*common, "verify"]) == 0
    run.capfd.readouterr()
    assert store([*common, "list", "--json"]) == 0
    sessions = json.loads(run.capfd.readouterr()[0])["sessions"]
    for session in sessions:
        (prompt,) = whole["prompt_tokens"]
        assert prompt <= session["tokens"] <= prompt + 180
        decoded = session["tokens"] - prompt
        expected = whole["generated"][0]["token_ids"][decoded : decoded + 2]
        arguments = ["--session", "fox", "--ignore-eos", "--max-new-tokens", "2", "--max-context", "256"]
        report = run(*arguments, "--store-dir", str(directory))[3]
        assert report["generated"][0]["token_ids"][: len(expected)] == expected
        assert store([*common, "delete", "fox"]) == 0
        run.capfd.readouterr()


@pytest.mark.parametrize(
    ("arguments", "complete"),
    [
        (["swapkv_jax.store", "--store-dir", "none-such", "list"], {2}),
        (["swapkv_jax.planner", "--model", "llama-3.1-8b", "--device", "l4"], {0, 1}),
        (["swapkv_jax.resources"], {0}),
    ],
)
def test_other_commands_at_any_moment(arguments: list[str], complete: set[int]) -> None:
    command = [sys.executable, "-m", *arguments]
    with heeding_interrupts():
        _, _, span = _run(command, None, signal.SIGINT)
        ends = []
        for moment in range(10):
            code, err, _ = _run(command, span * moment / 10, signal.SIGINT)
            ends.append(_how_it_ended(code, err, signal.SIGINT, complete))
    assert f"python -m {arguments[0]}: interrupted" in ends
