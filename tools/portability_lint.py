"""What a graph's jaxpr must not contain, by platform: found before any compiler is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

_LOOPS = ("scan", "while")
_OUTSIDE = ("debug_print", "infeed", "outfeed")
# What a kernel does inside is its own: its loops and memory spaces are not XLA's.
_KERNELS = ("pallas_call", "core_map", "mpmd_map")


def lint(jaxpr: Any, platform: str) -> list[str]:
    """What is wrong with the closed jaxpr of a decode graph on `platform` ("cpu", "tpu" or "cuda"), in words.

    Nowhere: callbacks into Python, shapes that depend on data. On a GPU neither loops, which XLA doesn't capture in a
    command buffer, nor host memory, whose copies would divide one. Of branches by platform only the one that would
    be compiled counts.
    """
    return list(dict.fromkeys(_walk(jaxpr.jaxpr, platform)))


def _walk(jaxpr: Any, platform: str) -> Iterator[str]:
    variables = [*jaxpr.invars, *jaxpr.constvars]
    if platform == "cuda" and any(_on_host(variable.aval) for variable in variables):
        yield "an argument in host memory"
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if "callback" in name or name in _OUTSIDE:
            yield f"host callback ({name})"
        if any(not isinstance(size, int) for v in equation.outvars for size in getattr(v.aval, "shape", ())):
            yield f"dynamic shape ({name})"
        if platform == "cuda":
            if name in _LOOPS:
                yield f"loop ({name}), which no command buffer takes: unroll it, or scatter"
            if name == "device_put" and any(map(_leaves_device, equation.params["devices"])):
                yield f"host-memory transfer ({name})"
            elif any(_on_host(v.aval) for v in equation.outvars) or _computes_on_host(equation):
                yield f"host memory ({name})"
        if name in _KERNELS or name.startswith("mosaic"):
            continue
        for inner in _inner(equation, platform):
            yield from _walk(inner, platform)


def _inner(equation: Any, platform: str) -> Iterator[Any]:
    """The jaxprs inside an equation; of branches by platform the one for `platform`."""
    by_platform = equation.params.get("branches_platforms")
    if by_platform is None:
        yield from _jaxprs(tuple(equation.params.values()))
        return
    chosen = [i for i, names in enumerate(by_platform) if names is None or platform in names]
    if chosen:
        yield from _jaxprs(equation.params["branches"][chosen[0]])


def _jaxprs(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs(item)
    elif hasattr(value, "eqns"):
        yield getattr(value, "jaxpr", value)  # closed jaxprs have both


def _on_host(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def _leaves_device(device: Any) -> bool:
    """Whether a `device_put` names a memory to move to: in a graph of device memory alone none would."""
    kind = getattr(device, "memory_kind", None)
    return isinstance(device, jax.memory.Space) or kind not in (None, "device")


def _computes_on_host(equation: Any) -> bool:
    return "host" in str(getattr(equation.ctx, "compute_type", None) or "")
