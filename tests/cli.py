"""The decode command run in the test's own process."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swapkv_jax.decode import main


def interrupted(command_of: Callable[[int], Sequence[str]]) -> tuple[int, str]:
    """Sends SIGINT to a command once its first text is out, and returns the attempt and its stderr. On a busy machine
    a command may end before the signal arrives: then another attempt is made, whose number `command_of` gets."""
    # A suite started in a shell's background ignores interrupts, and so would its children; what is handled here is
    # not ignored there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for attempt in range(8):
        with subprocess.Popen(command_of(attempt), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        if process.returncode != 0:
            assert process.returncode == 1
            return attempt, err.decode()
    pytest.fail("decode ended before the signal arrived, each time: give it more tokens")


@dataclass(frozen=True)
class Runner:
    """Runs the command with a model, a store and a report of the test's own."""

    model: Path
    directory: Path
    capfd: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str, own_model: bool = False) -> tuple[int, str, str, Any]:
        """Returns exit code, stdout, stderr, and the report or None. `own_model`: the arguments name one."""
        report = self.directory / "report.json"
        report.unlink(missing_ok=True)
        common = ["--store-dir", str(self.directory / "store"), "--report", str(report)]
        if not own_model:
            common += ["--model", str(self.model), "--raw"]
        try:
            code = main([*common, *arguments])
        except SystemExit as exit_:  # argparse's own errors
            code = int(exit_.code or 0)
        out, err = self.capfd.readouterr()
        return code, out, err, json.loads(report.read_text()) if report.exists() else None
