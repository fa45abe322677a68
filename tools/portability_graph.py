"""One decode graph on one target: lint, export, compile, and what the compiler made of it."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.export
from portability_bytes import TOLERANCE, Argument, arguments
from portability_lint import lint
from portability_targets import Target
from portability_thunks import read_thunks

from swapkv_jax import Plan
from swapkv_jax.graph import GraphSpec

_CUSTOM_CALL = re.compile(r'custom_call_target="([^"]+)"')
_KERNELS = (
    "tpu_custom_call",
    "mosaic_gpu",
)  # how the calls of Pallas kernels begin; XLA's own have other names


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a compiler made of one program. Bytes are None where it made nothing.

    Attributes:
      failures: what it refused, or did otherwise than a decode graph must. too_large: it found no room on one device.
      arguments: those on the device. host: those in host memory.
      outputs: bytes of those that are not donated arguments coming back.
      kernels: names of the custom calls that are kernels.
      command_buffers, launches: of a GPU.
      taken: the arguments, as laid out.
    """

    failures: tuple[str, ...] = ()
    too_large: str | None = None
    arguments: int | None = None
    temporaries: int | None = None
    outputs: int | None = None
    host: int | None = None
    kernels: tuple[str, ...] = ()
    command_buffers: int | None = None
    launches: int | None = None
    compile_s: float | None = None
    taken: tuple[Argument, ...] = field(default=(), repr=False)


@dataclass(kw_only=True)
class GraphReport:
    """A graph of a plan. `failures` are checks that did not hold; `artefact_bytes` is None where nothing was
    serialised, `compiled` where no compiler was asked."""

    name: str
    failures: list[str] = field(default_factory=list)
    planned_arguments: int = 0
    artefact_bytes: int | None = None
    compiled: Compiled | None = None

    @property
    def has_bytes(self) -> bool:
        return self.compiled is not None and self.compiled.arguments is not None

    def to_dict(self) -> dict[str, Any]:
        made = self.compiled or Compiled()
        return {
            "name": self.name,
            "failures": [*self.failures, *made.failures],
            "planned_arguments": self.planned_arguments,
            "artefact_bytes": self.artefact_bytes,
            **{f.name: getattr(made, f.name) for f in dataclasses.fields(made) if f.name not in _APART},
        }


_APART = ("taken", "failures")


def names(specs: Sequence[GraphSpec]) -> list[str]:
    """A name for each graph: numbered where several share one."""
    plain = [spec.name for spec in specs]
    return [
        name if plain.count(name) == 1 else f"{name}.{plain[:i].count(name)}" for i, name in enumerate(plain)
    ]


def can_serialise() -> bool:
    """Whether `jax.export` can write artefacts here."""
    return find_spec("flatbuffers") is not None


class Checker:
    """Checks graphs on one target. Plans share graphs (the head of all policies is one): what lowers to the same
    program is compiled once, and its seconds count where that was."""

    def __init__(self, target: Target):
        """A target whose compiler is installed is set up here; whatever that raises is raised."""
        self._target = target
        self._sharding = None if target.missing() else target.sharding()
        self._known: dict[str, Compiled] = {}

    def check(
        self, name: str, spec: GraphSpec, *, kernel: bool = False, artefact: Path | None = None
    ) -> GraphReport:
        """Lint and export, which need no compiler; then compile where there is one.

        Args:
          kernel: the plan says that a kernel computes part of this graph; otherwise none may.
          artefact: where the exported graph goes, if anywhere.
        """
        report = GraphReport(name=name, planned_arguments=spec.argument_bytes)
        # A kernel's trace refuses only to be lowered for the host.
        traced = spec.trace(self._sharding or jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0]))
        report.failures += lint(traced.jaxpr, self._target.platform)
        if report.failures:
            return report  # a compiler's complaint about the same would say less
        _export(report, spec, self._target, artefact)
        if self._sharding is None:
            return report
        room = self._target.memory
        if room is not None and spec.argument_bytes > room:
            why = f"its arguments take {spec.argument_bytes:,} bytes of {room:,}"
            report.compiled = Compiled(too_large=why)
            return report
        report.compiled = self._compiled(spec, traced)
        if report.has_bytes:
            report.failures += _kernel_problems(kernel, report.compiled.kernels)
        return report

    def _compiled(self, spec: GraphSpec, traced: jax.stages.Traced) -> Compiled:
        lowered = traced.lower()
        key = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        if key in self._known:
            return dataclasses.replace(self._known[key], compile_s=0.0)
        made = self._known[key] = _compile(spec, lowered, self._target)
        return made


