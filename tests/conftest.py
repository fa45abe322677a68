"""Loud numerics: strict dtype promotion for every test."""

from __future__ import annotations

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
