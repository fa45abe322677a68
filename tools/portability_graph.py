"""One decode graph on one target: lint, export, compile, and what the compiler made of it."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.export
from portability_bytes import Argument, arguments
from portability_lint import lint
from portability_targets import Target
from portability_thunks import read_thunks

from swapkv_jax.graph import GraphSpec


@dataclass(kw_only=True)
class GraphReport:
    """Bytes are None where nothing was compiled. `failures` are checks that did not hold; `too_large` says that the
    compiler found no room for the graph on one device; `artefact_bytes` is None where nothing was serialised."""

    name: str
    failures: list[str] = field(default_factory=list)
    too_large: str | None = None
    planned_arguments: int = 0
    arguments: int | None = None
    temporaries: int | None = None
    outputs: int | None = None
    command_buffers: int | None = None
    launches: int | None = None
    compile_s: float | None = None
    artefact_bytes: int | None = None
    taken: list[Argument] = field(default_factory=list, repr=False)

    @property
    def compiled(self) -> bool:
        return self.arguments is not None

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "taken"}


def names(specs: Sequence[GraphSpec]) -> list[str]:
    """A name for each graph: numbered where several share one."""
    plain = [spec.name for spec in specs]
    return [
        name if plain.count(name) == 1 else f"{name}.{plain[:i].count(name)}" for i, name in enumerate(plain)
    ]


def can_serialise() -> bool:
    """Whether `jax.export` can write artefacts here."""
    return find_spec("flatbuffers") is not None


def check_graph(
    name: str,
    spec: GraphSpec,
    target: Target,
    sharding: jax.sharding.Sharding | None,
    artefact: Path | None,
) -> GraphReport:
    """Checks one graph.

    Args:
      sharding: of the target's device; None where its compiler is missing. Lint and export need no compiler.
      artefact: where the exported graph goes, if anywhere.
    """
    report = GraphReport(name=name, planned_arguments=spec.argument_bytes)
    host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    traced = spec.trace(sharding or host)
    report.failures += lint(traced.jaxpr, target.platform)
    if report.failures:
        return report  # a compiler's complaint about the same would say less
    _export(report, spec, target, artefact)
    if sharding is None:
        return report
    if target.memory is not None and spec.argument_bytes > target.memory:
        report.too_large = f"its arguments take {spec.argument_bytes:,} bytes of {target.memory:,}"
        return report
    _compile(report, spec, traced, target)
    return report


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


def _compile(report: GraphReport, spec: GraphSpec, traced: jax.stages.Traced, target: Target) -> None:
    with tempfile.TemporaryDirectory(prefix="portability-") as dump:
        options = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True} if target.kind == "gpu" else None
        started = time.perf_counter()
        try:
            compiled = traced.lower().compile(options)
        except jax.errors.JaxRuntimeError as error:
            message = str(error).strip().partition("\n")[0]
            if "RESOURCE_EXHAUSTED" in message:
                report.too_large = message
            else:
                report.failures.append(f"does not compile: {message}")
            return
        report.compile_s = round(time.perf_counter() - started, 2)
        if target.kind == "gpu":
            thunks = read_thunks(Path(dump))
            report.command_buffers, report.launches = thunks.command_buffers, thunks.launches
            if thunks.problem:
                report.failures.append(thunks.problem)
    report.taken = arguments(spec, compiled)
    _check_bytes(report, spec, compiled, target)


def _check_bytes(report: GraphReport, spec: GraphSpec, compiled: jax.stages.Compiled, target: Target) -> None:
    stats = compiled.memory_analysis()
    assert stats is not None, "the backend gives no memory analysis"
    report.arguments = stats.argument_size_in_bytes
    report.temporaries = stats.temp_size_in_bytes
    report.outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    # A layout that pads nothing gives what the plan says; a TPU's tiles pad, and `plan_bytes` bounds by how much.
    laid_out = sum(argument.bytes for argument in report.taken)
    if stats.argument_size_in_bytes != laid_out:
        report.failures.append(
            f"arguments: {report.arguments:,} bytes compiled, {laid_out:,} by their layouts, "
            f"{spec.argument_bytes:,} planned"
        )
    donated = sum(
        leaf.size * leaf.dtype.itemsize for i in spec.donate for leaf in jax.tree.leaves(spec.arguments[i])
    )
    if stats.alias_size_in_bytes < donated:
        report.failures.append(
            f"of {donated:,} donated bytes {stats.alias_size_in_bytes:,} come back in place; buffers would move"
        )
    host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes + stats.host_output_size_in_bytes
    if target.kind == "gpu" and host:
        report.failures.append(f"{host:,} bytes in host memory")
