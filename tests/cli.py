"""The decode command, in the test's own process and in one that is sent signals."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from swapkv_jax.decode import main

_PAGE = 4096  # the least that a pipe can be made to hold
_ROOM = 32  # bytes of text that it then takes until the writer has to wait


def decode_command(model: Path, *arguments: str | Path) -> list[str]:
    """The command line that decodes with a model directory, in a process of its own."""
    return [sys.executable, "-m", "swapkv_jax.decode", "--model", str(model), "--raw", *map(str, arguments)]


@contextlib.contextmanager
def heeding_interrupts() -> Iterator[None]:
    """What is started in the block does not ignore SIGINT, as it would have it from a suite that was started in a
    script's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class Amid:
    """A command in the middle of its text. After the block of `amid_text` the rest is known, as of a subprocess."""

    process: subprocess.Popen[bytes]
    pipe: BinaryIO
    out: bytes = b""
    err: bytes = b""

    @property
    def code(self) -> int:
        return self.process.returncode


@contextlib.contextmanager
def amid_text(command: list[str]) -> Iterator[Amid]:
    """A command that has begun to write its text to stdout and cannot end before the block does, on however busy a
    machine: nobody reads what it writes, and there is not enough room for all of it."""
    read, narrow = os.pipe()
    fcntl.fcntl(narrow, fcntl.F_SETPIPE_SZ, _PAGE)
    filling = bytes(_PAGE - _ROOM)
    os.write(narrow, filling)
    with heeding_interrupts(), open(read, "rb") as pipe:
        with subprocess.Popen(command, stdout=narrow, stderr=subprocess.PIPE) as process:
            os.close(narrow)
            while _readable(read) == len(filling) and process.poll() is None:
                time.sleep(0.01)
            amid = Amid(process, pipe)
            yield amid
            if not pipe.closed:
                amid.out = pipe.read()[len(filling) :]
            _, amid.err = process.communicate(timeout=300)


def stopped(command: list[str], number: signal.Signals) -> tuple[int, str]:
    """Sends a signal to a command that is in the middle of its text. Returns its exit code and stderr."""
    with amid_text(command) as amid:
        amid.process.send_signal(number)
    return amid.code, amid.err.decode()


def _readable(descriptor: int) -> int:
    """Bytes that are in a pipe."""
    (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return count


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
