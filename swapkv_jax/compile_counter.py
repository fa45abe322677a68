"""Counts what XLA compiles in this process, to show that decode compiles nothing."""

from __future__ import annotations

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _count
    if event == _EVENT:
        _count += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def compiles() -> int:
    """Compilations since this module was imported."""
    return _count
