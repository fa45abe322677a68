"""The devices that plans are compiled for, none of which needs to be at hand."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental import topologies

Kind = Literal["cpu", "tpu", "gpu"]

DESCRIPTIONS = Path(__file__).parent / "targets"
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device to compile for.

    Attributes:
      topology: of a TPU slice, as libtpu names it. A GPU is described in `targets/NAME.textproto`, XLA's
        GpuTargetConfigProto; JAX's topology of an attached GPU has it as `target_config`.
      memory: bytes of one device's HBM, None where the host's memory counts.
      capability: of a GPU, as "9.0" is said of Hopper.
    """

    name: str
    kind: Kind
    topology: str = ""
    memory: int | None = None
    capability: float | None = None

    @property
    def platform(self) -> str:
        """As JAX names it in lowering rules and exported artefacts."""
        return "cuda" if self.kind == "gpu" else self.kind

    def missing(self) -> str | None:
        """Why nothing can be compiled for it here, or None."""
        if self.kind == "tpu" and importlib.util.find_spec("libtpu") is None:
            return "install extra aot-tpu"
        if self.kind == "gpu" and not any(
            e.name.startswith("xla_cuda") for e in entry_points(group="jax_plugins")
        ):
            return "install extra aot-cuda"
        return None

    def sharding(self) -> jax.sharding.Sharding:
        """One such device, through the compiler's own description of it. Whatever goes wrong there is raised."""
        return jax.sharding.SingleDeviceSharding(_DEVICES[self.kind](self))


def _cpu(target: Target) -> Any:
    return jax.devices("cpu")[0]


def _tpu(target: Target) -> Any:
    # Without these libtpu asks a metadata server for minutes, and refuses to be loaded by two processes.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices[0]


def _gpu(target: Target) -> Any:
    text = _description(target.name).read_text()
    return topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1").devices[0]


_DEVICES: dict[Kind, Callable[[Target], Any]] = {"cpu": _cpu, "tpu": _tpu, "gpu": _gpu}


def _description(name: str) -> Path:
    return DESCRIPTIONS / f"{name}.textproto"


def _gpu_target(name: str) -> Target:
    text = _description(name).read_text()
    memory = re.search(r"^\s*device_memory_size: (\d+)", text, re.MULTILINE)
    capability = re.search(r"cuda_compute_capability {\s*major: (\d+)(?:\s*minor: (\d+))?", text)
    assert memory is not None, f"{_description(name)} lacks device_memory_size"
    assert capability is not None, f"{_description(name)} lacks cuda_compute_capability"
    return Target(
        name=name, kind="gpu", memory=int(memory[1]), capability=float(".".join(capability.groups("0")))
    )


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(name="cpu", kind="cpu"),
        Target(name="v4", kind="tpu", topology="v4:2x2x1", memory=32 * GIB),
        Target(name="v5e", kind="tpu", topology="v5e:2x2", memory=16 * GIB),
        Target(name="v5p", kind="tpu", topology="v5p:2x2x1", memory=95 * GIB),
        Target(name="v6e", kind="tpu", topology="v6e:2x2", memory=32 * GIB),
        Target(name="tpu7x", kind="tpu", topology="tpu7x:2x2x1", memory=96 * GIB),  # a chip is two devices
        *(_gpu_target(name) for name in ("a100", "h100", "h200", "b200")),
    )
}


def compilers() -> dict[str, str]:
    """The installed compilers of other devices, with their versions."""
    known = re.compile(r"libtpu|jax-cuda\d+-pjrt")
    found = {d.metadata["Name"]: d.version for d in distributions() if known.fullmatch(d.metadata["Name"])}
    return dict(sorted(found.items()))
