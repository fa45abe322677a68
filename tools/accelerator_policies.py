"""Every cache policy on the device at hand: against logits computed on the CPU, and how long its steps take."""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from accelerator_findings import Finding, raised
from accelerator_kernels import backends
from accelerator_replay import count_launches
from portability_models import subject
from random_model import random_adapter, textless_model

from swapkv_jax import Engine, Plan, make_plan
from swapkv_jax.adapter import Adapter
from swapkv_jax.models import Geometry, Model
from swapkv_jax.plan import DType
from swapkv_jax.staging import compute_capability

TOLERANCE = 1e-3  # of the largest logit, in float32: the order of sums differs between devices
_PROFILED = 3  # steps


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is decoded: `steps` tokens after prompts, the longest of which leaves no token of `context` over."""

    model: str = "smollm2-135m"
    layers: int | None = None  # fewer than the model's
    vocab: int | None = None
    batch: int
    context: int
    steps: int
    dtype: DType

    @property
    def geometry(self) -> Geometry:
        found = subject(self.model, None, None).geometry
        fields = {"layers": self.layers, "vocab": self.vocab}
        return dataclasses.replace(found, **{k: v for k, v in fields.items() if v is not None})

    def prompts(self) -> list[list[int]]:
        """Ragged: each row is an eighth shorter than the one before, and starts over."""
        rng, longest = np.random.default_rng(1), self.context - self.steps
        lengths = [longest - (row % 4) * longest // 8 for row in range(self.batch)]
        return [rng.integers(0, self.geometry.vocab, length).tolist() for length in lengths]

    def following(self) -> list[list[int]]:
        rng = np.random.default_rng(2)
        return rng.integers(0, self.geometry.vocab, (self.batch, self.steps)).tolist()


EXACT = Sizes(layers=6, batch=2, context=320, steps=12, dtype="float32")  # `group` selects all of it
TIMED = Sizes(batch=8, context=4096, steps=40, dtype="bfloat16")
TINY = Sizes(layers=2, vocab=256, batch=2, context=64, steps=5, dtype="float32")


def planners(sizes: Sizes) -> dict[str, Plan]:
    """The planner's plan of each policy for the device at hand."""
    return {
        "resident": _plan(sizes, cache="resident"),
        "layer/dram": _plan(sizes, cache="layer", tier="dram"),
        "layer/disk": _plan(sizes, cache="layer", tier="disk"),
        "group": _group_plan(sizes),
    }


def plans(sizes: Sizes) -> dict[str, Plan]:
    """The planner's, and `group` by what else can attend its slots here."""
    made = planners(sizes)
    for attention, _ in backends(interpreted=False):
        if attention != made["group"].attention:
            made[f"group/{attention}"] = _group_plan(sizes, attention=attention)
    return made


def _group_plan(sizes: Sizes, **choices: Any) -> Plan:
    """With KV in the model's dtype: what is compared is the policy and its kernels, not what rounding loses."""
    return _plan(sizes, cache="group", kv_dtype=sizes.dtype, **choices)


def _plan(sizes: Sizes, **choices: Any) -> Plan:
    return make_plan(
        sizes.geometry,
        batch=sizes.batch,
        max_context=sizes.context,
        dtype=sizes.dtype,
        platform=jax.default_backend(),
        capability=compute_capability(),
        **choices,
    )


def reference(sizes: Sizes) -> np.ndarray:
    """Logits [steps, B, V] of `resident`, computed by another process on the CPU."""
    with tempfile.TemporaryDirectory(prefix="accelerator-") as directory:
        file = Path(directory) / "logits.npy"
        command = [sys.executable, str(Path(__file__).with_name("accelerator_check.py"))]
        command += ["--write-reference", str(file), *(["--tiny"] if sizes == TINY else [])]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return np.load(file)


def resident_logits(sizes: Sizes) -> np.ndarray:
    """What `reference` is of, on the device at hand."""
    model = _model(sizes)
    return _decode(model, _plan(sizes, cache="resident"), None, sizes).logits


