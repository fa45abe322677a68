"""What takes part in a benchmark: our engine under one plan, or a peer. Each prefills once, then steps."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from swapkv_jax import Engine, Plan
from swapkv_jax.accounting import kv_bytes
from swapkv_jax.models import Model
from swapkv_jax.prefilled import Prefilled, Prompts, RandomPrefill
from swapkv_jax.tiers import sequential_read_rate
from swapkv_jax.tiers.direct_io import PAGE


@dataclass
class Samples:
    """What was measured, one entry per timed step. Bytes and rates stay empty where nothing is read.

    `read_bytes` is what arrived while the step was timed, for rates; `step_bytes` also counts what was read
    ahead between steps. `plain_rate` is what a plain sequential reader of the same files got right after.
    """

    seconds: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    step_bytes: list[int] = field(default_factory=list)
    plain_rate: list[float] = field(default_factory=list)


class Contender(Protocol):
    @property
    def label(self) -> str: ...

    def prefill(self, prompts: Prompts, new_tokens: int, prefilled: Prefilled | None) -> float | None:
        """Seconds to the first token, None where the prefill was not computed here.

        A peer cannot take keys and values that were captured: it computes its own, and makes up random ones.
        """
        ...

    def step(self) -> None: ...

    def measure(self, samples: Samples) -> None:
        """One step, timed into `samples`."""
        ...

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of every row, per step."""
        ...

    def describe(self) -> dict[str, Any]:
        """The keys of the row that say what this is and what it holds."""
        ...

    def close(self) -> None: ...


class OurEngine:
    """An engine of this package. Tier `disk` gets a directory of its own, removed at the end."""

    def __init__(self, model: Model, plan: Plan, store_dir: Path):
        self._plan, self._geometry = plan, model.geometry
        self._store = Path(tempfile.mkdtemp(prefix="benchmark-", dir=store_dir))
        try:
            self._engine = Engine(model, plan, store_dir=self._store)
        except BaseException:
            shutil.rmtree(self._store)
            raise
        self.tokens: list[list[int]] = []

    @property
    def label(self) -> str:
        return self._plan.policy if self._plan.tier is None else f"{self._plan.policy} {self._plan.tier}"

    def prefill(self, prompts: Prompts, new_tokens: int, prefilled: Prefilled | None) -> float | None:
        self._generation = self._engine.generate(
            prompts, max_new_tokens=new_tokens, ignore_eos=True, prefilled=prefilled
        )
        self.step()
        return self._generation.ttft_s if prefilled is None else None

    def step(self) -> None:
        self.tokens.append([token for token in next(self._generation).tokens if token is not None])

    def measure(self, samples: Samples) -> None:
        before = self._engine.use
        started = time.perf_counter()
        self.step()
        samples.seconds.append(time.perf_counter() - started)
        after = self._engine.use
        samples.wait_s.append(after.wait_s - before.wait_s)
        if self._plan.tier == "disk":
            samples.read_bytes.append(after.bytes_read - before.bytes_read)
            settled = self._settle()
            samples.step_bytes.append(settled - before.bytes_read)
            samples.plain_rate.append(self._plain_rate())

    def _settle(self) -> int:
        """Bytes read, once reading ahead has come to rest: it fills its staging slots between steps."""
        read = -1
        while read != (now := self._engine.use.bytes_read):
            read = now
            time.sleep(0.02)
        return read

    def _plain_rate(self) -> float:
        """Bytes/s of one thread that reads this engine's own files from end to end, past the page cache."""
        sizes = {path: path.stat().st_size for path in self._store.glob("*.kv")}
        seconds = 0.0
        for path, size in sizes.items():
            chunk = min(1 << 20, size // PAGE * PAGE)
            seconds += size / sequential_read_rate(path, chunk_bytes=chunk) / 1e6
        return sum(sizes.values()) / seconds

    def describe(self) -> dict[str, Any]:
        return {
            "policy": self._plan.policy,
            "peer": None,
            "tier": self._plan.tier,
            "physical_layers": self._plan.physical_layers,
            "kv_bytes": kv_bytes(self._plan, self._geometry),
            "compiles_during_decode": self._generation.compiles_during_decode,
            "notes": list(self._engine.use.notes),
        }

    def close(self) -> None:
        self._engine.close()
        shutil.rmtree(self._store, ignore_errors=True)


class PeerDecode:
    """A peer's decode, timed as ours is."""

    def __init__(self, name: str, version: str, decode: Any):
        self.label, self._version, self._decode = name, version, decode
        self.tokens: list[list[int]] = []

    def prefill(self, prompts: Prompts, new_tokens: int, prefilled: Prefilled | None) -> float | None:
        started = time.perf_counter()
        if isinstance(prefilled, RandomPrefill):
            self._decode.prefill_randomly(len(prompts[0]))
            return None
        self.tokens.append(self._decode.prefill(prompts))
        return time.perf_counter() - started

    def step(self) -> None:
        self.tokens.append(self._decode.step())

    def measure(self, samples: Samples) -> None:
        started = time.perf_counter()
        self.step()
        samples.seconds.append(time.perf_counter() - started)

    def describe(self) -> dict[str, Any]:
        return {
            "policy": None,
            "peer": self.label,
            "tier": None,
            "physical_layers": None,
            "kv_bytes": {"device": self._decode.kv_bytes, "dram": 0, "disk": 0},
            "compiles_during_decode": None,
            "notes": [self._version],
        }

    def close(self) -> None:
        del self._decode
