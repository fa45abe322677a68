"""One ahead-of-time compiled graph, and what it takes in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from swapkv_jax.interrupts import checkpoint
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


@dataclass(frozen=True)
class GraphSpec:
    """What a graph computes, of arguments (pytrees of `Shape`) of which `donate` come back and `host` lie in pinned
    host memory; not compiled yet."""

    name: str
    function: Callable[..., Any]
    arguments: Sequence[Any]
    donate: Sequence[int]
    host: Sequence[int] = ()

    def jit(self) -> Any:
        """The jitted function, of any placement."""
        # keep_unused: a donated buffer may be needed for its memory alone.
        return jax.jit(self.function, donate_argnums=tuple(self.donate), keep_unused=True)

    def trace(self, sharding: jax.sharding.Sharding) -> jax.stages.Traced:
        """Traced for arguments that lie on `sharding`, whose device need not be at hand."""
        pinned = sharding.with_memory_kind("pinned_host") if self.host else sharding

        def place(argument: Any, sharding: jax.sharding.Sharding) -> Any:
            return jax.tree.map(lambda a: Shape(a.shape, a.dtype, sharding=sharding), argument)

        return self.jit().trace(
            *(place(a, pinned if i in self.host else sharding) for i, a in enumerate(self.arguments))
        )

    @property
    def argument_bytes(self) -> int:
        """Bytes of all arguments on the device, without any padding."""
        return sum(map(_tree_bytes, self.arguments)) - self.host_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the arguments in pinned host memory."""
        return sum(_tree_bytes(self.arguments[i]) for i in self.host)


def _tree_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


GraphMaker = Callable[..., Any]
"""What a program makes its graphs with: `Graph` compiles them, `GraphSpec` only describes them."""


class Graph:
    """One ahead-of-time compiled function. Calling it with other shapes raises instead of compiling."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        donate: Sequence[int],
        host: Sequence[int] = (),
    ):
        self.name = name
        checkpoint()
        spec = GraphSpec(name, function, arguments, donate, host)
        self._compiled = spec.trace(device_sharding()).lower().compile()
        self._arguments, self._host = spec.argument_bytes, spec.host_bytes

    def __call__(self, *arguments: Any) -> Any:
        return self._compiled(*arguments)

    @property
    def memory(self) -> CompiledBytes:
        stats = self._compiled.memory_analysis()
        assert stats is not None, "the backend gives no memory analysis"
        counted_apart = stats.host_argument_size_in_bytes > 0  # not on a CPU
        return CompiledBytes(
            name=self.name,
            planned_arguments=self._arguments,
            arguments=stats.argument_size_in_bytes - (0 if counted_apart else self._host),
            temporaries=stats.temp_size_in_bytes,
            outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        )


def scalar(value: int) -> np.ndarray:
    """An int32 scalar, the one form the graphs take."""
    return np.asarray(value, np.int32)
