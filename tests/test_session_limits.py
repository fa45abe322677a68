"""A store of sessions at its limit: not one byte over it, at any time, and nothing in use is ever evicted."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sessions_kit import check, open_store, say

from swapkv_jax.errors import TierError
from swapkv_jax.sessions import Session, SessionStore
from swapkv_jax.tiers import DiskStore

LIMIT = 1_500_000

pytestmark = pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a tmpfs at /dev/shm")


@contextmanager
def watched(limit: int) -> Iterator[Path]:
    """A directory on a tmpfs whose real size another thread looks at all the time."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="swapkv-test-"))
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            most[0] = max(most[0], real_bytes(directory))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield directory
    finally:
        done.set()
        watcher.join()
        shutil.rmtree(directory)
    assert most[0] <= limit
    assert most[0] > limit // 3, "the limit was never near"


def real_bytes(directory: Path) -> int:
    total = 0
    for name in os.listdir(directory):
        try:
            total += os.lstat(directory / name).st_blocks * 512
        except FileNotFoundError:
            continue
    return total


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_history_stays_under_the_limit(data):
    """Two stores on one directory, as two processes have them, and working sequences of decode beside them."""
    history(data, steps=40)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_many_histories_stay_under_the_limit(data):
    history(data, steps=60)


def history(data: st.DataObject, steps: int) -> None:
    committed: dict[str, list[int]] = {}
    with watched(LIMIT) as directory:
        stores = [open_store(directory, limit_bytes=LIMIT) for _ in range(2)]
        working = DiskStore(directory, limit_bytes=LIMIT, fingerprint="model-1")
        opened: dict[str, tuple[Session, list[int]]] = {}
        actions = st.sampled_from(["talk"] * 6 + ["close", "fork", "delete", "reopen", "decode", "gc"])
        for step in range(steps):
            action, name = data.draw(actions), data.draw(st.sampled_from("abcdef"))
            store = stores[ord(name) % 2]
            known = {info.name for info in store.list()}
            committed = {name: ids for name, ids in committed.items() if name in known}
            assert known == committed.keys()
            assert opened.keys() & committed.keys() == {n for n in opened if opened[n][0].committed}
            if action == "talk":
                talk(store, name, opened, committed, [step] * data.draw(st.integers(30, 700)))
            elif action == "close" and name in opened:
                opened.pop(name)[0].close()
            elif action == "fork" and name in committed and f"{name}2" not in committed:
                with unless_full():
                    store.fork(name, f"{name}2")
                    committed[f"{name}2"] = committed[name]
            elif action == "delete" and name in committed and name not in opened:
                store.delete(name)
            elif action == "reopen":
                index = ord(name) % 2
                for other in [other for other in opened if ord(other) % 2 == index]:
                    opened.pop(other)[0].close()
                store.close()
                stores[index] = open_store(directory, limit_bytes=LIMIT)
            elif action == "gc":
                with suppress(TierError):  # what is in use takes more
                    store.gc(LIMIT // 2)
            elif action == "decode":
                decode(working, f"w{step}")
        for session, ids in opened.values():
            check(session, ids)
            session.close()
        for name, ids in committed.items():
            if name in {info.name for info in stores[0].list()}:
                with stores[0].open(name) as session:
                    check(session, ids)
        working.close()
        for store in stores:
            store.close()


@contextmanager
def unless_full() -> Iterator[None]:
    """The block, as far as there is room for it."""
    try:
        yield
    except TierError as error:
        if "is full" not in str(error):
            raise


def talk(
    store: SessionStore,
    name: str,
    opened: dict[str, tuple[Session, list[int]]],
    committed: dict[str, list[int]],
    new: list[int],
) -> None:
    """Opens the session if it is not, says more, commits: or is told that there is no room, and has lost nothing."""
    with unless_full():
        if name not in opened:
            session = store.open(name)
            opened[name] = session, session.tokens
        session, ids = opened[name]
        say(session, ids + new)
        session.commit(ids + new, {})
        opened[name] = session, ids + new
        committed[name] = ids + new
    if name in opened:
        session, ids = opened[name]
        session.truncate(len(ids))
        check(session, ids)


def decode(working: DiskStore, name: str) -> None:
    """A working sequence of decode comes and is past."""
    with unless_full():
        working.create(name, layers=3, group_tokens=4, payload_bytes=1000, prompt_groups=40)
        working.finish(name)
