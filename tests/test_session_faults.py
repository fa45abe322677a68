"""Faults below the store and damage at rest: an error that names the file, or all as it was; never a wrong token.

Every fault is injected into a life of sessions (grow, commit, branch off, fork, share, read back). Whatever happens,
the store opens afterwards, each session has the token ids of its last commit, and its keys and values are those of
these ids or are refused by name.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from sessions_kit import LAYERS, check, content, open_store, say

from swapkv_jax.errors import SwapKVError, TierError
from swapkv_jax.sessions import Session, SessionStore
from swapkv_jax.sessions.salvage import catalog_problems, salvage
from swapkv_jax.sessions.verify import verify
from swapkv_jax.tiers import Syscalls, aligned_buffer
from swapkv_jax.tiers.header import COPY_BYTES

INJECTED: Counter[str] = Counter()

NOTHING = np.empty(0, np.uint8)
Call = Callable[[np.ndarray], int]
Fault = Callable[[Call, np.ndarray], int]


class Faulty(Syscalls):
    """Calls of one kind go wrong from the `first` on, `times` of them. Counts all calls by kind."""

    def __init__(self, kind: str = "", first: int = 0, times: int = 0, fault: Fault | None = None) -> None:
        self.kind, self.first, self.times, self.fault = kind, first, times, fault
        self.calls: Counter[str] = Counter()
        self.hits = 0

    def _call(self, kind: str, call: Call, buffer: np.ndarray = NOTHING) -> int:
        index = self.calls[kind]
        self.calls[kind] += 1
        if kind == self.kind and self.fault and self.first <= index < self.first + self.times:
            self.hits += 1
            return self.fault(call, buffer)
        return call(buffer)

    def open(self, path, flags, mode=0o600):
        real = super().open
        return self._call("open", lambda _: real(path, flags, mode))

    def read_at(self, descriptor, buffer, offset):
        real = super().read_at
        return self._call("read", lambda part: real(descriptor, part, offset), buffer)

    def write_at(self, descriptor, buffer, offset):
        real = super().write_at
        return self._call("write", lambda part: real(descriptor, part, offset), buffer)

    def reserve(self, descriptor, offset, length):
        real = super().reserve
        self._call("reserve", lambda _: real(descriptor, offset, length) or 0)

    def flush(self, descriptor):
        real = super().flush
        self._call("flush", lambda _: real(descriptor) or 0)


def error(code: int) -> Fault:
    def fault(call: Call, buffer: np.ndarray) -> int:
        raise OSError(code, os.strerror(code))

    return fault


def short(call: Call, buffer: np.ndarray) -> int:
    """Only the first sector is moved."""
    return call(buffer[:512])


def torn(call: Call, buffer: np.ndarray) -> int:
    """A write that is said to be done, of which the second half is not."""
    other = aligned_buffer(buffer.size)
    other[...] = buffer
    other[buffer.size // 2 :] = 0
    return call(other)


def flipped(call: Call, buffer: np.ndarray) -> int:
    """A bit arrives wrong."""
    moved = call(buffer)
    if moved > 99:
        buffer[99] ^= 16
    return moved


@dataclass
class Log:
    """What sessions were committed with: acknowledged, and perhaps one more that was not."""

    acknowledged: dict[str, list[int]] = field(default_factory=dict)
    attempted: dict[str, list[int]] = field(default_factory=dict)

    def commit(self, session: Session, ids: Iterable[int]) -> None:
        ids = list(ids)
        self.attempted[session.name] = ids
        session.commit(ids, {"n": len(ids)}, close=True)
        self.acknowledged[session.name] = ids

    def possible(self, name: str) -> list[list[int]]:
        return [log[name] for log in (self.acknowledged, self.attempted) if name in log]


def life(directory: Path, log: Log, syscalls: Syscalls | None = None) -> None:
    with open_store(directory, durability="group", syscalls=syscalls) as store:
        with store.open("a") as session:
            say(session, range(100))
            log.commit(session, range(100))
            say(session, range(260))
            log.commit(session, range(260))
        log.attempted["b"] = log.acknowledged["a"]
        store.fork("a", "b")
        log.acknowledged["b"] = log.acknowledged["a"]
        with store.open("a") as session:
            session.truncate(150)
            other = [*range(150), *range(500, 600)]
            say(session, other)
            log.commit(session, other)
            check(session, other)
        with store.open("c", range(200)) as session:
            more = [*range(192), *range(700, 800)]
            say(session, more)
            log.commit(session, more)
        for name, ids in log.acknowledged.items():
            with store.open(name) as session:
                check(session, ids)


@contextmanager
def refusals(directory: Path) -> Iterator[list[str]]:
    """Errors that name a file, or a session by name, end the block and are listed; others are failures."""
    seen: list[str] = []
    try:
        yield seen
    except SwapKVError as refused:
        message = str(refused)
        seen.append(message)
        if str(directory) not in message and not any(f"session {name!r}" in message for name in "abc"):
            raise AssertionError(f"names no file: {message}") from refused


def survived(directory: Path, log: Log, *, damaged: bool = False) -> str:
    """Everything that was acknowledged is there. With `damaged`, keys and values may be refused, but not be wrong.

    Returns "correct", or "refused" if some were.
    """
    outcome = "correct"
    with open_store(directory) as store:
        names = {info.name for info in store.list()}
        assert log.acknowledged.keys() <= names <= log.attempted.keys()
        for name in sorted(names):
            with store.open(name) as session:
                ids = session.tokens
                assert ids in log.possible(name)
                with refusals(directory) as refused:
                    check(session, ids[: session.stored])
                    assert damaged or session.stored == len(ids)
                if refused:
                    assert damaged, refused
                    outcome = "refused"
                    continue
                if session.stored < len(ids):
                    outcome = "shortened"
                say(session, [*ids, *range(90)])
                session.commit([*ids, *range(90)], {})
                check(session, [*ids, *range(90)])
    return outcome


def inject(directory: Path, kind: str, first: int, times: int, fault: Fault, *, silent: bool = False) -> str:
    """One life with a fault; how it ended."""
    shutil.rmtree(directory, ignore_errors=True)
    log, syscalls = Log(), Faulty(kind, first, times, fault)
    with refusals(directory) as raised:
        life(directory, log, syscalls)
    assert syscalls.hits, "no fault was injected"
    INJECTED[kind] += 1
    outcome = survived(directory, log, damaged=silent)
    return f"{'raised' if raised else 'overcome'}, {outcome}"


FAULTS: list[tuple[str, str, int, Fault]] = [
    *((kind, "EIO once", 1, error(errno.EIO)) for kind in ("read", "write")),
    *((kind, "EIO", 50, error(errno.EIO)) for kind in ("open", "read", "write", "reserve", "flush")),
    *((kind, "EINTR", 1, error(errno.EINTR)) for kind in ("read", "write")),
    *((kind, "short", 1, short) for kind in ("read", "write")),
    *((kind, "ENOSPC", 50, error(errno.ENOSPC)) for kind in ("open", "write", "reserve")),
    ("read", "flipped", 1, flipped),
    ("read", "flipped always", 50, flipped),
]
PASSING = {"EIO once", "EINTR", "short", "flipped"}


def calls(directory: Path) -> Counter[str]:
    syscalls, log = Faulty(), Log()
    life(directory, log, syscalls)
    assert survived(directory, log) == "correct"
    return syscalls.calls


def places(total: int, most: int) -> list[int]:
    """At most so many of the calls, evenly spread."""
    n = min(total, most)
    return sorted({round(i * (total - 1) / max(1, n - 1)) for i in range(n)})


@pytest.mark.parametrize(("kind", "what", "times", "fault"), FAULTS, ids=[f"{f[0]}-{f[1]}" for f in FAULTS])
def test_a_failing_call(tmp_path, kind, what, times, fault):
    total = calls(tmp_path / "store")[kind]
    ended = inject(tmp_path / "store", kind, total // 2, times, fault)
    assert ended == ("overcome, correct" if what in PASSING else "raised, correct")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "what", "times", "fault"), FAULTS, ids=[f"{f[0]}-{f[1]}" for f in FAULTS])
def test_every_call_failing(tmp_path, kind, what, times, fault):
    total = calls(tmp_path / "store")[kind]
    for first in places(total, 60):
        ended = inject(tmp_path / "store", kind, first, times, fault)
        if (
            what in PASSING and first > 0
        ):  # the very first one asks what the disk can do, and takes no for an answer
            assert ended == "overcome, correct", (first, ended)


@pytest.mark.slow
def test_every_write_torn(tmp_path):
    """As by a loss of power under a disk that lies about flushes."""
    ends = Counter(
        inject(tmp_path / "store", "write", first, 1, torn, silent=True)
        for first in range(calls(tmp_path / "store")["write"])
    )
    assert ends["overcome, refused"] + ends["raised, refused"] > 5


# ---- damage at rest ----


def image(directory: Path) -> Log:
    """What a process that was killed leaves: the log beside the catalogue not emptied yet."""
    log, work = Log(), directory.with_name("work")
    life(work, log)
    with open_store(work) as store, store.open("a") as session:
        ids = [*log.acknowledged["a"], *range(50)]
        say(session, ids)
        log.commit(session, ids)
        shutil.copytree(work, directory)
    shutil.rmtree(work)
    assert (directory / "catalog.sqlite-wal").stat().st_size
    return log


def damage_and_open(pristine: Path, directory: Path, log: Log, damage: Callable[[Path], None]) -> str:
    """What becomes of a damaged copy of a store: as it opens, and when it was repaired."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(pristine, directory)
    damage(directory)
    outcome = "refused"
    with refusals(directory):
        outcome = never_wrong(directory, log)
    if not (directory / "catalog.sqlite").exists():
        return outcome
    if catalog_problems(directory):
        salvage(directory)
        outcome += ", salvaged"
    assert verify(directory, repair=True).intact
    assert verify(directory).findings == []
    never_wrong(directory, log)
    return outcome