def check_policies(sizes: Sizes, expected: np.ndarray) -> Iterator[Finding]:
    """Logits of every policy, teacher-forced, against `expected`; and that decode neither compiled nor moved
    anything."""
    model = _model(sizes)
    adapter = random_adapter(model)
    for name, plan in plans(sizes).items():
        try:
            with jax.default_matmul_precision("highest"):
                run = _decode(model, plan, adapter, sizes)
        except Exception as error:
            yield raised("policy", f"{name} {plan.attention}", error)
            continue
        error = float(np.abs(run.logits - expected).max() / np.abs(expected).max())
        still = f"{run.compiles} compiles, {len(run.moved)} of {run.buffers} buffers moved"
        yield Finding(
            part="policy",
            what=f"{name} {plan.attention}",
            found=f"logits differ by {error:.1e} (at most {TOLERANCE:.0e}); {still}",
            passed=bool(error <= TOLERANCE and run.compiles == 0 and not run.moved),
            values={"error": error, "compiles": run.compiles, "moved": len(run.moved)},
        )


def time_policies(sizes: Sizes) -> Iterator[Finding]:
    """The median step of every policy, and whether its graphs were replayed as CUDA graphs."""
    model = _model(sizes)
    adapter = random_adapter(model)
    resident, first = None, ""
    for name, plan in plans(sizes).items():
        try:
            run = _decode(model, plan, adapter, sizes, profiled=True)
        except Exception as error:
            yield raised("step", f"{name} {plan.attention}", error)
            continue
        if resident is None:
            resident, first = run.step_s, name
        yield Finding(
            part="step",
            what=f"{name} {plan.attention}, {sizes.dtype}, {sizes.batch} x {sizes.context}",
            found=f"{1e3 * run.step_s:.2f} ms, {run.step_s / resident:.2f} x {first}",
            passed=None,
            values={"seconds": run.step_s, "ttft_s": run.ttft_s},
        )
        if jax.default_backend() == "gpu":
            yield _replayed(f"{name} {plan.attention}, profiled", *run.launches)


def _replayed(what: str, graphs: int, single: int) -> Finding:
    """A profile that shows no call of CUDA's at all proves nothing either way."""
    found = f"{graphs / _PROFILED:.0f} graph launches and {single / _PROFILED:.0f} others per step"
    return Finding(
        part="replay",
        what=what,
        found=found if graphs + single else "the profile shows no calls of CUDA's",
        passed=graphs >= _PROFILED if graphs + single else None,
        values={"graph_launches": graphs, "other_launches": single},
    )


@dataclass(frozen=True)
class _Run:
    logits: np.ndarray
    compiles: int
    buffers: int
    moved: tuple[str, ...]
    step_s: float
    ttft_s: float
    launches: tuple[int, int]


def _model(sizes: Sizes) -> Model:
    return textless_model(sizes.geometry, sizes.dtype, name=f"{sizes.model} with random weights")


def _decode(
    model: Model, plan: Plan, adapter: Adapter | None, sizes: Sizes, *, profiled: bool = False
) -> _Run:
    with tempfile.TemporaryDirectory(prefix="accelerator-") as store:
        with Engine(model, plan, store_dir=Path(store), adapter=adapter) as engine:
            generation = engine.generate(
                sizes.prompts(),
                max_new_tokens=sizes.steps,
                forced=sizes.following(),
                ignore_eos=True,
                return_logits=not profiled,
            )
            logits = [next(generation).logits, next(generation).logits]
            before = engine.addresses()
            last = _PROFILED if profiled else 0
            logits += [next(generation).logits for _ in range(sizes.steps - 2 - last)]
            step_s = statistics.median(generation.step_s)
            launches = count_launches(lambda: [next(generation) for _ in range(last)]) if last else (0, 0)
            after = engine.addresses()
            return _Run(
                logits=np.stack([step for step in logits if step is not None])
                if not profiled
                else np.empty(0),
                compiles=generation.compiles_during_decode,
                buffers=len(before),
                moved=tuple(name for name, address in before.items() if after[name] != address),
                step_s=step_s,
                ttft_s=generation.ttft_s or 0.0,
                launches=launches,
            )
