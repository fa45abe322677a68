"""Where JAX's versions differ for kernels, and the interpreters that run them on any platform."""

from __future__ import annotations

import inspect
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu


def tpu_interpreter(*, detect_races: bool) -> Any:
    """Interprets TPU kernels with their memories and copies; scratch memory starts as NaN.

    Args:
      detect_races: whether a copy and an access that nothing orders make the call fail.
    """
    return pltpu.InterpretParams(detect_races=detect_races)


def gpu_interpreter(*, detect_races: bool) -> Any:
    """The same for Mosaic GPU kernels. JAX 0.10 has this interpreter, but does not export it."""
    params: Any = getattr(plgpu, "InterpretGPUParams", None)
    if params is None:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as params
    return params(detect_races=detect_races)


def load(ref: Any, at: tuple[Any, ...], layout: Any) -> jax.Array:
    """Reads `ref[at]` in a Mosaic GPU kernel into registers of `layout`, by plain loads if no better ones fit it."""
    if "idx" in inspect.signature(plgpu.load).parameters:  # JAX 0.10
        return plgpu.load(ref, at, layout=layout, optimized=False)
    return plgpu.load(ref.at[at], layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def store(ref: Any, at: tuple[Any, ...], value: jax.Array) -> None:
    """Writes `value` to `ref[at]` in a Mosaic GPU kernel, by plain stores if no better ones fit its layout."""
    put: Any = getattr(plgpu, "store", None)
    if put is None:  # JAX 0.10, whose assignments do so
        ref[at] = value
    else:
        put(ref.at[at], value, optimized=False)
