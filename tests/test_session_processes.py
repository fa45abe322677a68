"""Two processes in one store: different sessions do not disturb each other, the same one is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from engines import deep_model, resident_plan
from session_child import CONTEXT, child_arguments, prompt_of

from swapkv_jax import Engine, TierError
from swapkv_jax.session_rows import identity_of
from swapkv_jax.sessions import SessionStore

TOTAL, LENGTH = 200, 100


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        child_arguments(*arguments),  # type: ignore[arg-type]
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_for_five_minutes(tmp_path: Path) -> None:
    model_directory, store_directory = tmp_path / "model", tmp_path / "store"
    model = deep_model(model_directory)
    children = [
        start(model_directory, store_directory, policy, f"p{i}", 1000 * i, LENGTH, TOTAL, 300)
        for i, policy in enumerate(("dram-alias", "disk-alias"), start=1)
    ]
    decoded: list[tuple[str, int]] = []
    for child in children:
        out, errors = child.communicate(timeout=500)
        assert child.returncode == 0, errors
        lines = [line.split() for line in out.splitlines()]
        decoded += [
            (name, int(seed)) for kind, name, seed in (line for line in lines if line[0] == "session")
        ]
    assert len(decoded) >= 100
    store = SessionStore(store_directory, identity=identity_of(model))
    with Engine(model, resident_plan(model, max_context=CONTEXT)) as engine:
        for name, seed in decoded[:: max(1, len(decoded) // 50)]:
            prompt = prompt_of(seed, LENGTH)
            steps = engine.generate([prompt], max_new_tokens=TOTAL - LENGTH, ignore_eos=True)
            expected = [*prompt, *(step.tokens[0] for step in steps)]
            with store.open(name) as session:
                assert session.tokens == expected, name
                for layer in range(model.geometry.layers):
                    session.kv(layer)  # verified
    store.close()


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    model_directory, store_directory = tmp_path / "model", tmp_path / "store"
    model = deep_model(model_directory)
    store = SessionStore(store_directory, identity=identity_of(model))
    with store.open("mine") as session:
        with pytest.raises(TierError, match="mine"):
            store.open("mine")
        child = start(model_directory, store_directory, "resident", "mine", 1, LENGTH, TOTAL, 0)
        out, errors = child.communicate(timeout=120)
        assert child.returncode == 1
        assert "mine" in errors.splitlines()[-1]
        assert "TierError" in errors
        assert "done" not in out
        assert session.tokens == []
    store.close()