def never_wrong(directory: Path, log: Log) -> str:
    """Reads all there is: token ids must be ones that were committed, keys and values theirs, or be refused."""
    outcome = "correct"
    with open_store(directory) as store:
        names = {info.name for info in store.list()}
        assert names <= log.acknowledged.keys()
        if names != log.acknowledged.keys():
            outcome = "lost"
        for name in names:
            with refusals(directory) as refused:
                outcome = max(outcome, read_all(store, name, log), key=len)
            outcome = "refused" if refused else outcome
    return outcome


def read_all(store: SessionStore, name: str, log: Log) -> str:
    with store.open(name) as session:
        ids = session.tokens
        current = ids == log.acknowledged[name]
        # A damaged log beside the catalogue takes back the last commits: then it is an older one.
        assert current or ids in HISTORY[name], f"session {name!r} has token ids that nobody committed"
        for layer in range(LAYERS):
            for got, expected in zip(session.kv(layer), content(layer, ids[: session.stored]), strict=True):
                np.testing.assert_array_equal(got, expected)
        return "correct" if current and session.stored == len(ids) else "an older or shorter one"


HISTORY = {
    "a": [list(range(100)), list(range(260)), [*range(150), *range(500, 600)]],
    "b": [],
    "c": [],
}


def flip(name: str, place: float, bit: int) -> Callable[[Path], None]:
    """A bit at a part of a file, or at an offset in it."""

    def damage(directory: Path) -> None:
        path = files_of(directory)[name]
        offset = int(place * (path.stat().st_size - 1)) if place < 1 else int(place)
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1 << bit]))

    return damage


