"""Loud numerics, strict dtype promotion for every test; the models that engine tests share."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import jax
import pytest
from cli import Runner
from engines import compile_once, deep_model
from tiny import tiny_checkpoint

from swapkv_jax import load_model
from swapkv_jax.models import Model

jax.config.update("jax_numpy_dtype_promotion", "strict")

_WEEK_S = 7 * 24 * 3600


def pytest_configure(config: pytest.Config) -> None:
    """Graphs are compiled once, by whichever worker needs one first, and read back for a week on this kind of
    processor: compiling is three quarters of what the suite costs. `--cache-clear` forgets them. What decode compiles
    is counted all the same, and child processes do without."""
    cache = getattr(config, "cache", None)
    if cache is None:  # -p no:cacheprovider
        return
    flags = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
    processor = hashlib.sha256(flags[0].encode() if flags else b"").hexdigest()[:16]
    directory = cache.mkdir(f"xla-{processor}")
    for entry in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another worker does the same
            if entry.stat().st_mtime < time.time() - _WEEK_S:
                entry.unlink()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Seven layers of float32."""
    return deep_model(tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="session")
def smollm2() -> Model:
    return load_model("smollm2-135m", dtype="float32")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the table's tiny Llama, as the decode command takes it."""
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def run(tiny_llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Runner:
    """The decode command in this process, on that model."""
    return Runner(tiny_llama, tmp_path, capfd)


@pytest.fixture(scope="module")
def shared_programs() -> Iterator[None]:
    """Engines of the module share the graphs that do not differ."""
    with patch("swapkv_jax.engine.compile_program", compile_once):
        yield
