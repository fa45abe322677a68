"""Loud numerics, strict dtype promotion for every test; the models that engine tests share."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import jax
import pytest
from engines import compile_once, deep_model

from swapkv_jax import load_model
from swapkv_jax.models import Model

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Seven layers of float32."""
    return deep_model(tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="session")
def smollm2() -> Model:
    return load_model("smollm2-135m", dtype="float32")


@pytest.fixture(scope="module")
def shared_programs() -> Iterator[None]:
    """Engines of the module share the graphs that do not differ."""
    with patch("swapkv_jax.engine.compile_program", compile_once):
        yield
