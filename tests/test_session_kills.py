"""Sessions survive kill -9 at any moment: the store opens, what was committed verifies, and decode goes on with the
tokens of an uninterrupted run. Two sessions at a time in one store."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from engines import deep_model
from session_child import child_arguments, prompt_of

from swapkv_jax.models import Model
from swapkv_jax.session_rows import identity_of
from swapkv_jax.sessions import SessionStore

KILLS = 200
TOTAL = 250  # tokens of a whole session: three groups and a tail
POLICIES = ("resident", "dram-alias", "disk-alias")


@dataclass(frozen=True)
class Truth:
    tokens: list[int]
    kv: list[tuple[np.ndarray, np.ndarray]]


class Victims:
    """Children at work on sessions of one store, each killed after a random time."""

    def __init__(self, model: Model, model_directory: Path, store: Path):
        self.model, self.model_directory, self.store = model, model_directory, store
        self.kills = Counter[str]()
        self.finished = 0
        self.lock = threading.Lock()

    def decode(
        self, name: str, policy: str, seed: int, length: int, *, after: float | None, store: Path
    ) -> tuple[int, bool, float]:
        """Runs a child, killed `after` seconds of work: how many tokens it said were safe, whether it got to the end,
        and the seconds it worked."""
        arguments = child_arguments(self.model_directory, store, policy, name, seed, length, TOTAL)
        timer, safe, done, began = None, 0, False, 0.0
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            for line in child.stdout:
                if line == "ready\n":
                    began = time.monotonic()
                    if after is not None:
                        timer = threading.Timer(after, os.kill, (child.pid, signal.SIGKILL))
                        timer.start()
                elif line.startswith("committed "):
                    safe = max(safe, int(line.split()[1]))
                done = done or line == "done\n"
            worked = time.monotonic() - began
            errors = child.stderr.read()
        if timer is not None:
            timer.cancel()
        assert child.returncode in (0, -signal.SIGKILL), errors
        return safe, done, worked

    def store_command(self, *arguments: str, after: float) -> None:
        command = [sys.executable, "-m", "swapkv_jax.store", "--store-dir", str(self.store), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, timeout=after, check=False)
            assert done.returncode == 0, done.stderr
        except subprocess.TimeoutExpired:  # and it has been killed
            with self.lock:
                self.kills[arguments[0]] += 1

    def check(self, name: str, truth: Truth, safe: int) -> None:
        """The store opens; the session has at least the tokens that were safe, and every byte of them is right."""
        with_store = SessionStore(self.store, identity=identity_of(self.model))
        try:
            with with_store.open(name) as session:
                assert session.stored >= safe, f"{name}: {safe} tokens were safe, {session.stored} are stored"
                assert session.tokens == truth.tokens[: len(session.tokens)]
                for layer, (k, v) in enumerate(truth.kv):
                    if session.stored:
                        ours_k, ours_v = session.kv(layer)
                        # Not to the bit: a prompt's last token may have been computed again, by a decode step.
                        assert np.allclose(ours_k, k[:, :, : session.stored], atol=1e-4)
                        assert np.allclose(ours_v, v[:, : session.stored], atol=1e-4)
        finally:
            with_store.close()

    def work(self, worker: int) -> None:
        """Begins session after session and takes each to its end through kills."""
        rng = random.Random(worker)
        count = 0
        while True:
            count += 1
            name, seed, policy = f"w{worker}-{count}", 100 * worker + count, POLICIES[count % len(POLICIES)]
            length = rng.choice((40, 64, 130, 190))
            aside = self.store.with_name(f"aside-{name}")
            _, done, whole = self.decode("truth", policy, seed, length, after=None, store=aside)
            assert done
            truth = self.read(aside)
            assert truth.tokens[:length] == prompt_of(seed, length)
            safe, done = 0, False
            while not done:
                with self.lock:
                    if sum(self.kills.values()) >= KILLS:
                        return
                # At any moment of what an uninterrupted child takes, however busy the machine is.
                after = rng.uniform(0, whole)
                said, done, _ = self.decode(name, policy, seed, length, after=after, store=self.store)
                safe = max(safe, said)
                if not done:
                    with self.lock:
                        self.kills["prefill" if said == 0 else "decode"] += 1
                self.check(name, truth, safe)
                if rng.random() < 0.2:
                    command = rng.choice((("verify",), ("gc", "1GiB")))
                    self.store_command(*command, after=rng.uniform(0.1, 0.6))
                    self.check(name, truth, safe)
            assert safe == TOTAL - 1
            with self.lock:
                self.finished += 1
            shutil.rmtree(aside)

    def read(self, directory: Path) -> Truth:
        store = SessionStore(directory, identity=identity_of(self.model))
        try:
            with store.open("truth") as session:
                return Truth(list(session.tokens), [session.kv(i) for i in range(self.model.geometry.layers)])
        finally:
            store.close()


@pytest.mark.slow
def test_kills_lose_nothing_that_was_committed(tmp_path: Path) -> None:
    model_directory = tmp_path / "model"
    model = deep_model(model_directory)
    victims = Victims(model, model_directory, tmp_path / "store")
    with ThreadPoolExecutor(2) as pool:
        for worker in [pool.submit(victims.work, worker) for worker in (1, 2)]:
            worker.result()
    print(f"kills: {dict(victims.kills)}; sessions taken to their end: {victims.finished}")
    assert sum(victims.kills.values()) >= KILLS
    assert victims.finished >= 10
    assert set(victims.kills) >= {"prefill", "decode", "verify", "gc"}
