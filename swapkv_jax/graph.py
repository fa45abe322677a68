"""One ahead-of-time compiled graph, and what it takes in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from swapkv_jax.staging import device_sharding

Shape = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class CompiledBytes:
    """What XLA says of one graph, in bytes, beside what the plan says of its arguments."""

    name: str
    planned_arguments: int
    arguments: int
    temporaries: int
    outputs: int  # those that are not donated arguments coming back


class Graph:
    """One ahead-of-time compiled function. Calling it with other shapes raises instead of compiling."""

    def __init__(
        self, name: str, function: Callable[..., Any], arguments: Sequence[Any], donate: Sequence[int]
    ):
        self.name = name
        # keep_unused: a donated buffer may be needed for its memory alone.
        jitted = jax.jit(function, donate_argnums=tuple(donate), keep_unused=True)
        placed = jax.tree.map(lambda a: Shape(a.shape, a.dtype, sharding=device_sharding()), list(arguments))
        self._compiled = jitted.lower(*placed).compile()
        self._arguments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(placed))

    def __call__(self, *arguments: Any) -> Any:
        return self._compiled(*arguments)

    @property
    def memory(self) -> CompiledBytes:
        stats = self._compiled.memory_analysis()
        assert stats is not None, "the backend gives no memory analysis"
        return CompiledBytes(
            name=self.name,
            planned_arguments=self._arguments,
            arguments=stats.argument_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
            outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        )


def scalar(value: int) -> np.ndarray:
    """An int32 scalar, the one form the graphs take."""
    return np.asarray(value, np.int32)
