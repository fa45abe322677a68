"""What a profile says of where a step's time goes."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

Intervals = list[tuple[int, int]]
intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda p: (p[0], p[0] + p[1])))


@pytest.fixture
def step_profile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    return importlib.import_module("step_profile")


def test_graphs_are_found_by_name_and_the_rest_is_waiting_or_the_host(step_profile: ModuleType) -> None:
    def segment(x: jax.Array) -> jax.Array:
        return x @ x

    def predict(x: jax.Array) -> jax.Array:
        return jnp.sort(x, axis=0)

    x = jnp.ones((256, 256))
    graphs = [jax.jit(function) for function in (segment, predict)]
    for graph in graphs:
        graph(x).block_until_ready()

    def step() -> None:
        for graph in graphs:
            graph(x).block_until_ready()
        time.sleep(0.01)

    profile = step_profile.profile_steps(step, 3)
    assert profile.steps == 3
    assert profile.seconds > 0.03
    assert profile.busy["compute"] > 0
    assert profile.busy["predict"] > 0
    assert profile.busy["transfer"] is None  # no graph of that kind ran
    split = profile.split(waited=0.006)
    assert split["wait"] == pytest.approx(0.002)
    parts = [split[name] for name in ("compute", "predict", "wait", "host")]
    assert sum(parts) == pytest.approx(split["step_s"]) == pytest.approx(profile.seconds / 3)
    assert split["host"] > 0.007


def test_waiting_is_no_more_than_what_no_graph_filled(step_profile: ModuleType) -> None:
    profile = step_profile.StepProfile(2, 1.0, {"compute": 0.5, "predict": 0.3, "transfer": None})
    assert profile.split(waited=0.9) == pytest.approx(
        {
            "steps": 2,
            "step_s": 0.5,
            "compute": 0.25,
            "predict": 0.15,
            "transfer": None,
            "wait": 0.1,
            "host": 0.0,
        }
    )


@given(intervals, intervals)
def test_moments_are_counted_once(some: Intervals, windows: Intervals) -> None:
    step_profile = importlib.import_module("step_profile")
    covered = {moment for begin, end in some for moment in range(begin, end)}
    assert step_profile._length(step_profile._union(some)) == len(covered)
    inside = {moment for begin, end in windows for moment in range(begin, end)}
    within = step_profile._union(step_profile._within(some, windows))
    assert step_profile._length(within) == len(covered & inside)