def holds_kernel(plan: Plan, spec: GraphSpec) -> bool:
    """Whether the plan says that a kernel attends the slots in this graph."""
    return plan.attention != "xla" and spec.name in ("segment", "between", "whole")


def _kernel_problems(wanted: bool, found: tuple[str, ...]) -> Iterator[str]:
    if wanted and not found:
        yield "the plan's kernel is not in the compiled graph: XLA's own operations took its place"
    if found and not wanted:
        yield f"a kernel that the plan does not name is in the compiled graph ({', '.join(found)})"


def _export(report: GraphReport, spec: GraphSpec, target: Target, artefact: Path | None) -> None:
    exported = jax.export.export(spec.jit(), platforms=(target.platform,))(*spec.arguments)
    if not can_serialise():
        return
    content = exported.serialize()
    report.artefact_bytes = len(content)
    if jax.export.deserialize(content).platforms != (target.platform,):
        report.failures.append(f"the exported artefact is not for {target.platform}")
    if artefact is not None:
        artefact.write_bytes(content)


def _compile(spec: GraphSpec, lowered: jax.stages.Lowered, target: Target) -> Compiled:
    failures: list[str] = []
    command_buffers = launches = None
    with tempfile.TemporaryDirectory(prefix="portability-") as dump:
        options = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True} if target.kind == "gpu" else None
        started = time.perf_counter()
        try:
            compiled = lowered.compile(options)
        except jax.errors.JaxRuntimeError as error:
            message = str(error).strip().partition("\n")[0]
            if "RESOURCE_EXHAUSTED" in message:
                return Compiled(too_large=message)
            return Compiled(failures=(f"does not compile: {message}",))
        seconds = round(time.perf_counter() - started, 2)
        if target.kind == "gpu":
            thunks = read_thunks(Path(dump))
            command_buffers, launches = thunks.command_buffers, thunks.launches
            failures += [thunks.problem] if thunks.problem else []
    stats = compiled.memory_analysis()
    assert stats is not None, "the backend gives no memory analysis"
    taken = arguments(spec, compiled)
    failures += _byte_problems(spec, stats, taken)
    return Compiled(
        failures=tuple(failures),
        arguments=sum(argument.bytes for argument in taken if not argument.host),
        temporaries=stats.temp_size_in_bytes,
        outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        host=sum(argument.bytes for argument in taken if argument.host),
        kernels=tuple(sorted({c for c in _CUSTOM_CALL.findall(_text(compiled)) if c.startswith(_KERNELS)})),
        command_buffers=command_buffers,
        launches=launches,
        compile_s=seconds,
        taken=tuple(taken),
    )


def _text(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    assert text is not None, "the backend gives no text of what it compiled"
    return text


def _byte_problems(spec: GraphSpec, stats: Any, taken: Sequence[Argument]) -> Iterator[str]:
    # A layout that pads nothing gives what the plan says; a TPU's tiles pad, and `plan_bytes` bounds by how much.
    laid_out = sum(argument.bytes for argument in taken)
    compiled = stats.argument_size_in_bytes + stats.host_argument_size_in_bytes
    if compiled != laid_out:
        yield (
            f"arguments: {compiled:,} bytes compiled, {laid_out:,} by their layouts, "
            f"{spec.argument_bytes + spec.host_bytes:,} planned"
        )
    donated = sum(
        leaf.size * leaf.dtype.itemsize for i in spec.donate for leaf in jax.tree.leaves(spec.arguments[i])
    )
    if stats.alias_size_in_bytes < donated:
        yield f"of {donated:,} donated bytes {stats.alias_size_in_bytes:,} come back in place; buffers would move"
    host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes + stats.host_output_size_in_bytes
    if host > spec.host_bytes * (1 + TOLERANCE):
        yield f"{host:,} bytes in host memory, where the plan has {spec.host_bytes:,} of this graph's"
