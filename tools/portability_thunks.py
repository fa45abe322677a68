"""What a GPU executable launches, read from XLA's dump of its thunks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MIN_GRAPH = 5  # XLA's own default: fewer launches than this are made one by one, and are no command buffer
_THUNK = re.compile(r"^( *)\d+: k(\w+)", re.MULTILINE)
_LAUNCHES = frozenset(
    {"Kernel", "CustomKernel", "Copy", "Memzero", "Memset32BitValue", "Gemm", "CublasLtMatmul"}
)
_GRAPH = "CommandBuffer"


@dataclass(frozen=True)
class Thunks:
    """`outside` are the kinds of the top level's thunks other than command buffers."""

    command_buffers: int
    outside: tuple[str, ...]
    launches: int

    @property
    def problem(self) -> str | None:
        """Why this is not one command buffer, nor so little that XLA launches it as it is; or None."""
        if self.command_buffers == 1 and not self.outside:
            return None
        alien = sorted({f"k{kind}" for kind in self.outside if kind not in _LAUNCHES})
        if self.command_buffers == 0 and not alien and len(self.outside) < MIN_GRAPH:
            return None
        beside = f" beside {', '.join(alien) or f'{len(self.outside)} launches'}" if self.outside else ""
        return f"{self.command_buffers} command buffers{beside}, not exactly one"


def read_thunks(dump: Path) -> Thunks:
    """The thunks of the one module dumped into a directory.

    Raises:
      FileNotFoundError: there is no such dump; XLA writes it under `--xla_dump_hlo_as_text`.
    """
    for pattern in ("*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt"):
        if found := sorted(dump.glob(pattern)):
            return parse_thunks(found[-1].read_text())
    raise FileNotFoundError(f"{dump} holds no thunk sequence")


def parse_thunks(text: str) -> Thunks:
    """The top level is what is not indented; what a loop or a command buffer holds is."""
    thunks = [(len(indent), kind) for indent, kind in _THUNK.findall(text)]
    return Thunks(
        command_buffers=sum(kind == _GRAPH for _, kind in thunks),
        outside=tuple(kind for indent, kind in thunks if indent == 0 and kind != _GRAPH),
        launches=sum(kind in _LAUNCHES for _, kind in thunks),
    )
