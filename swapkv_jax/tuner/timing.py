"""What compiled graphs take, timed at a few batches and sizes, and a model of it for all others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import msgspec
import numpy as np
from scipy.optimize import nnls

from swapkv_jax.graph import Graph, GraphSpec
from swapkv_jax.staging import put

_MORE_THAN_CACHES = 192 << 20
_COPIES = 12
_PASSES = 8
QUIET = 10  # percent


def time_graph(spec: GraphSpec) -> float:
    """Seconds from calling a graph to its results, on arguments of random numbers that the processor's caches have
    lost. A low percentile of many calls: whatever else runs can only make one slower."""
    graph = Graph(spec.name, spec.function, spec.arguments, spec.donate)
    rng = np.random.default_rng(0)

    def random(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        as_bits = shape.dtype == np.uint16  # numbers of 16 bits, see `Plan.held_dtype`
        if as_bits or jax.numpy.issubdtype(shape.dtype, np.floating):
            dtype = jax.numpy.bfloat16 if as_bits else shape.dtype
            values = (0.02 * rng.standard_normal(shape.shape, np.float32)).astype(dtype)
            return values.view(shape.dtype)
        return np.zeros(shape.shape, shape.dtype)

    host = [jax.tree.map(random, argument) for argument in spec.arguments]
    copies = max(2, min(_COPIES, -(-_MORE_THAN_CACHES // max(1, spec.argument_bytes))))
    kept = set(range(len(host))) - set(spec.donate)
    sets = [{i: jax.tree.map(put, host[i]) for i in kept} for _ in range(copies)]

    def one_pass() -> list[float]:
        given = [{**own, **{i: jax.tree.map(put, host[i]) for i in spec.donate}} for own in sets]
        calls = [[own[i] for i in range(len(host))] for own in given]
        del given
        jax.block_until_ready(calls)
        times = []
        while calls:
            arguments = calls.pop()
            started = time.perf_counter()
            jax.block_until_ready(graph(*arguments))
            times.append(time.perf_counter() - started)
        return times

    one_pass()
    return float(np.percentile([seconds for _ in range(_PASSES) for seconds in one_pass()], QUIET))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the time of a step's graphs depends on, beside the model: `tokens` = C·G slots' tokens per row, `places`
    of the summary per row, its `rank`; `records` of a load and their `record_bytes`."""

    batch: int
    tokens: int = 0
    places: int = 0
    rank: int = 0
    records: int = 0
    record_bytes: int = 0


# Each graph's time is a sum of these, none of them negative: what it streams whatever the batch, what each row adds.
_FEATURES: dict[str, Any] = {
    "segment": lambda s: (1, s.batch, s.batch * s.tokens),
    "predict": lambda s: (1, s.batch, s.batch * s.places, s.batch * s.places * s.rank),
    "load": lambda s: (1, s.records, s.records * s.record_bytes),
    "head": lambda s: (1, s.batch),
}


class GraphModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each graph as a sum of its features (`_FEATURES`) with these weights."""

    weights: dict[str, tuple[float, ...]]

    @classmethod
    def fit(cls, timed: Mapping[str, Sequence[tuple[Shape, float]]]) -> GraphModel:
        """The weights, none negative, that fit the timed points best, in relative terms.

        `timed` has every graph's points, by name.
        """
        weights = {}
        for name, points in timed.items():
            features = np.array([_FEATURES[name](shape) for shape, _ in points], np.float64)
            seconds = np.array([value for _, value in points])
            scale = features.max(axis=0)
            fitted, _ = nnls(features / scale / seconds[:, None], np.ones(len(points)))
            weights[name] = tuple((fitted / scale).tolist())
        return cls(weights=weights)

    def seconds(self, graph: str, shape: Shape) -> float:
        """What a graph is taken to need."""
        return float(np.dot(self.weights[graph], _FEATURES[graph](shape)))