def cut(name: str, place: float) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = files_of(directory)[name]
        os.truncate(path, int(place * path.stat().st_size))

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: files_of(directory)[name].unlink()


def files_of(directory: Path) -> dict[str, Path]:
    paths = sorted(directory.glob("*.kv"), key=lambda path: (path.stat().st_size, path.name))
    names = {f"data{i}": path for i, path in enumerate(paths)}
    return {**names, "catalogue": directory / "catalog.sqlite", "log": directory / "catalog.sqlite-wal"}


def damages(seed: int, each: int) -> list[tuple[str, Callable[[Path], None]]]:
    draw = random.Random(seed)
    names = ["data0", "data1", "data2", "catalogue", "log"]
    found: list[tuple[str, Callable[[Path], None]]] = [(f"remove {name}", remove(name)) for name in names]
    for name in names:
        found += [(f"cut {name}", cut(name, draw.random())) for _ in range(each // 4 + 1)]
        found += [(f"flip {name}", flip(name, draw.random(), draw.randrange(8))) for _ in range(each)]
    for copy in range(2):
        places = [copy * COPY_BYTES + draw.randrange(8, 500) for _ in range(each // 4 + 1)]
        found += [("flip a header", flip("data2", place, draw.randrange(8))) for place in places]
    return found


def test_damage_at_rest(tmp_path):
    log = image(tmp_path / "pristine")
    ends = Counter(
        damage_and_open(tmp_path / "pristine", tmp_path / "store", log, damage) for _, damage in damages(0, 1)
    )
    assert ends["correct"] < sum(ends.values())


@pytest.mark.slow
def test_much_damage_at_rest(tmp_path):
    log = image(tmp_path / "pristine")
    ends: Counter[str] = Counter()
    for what, damage in damages(1, 60):
        ended = damage_and_open(tmp_path / "pristine", tmp_path / "store", log, damage)
        ends[f"{what}: {ended}"] += 1
        INJECTED[what] += 1
    print(*sorted(ends.items()), sep="\n")
    assert sum(n for what, n in ends.items() if "refused" in what) > 20


@pytest.mark.slow
def test_a_full_disk_keeps_what_is_committed(tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir(mode=0o700)
    options = ["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "tmpfs", str(mount)]
    if subprocess.run(options, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs takes privileges")
    try:
        for left in range(0, 1 << 20, 1 << 14):
            log = Log()
            with open_store(mount) as store, store.open("a") as session:
                say(session, range(100))
                log.commit(session, range(100))
                free = os.statvfs(mount).f_bavail * 4096
                (mount / "ballast").write_bytes(bytes(max(0, free - left)))
                with suppress(TierError):
                    for i in range(1, 99):
                        ids = [*range(100), *range(1000, 1000 + 40 * i)]
                        say(session, ids)
                        log.commit(session, ids)
                INJECTED["a full disk"] += 1
                (mount / "ballast").unlink()
            survived(mount, log)
            for path in mount.iterdir():
                path.unlink()
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.slow
def test_enough_faults_were_injected():
    """Counts what the slow tests above injected into lives and into what they left."""
    print(*sorted(INJECTED.items()), sep="\n")
    if not INJECTED.keys() >= {"read", "write", "a full disk", "flip catalogue"}:
        pytest.skip("not all tests above ran in this process")
    assert sum(INJECTED.values()) >= 500
