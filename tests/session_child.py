"""A process that decodes a session to a wanted length and says what is safe: to be killed, or watched.

Every line `committed N` on stdout means that the first N tokens' keys and values are safe; `done` ends it. With
seconds to fill it goes on with further sessions, a line `session NAME SEED` for each.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from engines import compile_once, layer_plan, resident_plan

from swapkv_jax import Engine, load_model
from swapkv_jax.session_rows import identity_of
from swapkv_jax.sessions import Session, SessionStore

CONTEXT = 256


def prompt_of(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, 304, tokens).tolist()


def child_arguments(
    model: Path,
    store: Path,
    policy: str,
    name: str,
    seed: int,
    prompt_tokens: int,
    total: int,
    seconds: float = 0,
) -> list[str]:
    """The command line of this file."""
    values = (model, store, policy, name, seed, prompt_tokens, total, seconds)
    return [sys.executable, __file__, *map(str, values)]


def main() -> None:
    model_directory, directory, policy, name, seed, prompt_tokens, total, seconds = sys.argv[1:]
    model = load_model(model_directory, dtype="float32")
    plan = (
        resident_plan(model, max_context=CONTEXT)
        if policy == "resident"
        else layer_plan(model, policy, max_context=CONTEXT)
    )
    commit = Session.commit

    def told(self: Session, *arguments: Any, **options: Any) -> None:
        commit(self, *arguments, **options)
        print(f"committed {self.stored}", flush=True)

    def go_on(name: str, prompt: list[int]) -> None:
        with store.open(name, prompt[:-1]) as session:
            tokens = session.tokens if session.committed else prompt
            if len(tokens) < int(total):
                new = int(total) - len(tokens)
                for _ in engine.generate([tokens], max_new_tokens=new, ignore_eos=True, sessions=[session]):
                    pass
            else:  # killed after its last commit, and before it could say so
                print(f"committed {session.stored}", flush=True)

    with (
        patch.object(Session, "commit", told),
        patch("swapkv_jax.engine.compile_program", compile_once),
        Engine(model, plan, store_dir=Path(directory)) as engine,
    ):
        print("ready", flush=True)
        store = SessionStore(Path(directory), identity=identity_of(model), durability="group")
        go_on(name, prompt_of(int(seed), int(prompt_tokens)))
        ends, more = time.monotonic() + float(seconds), 0
        while time.monotonic() < ends:
            more += 1
            go_on(f"{name}-{more}", prompt_of(int(seed) + more, int(prompt_tokens)))
            print(f"session {name}-{more} {int(seed) + more}", flush=True)
        store.close()
    print("done", flush=True)


if __name__ == "__main__":
    main()
