"""Under `layer` on disk memory must not follow the context: not this process's, not the page cache's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swapkv_jax import load_model, make_plan

SHORT, LONG, NEW = 1000, 8000, 8
SLACK = 4 << 20  # two runs of one length differ by less

# Runs alone, so that its peak is its own. Both prompts decode under the plan of their own context.
CHILD = """
import ctypes, json, mmap, os, sys
from pathlib import Path
import numpy as np
from swapkv_jax import Engine, load_model, make_plan

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def cached(path):
    with open(path, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    pages = np.zeros(-(-len(view) // mmap.PAGESIZE), np.uint8)
    start = np.frombuffer(view, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(view)), ctypes.c_void_p(pages.ctypes.data))
    assert not failed, os.strerror(ctypes.get_errno())
    return int((pages & 1).sum()) * mmap.PAGESIZE

store, length, new = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
model = load_model("smollm2-135m")
plan = make_plan(model.geometry, cache="layer", tier="disk", max_context=length + new)
with Engine(model, plan, store_dir=store) as engine:
    ready = status("VmRSS")
    prompt = np.random.default_rng(0).integers(0, model.geometry.vocab, length).tolist()
    for _ in engine.generate([prompt], max_new_tokens=new, ignore_eos=True):
        (file,) = store.glob("*.kv")
        pages = cached(file)
    print(json.dumps({
        "ready": ready, "peak": status("VmHWM"), "end": status("VmRSS"), "cached": pages,
        "direct": not engine.use.notes, "stored": engine.use.bytes_written,
    }))
"""


def _measure(store: Path, length: int) -> dict[str, Any]:
    command = [sys.executable, "-c", CHILD, str(store), str(length), str(NEW)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_follows_two_layers_not_the_context(tmp_path: Path) -> None:
    """RSS may grow with the prompt by its activations and by two layers' KV (slots, staging, rolling buffers);
    weights weigh the same on both sides. All of the KV would be 300 MiB more."""
    geometry = load_model("smollm2-135m").geometry
    small, large = (_measure(tmp_path / str(n), n) for n in (SHORT, LONG))
    plans = [make_plan(geometry, cache="layer", tier="disk", max_context=n + NEW) for n in (SHORT, LONG)]
    memory = [plan.memory(geometry) for plan in plans]
    two_layers = memory[1].device + memory[1].dram - memory[0].device - memory[0].dram
    activations = (LONG - SHORT) * geometry.hidden * plans[0].itemsize
    everything = (LONG - SHORT) * geometry.kv_bytes_per_token(plans[0].itemsize)
    assert large["stored"] > everything
    figures = {
        "peak": large["peak"] - small["peak"],
        "end": large["end"] - small["end"],
        "two layers": two_layers,
        "activations": activations,
    }
    print({name: f"{value / 2**20:.1f} MiB" for name, value in figures.items()}, small, large)
    assert figures["end"] <= two_layers + activations + SLACK, figures
    assert figures["peak"] <= two_layers + activations + SLACK, figures
    assert large["direct"], "the store directory takes no O_DIRECT"
    assert large["cached"] <= 2 * 4096, "the store's records are in the page cache"
