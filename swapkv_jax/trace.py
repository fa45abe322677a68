"""What a few steps of decode did when, as a file for Perfetto or chrome://tracing.

The device's and XLA's lanes, graphs and transfers, are JAX's own profile. Reads, writes and waits of the tiers, which
the kernel works on without a thread to be seen, are added on lanes of their own.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax

TRACED_STEPS = 8
_PROCESS = 1 << 30  # no process has so high a number
_ORIGIN = "swapkv_jax: clocks meet here"


Step = TypeVar("Step")
_Span = tuple[str, str, float, float]  # lane, what, begin, end in seconds of `time.perf_counter`
_recording: list[_Span] | None = None


def span(lane: str, what: str, begin: float, end: float) -> None:
    """Records that `what` took from `begin` to `end` (`time.perf_counter`), if a trace is being made. Spans of one
    lane must not overlap. May be called from any thread."""
    if _recording is not None:
        _recording.append((lane, what, begin, end))


def traced(steps: Iterator[Step], path: Path | None, most: int = TRACED_STEPS) -> Iterator[Step]:
    """The same steps; the first `most` of them go into a trace at `path`, gzipped if that ends in .gz. Without a path
    nothing is traced. One trace at a time in a process.

    Raises:
      OSError: it cannot be written.
    """
    if path is None:
        yield from steps
        return
    with tempfile.TemporaryDirectory(prefix="swapkv-trace-") as directory:
        with _recorded(Path(directory)) as (spans, origin):
            for number in range(most):
                with jax.profiler.StepTraceAnnotation("step", step_num=number):
                    step = next(steps, None)
                if step is None:
                    break
                yield step
        (profile,) = Path(directory).rglob("*.trace.json.gz")
        trace: dict[str, Any] = json.loads(gzip.decompress(profile.read_bytes()))
    events = trace["traceEvents"]
    (met,) = (event for event in events if event.get("name") == _ORIGIN)
    events += _chrome_events(spans, met["ts"] - origin * 1e6)
    data = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    yield from steps


@contextmanager
def _recorded(directory: Path) -> Iterator[tuple[list[_Span], float]]:
    """JAX's profile into `directory`, our spans into the list, and when on our clock the profile has `_ORIGIN`."""
    global _recording
    _recording = spans = []
    jax.profiler.start_trace(directory)
    try:
        with jax.profiler.TraceAnnotation(_ORIGIN):
            origin = time.perf_counter()
        yield spans, origin
    finally:
        _recording = None
        jax.profiler.stop_trace()


def _chrome_events(spans: list[_Span], offset: float) -> Iterator[dict[str, Any]]:
    """The spans as events of the trace format, times in microseconds."""
    lanes = {lane: i for i, lane in enumerate(sorted({lane for lane, *_ in spans}), start=1)}
    yield {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "tiers"}}
    for lane, thread in lanes.items():
        yield {"ph": "M", "pid": _PROCESS, "tid": thread, "name": "thread_name", "args": {"name": lane}}
    for lane, what, begin, end in spans:
        yield {
            "ph": "X",
            "pid": _PROCESS,
            "tid": lanes[lane],
            "name": what,
            "ts": begin * 1e6 + offset,
            "dur": (end - begin) * 1e6,
        }
