"""Devices to plan for, whether they are here or not: one JSON file each, every fact with its source.

Sizes are bytes, rates bytes per second. No JAX.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec

from swapkv_jax.errors import UsageError

Platform = Literal["cpu", "gpu", "tpu"]


class Fact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A size or a rate, and who says so."""

    value: int
    source: str

    def __post_init__(self) -> None:
        if self.value <= 0 or not self.source:
            raise ValueError(f"needs a positive value and a source, not {self.value} and {self.source!r}")


class Disk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the disk tier of a device usually is.

    `random_reads` is how many reads of 4 KiB it serves per second, `space` its size; `group_tokens` the size of
    group that was found best on it.
    """

    bandwidth: int
    random_reads: int
    space: int
    source: str
    group_tokens: int = 4

    def __post_init__(self) -> None:
        if min(self.bandwidth, self.random_reads, self.space, self.group_tokens) <= 0 or not self.source:
            raise ValueError("needs positive numbers and a source")

    @property
    def read_s(self) -> float:
        """Seconds that a read takes beside its bytes, with many in flight."""
        return max(0.0, 1 / self.random_reads - 4096 / self.bandwidth)


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device and what a typical host gives it.

    Attributes:
      kinds: what JAX calls it (`jax.devices()[0].device_kind`).
      capability: a CUDA device's compute capability, which decides on kernels.
      link: from host memory to the device's. None where they are one memory; `dram` is None too then, and
        `device_memory` holds both tiers.
      dram: host memory per device.
    """

    name: str
    title: str
    platform: Platform
    kinds: tuple[str, ...]
    capability: float | None = None
    device_memory: Fact
    memory_bandwidth: Fact
    link: Fact | None
    dram: Fact | None
    disk: Disk

    def __post_init__(self) -> None:
        if (self.link is None) != (self.dram is None):
            raise ValueError("link and dram are both given, or both null where memory is shared")

    @property
    def shared(self) -> bool:
        """Whether device memory is host memory."""
        return self.link is None


def device_names() -> list[str]:
    """The devices that are described here."""
    return sorted(device.name for device in _described())


def find_device(name: str) -> Device:
    """A device by its name, however it is spelled ("RTX 4090", "v5e"), or from a JSON file of the same form.

    Raises:
      UsageError: there is no such device or file, or the file does not describe one.
    """
    wanted = _letters(name)
    exact = [d for d in _described() if _letters(d.name) == wanted]
    endings = [d for d in _described() if wanted and _letters(d.name).endswith(wanted)]
    for found in (exact, endings):
        if len(found) == 1:
            return found[0]
    if name.endswith(".json") or os.path.isfile(name):
        return _read(Path(name))
    raise UsageError(
        f"device {name!r} is not described; give a JSON file, or one of {', '.join(device_names())}"
    )


def device_of_kind(kind: str) -> Device | None:
    """The description of what JAX calls `kind`, if there is one."""
    return next((device for device in _described() if kind in device.kinds), None)


@cache
def _described() -> tuple[Device, ...]:
    files = sorted(resources.files(__name__).iterdir(), key=lambda file: file.name)
    return tuple(
        msgspec.json.decode(file.read_bytes(), type=Device) for file in files if file.name.endswith(".json")
    )


def _letters(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _read(path: Path) -> Device:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Device)
    except OSError as error:
        raise UsageError(
            f"cannot read device {path}: {error.strerror}; give a JSON file, or one of {', '.join(device_names())}"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} does not describe a device: {error}; the fields are {', '.join(Device.__struct_fields__)}"
        ) from None
