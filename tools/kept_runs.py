"""What an interrupted benchmark has measured, kept beside its report: the same command then goes on where it was."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import machine
import msgspec
import numpy as np
import xxhash

import swapkv_jax
from swapkv_jax.tuner.tables import Tables

_SETTINGS = (
    "JAX_",
    "XLA_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "GOMP_",
)  # variables that change how fast something runs


class KeptRuns:
    """Measurements by what they depend on, in a directory named after the report; `forget` removes it.

    `common` is what all of them depend on, besides the code, its libraries and the machine, which are looked up here.
    """

    def __init__(self, report: Path, common: Mapping[str, Any], *, fresh: bool):
        """Raises UsageError: the directory cannot be made or written."""
        self.directory = report.with_name(f"{report.name}.parts")
        self._tables = Tables(self.directory, fresh=fresh, flag="--json")
        self._common = {**common, "code": code_digest(), "machine": machine_facts()}
        self.reused = 0

    def get(self, kind: str, key: Mapping[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was measured under `kind` and `key`, else what `measure` returns, which is kept."""
        whole = {**self._common, **key}
        found = self._tables.find(kind, whole, dict)
        if found is not None:
            self.reused += 1
            return found
        value = measure()
        self._tables.keep(kind, whole, value)
        return value

    def leave_nothing_empty(self) -> None:
        """Removes the directory if nothing is in it."""
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def forget(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def machine_facts() -> dict[str, Any]:
    """What tells this machine, its libraries and how they are set from others that are not as fast."""
    return {
        "cpu": machine.cpu(),
        "cores": machine.cores(),
        "memory_bytes": machine.memory_bytes(),
        "system": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_SETTINGS)},
    }


def code_digest() -> str:
    """Of the sources of this package and these tools."""
    digest = xxhash.xxh3_128()
    kernels = Path(str(importlib.resources.files("swapkv_jax.kernels")))
    for directory in (Path(swapkv_jax.__file__).parent, kernels, Path(__file__).parent):
        for path in sorted(directory.rglob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def content_digest(value: Any) -> str:
    """Of anything that msgspec writes."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(value))
