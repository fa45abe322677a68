"""Ctrl-C and SIGTERM: a command that gets one ends at a place where nothing is half done, with one line and no
traceback.

A KeyboardInterrupt that Python raises wherever it happens to be can come out of a library's native code as a crash,
or be swallowed by a destructor or a callback of the garbage collector. So a command leaves at once while it has
nothing to lose (`run_command`), and later holds the signal back until the next `checkpoint`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

AGAIN_S = 1.0
"""Seconds after the first signal from which another one means at once. GNU's `timeout` sends two in a row."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_Handler = Callable[[int, FrameType | None], Any] | signal.Handlers
_held: list[int] = []  # came in `interrupts_at_checkpoints`, and no checkpoint has raised them yet


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is handled as Ctrl-C is."""


def exit_code(stop: KeyboardInterrupt) -> int:
    """What a command ends with: 1 after Ctrl-C, 143 after SIGTERM, which is 128 + 15 as supervisors know it."""
    return 128 + signal.SIGTERM if isinstance(stop, Terminated) else 1


def run_command(name: str, main: Callable[[], int]) -> NoReturn:
    """Runs a command's `main` and ends the process with the exit code that it returns.

    Ctrl-C and SIGTERM end the process at once, with a line on stderr, but for what `main` does in
    `interrupts_at_checkpoints` or `interruptible`. Once `main` is done they are ignored: what is done is done, and
    Python winds down undisturbed. Where whoever read stdout has left, the exit code is 1.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{name}: interrupted\n".encode())
        os._exit(exit_code(_exception(number)))

    _handle(leave)
    try:
        code = main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would complain once more at exit
        code = 1
    finally:
        _handle(signal.SIG_IGN)
    sys.exit(code)


def checkpoint() -> None:
    """Raises the Ctrl-C or SIGTERM that `interrupts_at_checkpoints` has held back, if there is one. For places where
    nothing is half done, on the way of whatever takes long."""
    if _held and _in_main_thread():
        number = _held[0]
        _held.clear()
        raise _exception(number)


@contextlib.contextmanager
def interrupts_at_checkpoints() -> Iterator[None]:
    """Ctrl-C and SIGTERM during the block are raised by the next `checkpoint`, and one that comes `AGAIN_S` after the
    first at once. Where no checkpoint follows, the block has done its work and they are forgotten."""
    first: float | None = None

    def hold(number: int, _frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
        elif now - first >= AGAIN_S:
            raise _exception(number)
        _held.append(number)

    with _handled(hold):
        try:
            yield
        finally:
            if _in_main_thread():
                _held.clear()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM are raised at once, wherever the block is, so that it cleans up."""
    with _handled(_raise):
        yield


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C and SIGTERM during the block count as if they came at its end; an exception from it supersedes them."""
    arrived: list[int] = []
    with _handled(lambda number, _frame: arrived.append(number)):
        yield
    for number in arrived[:1]:
        signal.raise_signal(number)


@contextlib.contextmanager
def _handled(handler: _Handler) -> Iterator[None]:
    before = _handle(handler)
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def _handle(handler: _Handler) -> dict[signal.Signals, _Handler]:
    """Sets the signals' handler and returns what it was. One that is ignored stays ignored: the command was started
    with nohup, or in the background of a script."""
    if not _in_main_thread():
        return {}  # only the main thread may set handlers
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    ours = {n: was for n, was in before.items() if was is not None and was is not signal.SIG_IGN}
    for number in ours:
        signal.signal(number, handler)
    return ours  # type: ignore[return-value]  (what is an int in the stubs is a signal.Handlers)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _exception(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    raise _exception(number)
