"""Ctrl-C and SIGTERM: held back, raised where nothing is half done, and the end of a command at any moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from cli import heeding_interrupts

from swapkv_jax.interrupts import (
    Terminated,
    checkpoint,
    exit_code,
    interruptible,
    interrupts_at_checkpoints,
    interrupts_deferred,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
both = pytest.mark.parametrize("number", SIGNALS)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Whatever a test does, the suite's own handlers are the same after it."""
    with heeding_interrupts():
        before = [signal.getsignal(number) for number in SIGNALS]
        yield
        assert [signal.getsignal(number) for number in SIGNALS] == before


def _kind(number: signal.Signals) -> type[KeyboardInterrupt]:
    return Terminated if number == signal.SIGTERM else KeyboardInterrupt


@both
def test_a_checkpoint_raises_what_was_held_back(number: signal.Signals) -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt) as raised:  # noqa: PT012 - where it is raised is what is tested
        with interrupts_at_checkpoints():
            checkpoint()
            signal.raise_signal(number)
            reached.append("after the signal")
            checkpoint()
            reached.append("after the checkpoint")
    assert raised.type is _kind(number)
    assert reached == ["after the signal"]
    checkpoint()  # raises it no more


def test_one_checkpoint_raises_however_many_came() -> None:
    with interrupts_at_checkpoints():
        for number in (*SIGNALS, *SIGNALS):
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            checkpoint()
        checkpoint()


def test_without_a_checkpoint_the_work_is_done() -> None:
    with interrupts_at_checkpoints():
        signal.raise_signal(signal.SIGINT)
    checkpoint()


@both
def test_who_will_not_wait_need_not(number: signal.Signals) -> None:
    with patch("swapkv_jax.interrupts.AGAIN_S", 0.0), interrupts_at_checkpoints():
        signal.raise_signal(signal.SIGINT)  # the first one never
    with patch("time.monotonic", side_effect=[10.0, 10.9, 11.1]):
        with pytest.raises(KeyboardInterrupt) as raised:  # noqa: PT012
            with interrupts_at_checkpoints():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(number)  # as `timeout` does
                signal.raise_signal(number)
    assert raised.type is _kind(number)


@both
def test_deferred_to_the_end_of_a_block(number: signal.Signals) -> None:
    reached = []
    with pytest.raises(_kind(number)):  # noqa: PT012
        with interruptible():
            with interrupts_deferred():
                signal.raise_signal(number)
                reached.append("in the block")
            reached.append("after it")
    assert reached == ["in the block"]


def test_deferred_among_checkpoints_waits_for_one() -> None:
    with interrupts_at_checkpoints():
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            checkpoint()  # none of the block's
        with pytest.raises(KeyboardInterrupt):
            checkpoint()


def test_an_error_supersedes_what_was_deferred() -> None:
    with pytest.raises(ValueError, match="of the block"):  # noqa: PT012
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("of the block")


def test_other_threads_neither_hold_nor_raise() -> None:
    passed = []

    def work() -> None:
        with interrupts_at_checkpoints(), interrupts_deferred(), interruptible():
            checkpoint()
        passed.append(True)

    with interrupts_at_checkpoints():
        signal.raise_signal(signal.SIGINT)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert passed
        with pytest.raises(KeyboardInterrupt):
            checkpoint()


def test_exit_codes() -> None:
    assert exit_code(KeyboardInterrupt()) == 1
    assert exit_code(Terminated()) == 143


# ---- a command in a process of its own -------------------------------------------------------------------


_BEGINNING = """
import os, signal, sys, time
from swapkv_jax.interrupts import checkpoint, exit_code, interrupts_at_checkpoints, run_command

def ready():
    print("ready", flush=True)
    time.sleep({pause})
"""


def _run(
    script: str, numbers: list[signal.Signals], shell: str = "", pause: float = 60
) -> tuple[int, str, str]:
    """Sends a signal each time the script is `ready`. Returns exit code, the rest of stdout, and stderr."""
    command = [sys.executable, "-c", _BEGINNING.format(pause=pause) + script]
    if shell:
        command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for number in numbers:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@both
def test_a_command_with_nothing_to_lose_leaves_at_once(number: signal.Signals) -> None:
    script = "run_command('it', ready)"
    assert _run(script, [number]) == (143 if number == signal.SIGTERM else 1, "", "it: interrupted\n")


def test_not_even_a_destructor_swallows_it() -> None:
    script = """
class Thing:
    def __del__(self):
        ready()

def main():
    Thing()
    return 0

run_command("it", main)
"""
    assert _run(script, [signal.SIGINT]) == (1, "", "it: interrupted\n")


def test_a_checkpoint_of_a_command() -> None:
    script = """
def main():
    try:
        with interrupts_at_checkpoints():
            ready()
            print("went on", flush=True)
            checkpoint()
    except KeyboardInterrupt as stop:
        print("stopped", flush=True)
        return exit_code(stop)
    return 0

run_command("it", main)
"""
    assert _run(script, [signal.SIGTERM], pause=1) == (143, "went on\nstopped\n", "")


@pytest.mark.parametrize("code", [0, 3])
def test_python_winds_down_undisturbed(code: int) -> None:
    script = f"import atexit; atexit.register(ready); run_command('it', lambda: {code})"
    assert _run(script, [signal.SIGINT], pause=0.3) == (code, "", "")


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_reader_that_leaves(size: int) -> None:
    script = f"run_command('it', lambda: print('x' * {size}) or 0)"
    command = [sys.executable, "-c", _BEGINNING.format(pause=0) + f"sys.stdin.read(); {script}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        process.stdout.close()  # before the command goes on, which the end of its stdin makes it do
        process.stdout = None
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, b"")


def test_what_the_caller_ignores_stays_ignored() -> None:
    script = """
def main():
    ready()
    with interrupts_at_checkpoints():
        ready()
        checkpoint()
    return 0

run_command("it", main)
"""
    numbers = [signal.SIGINT, signal.SIGTERM]
    assert _run(script, numbers, shell="trap '' INT TERM", pause=0.3) == (0, "", "")
