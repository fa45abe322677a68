"""Durable sessions: what is committed is there, whoever comes for it, and nothing else is."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sessions_kit import IDENTITY, LAYERS, check, content, open_store, say

from swapkv_jax.errors import TierError, UsageError
from swapkv_jax.sessions import SESSION_GROUP, Identity, Session, SessionStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    with open_store(tmp_path / "store") as store:
        yield store


# ---- what is written is read back ----


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_a_session_survives_the_process(tmp_path, tokens):
    ids = list(range(tokens))
    with open_store(tmp_path) as store, store.open("s") as session:
        assert (session.tokens, session.stored, session.state) == ([], 0, {})
        say(session, ids)
        session.commit([*ids, 7], {"seed": 3, "text": "ü"}, close=True)
    with open_store(tmp_path) as store, store.open("s") as session:
        assert (session.tokens, session.stored, session.reused) == ([*ids, 7], tokens, tokens)
        assert session.state == {"seed": 3, "text": "ü"}
        check(session, ids)
        say(session, [*ids, 7, *range(300)])
        check(session, [*ids, 7, *range(300)])


def test_what_is_not_committed_is_gone(tmp_path):
    with open_store(tmp_path) as store:
        with store.open("s") as session:
            say(session, range(100))
            session.commit(range(100), {})
            say(session, range(500))
        with store.open("s") as session:
            assert session.stored == 100
            check(session, range(100))
            say(session, [*range(100), *range(9)])
            check(session, [*range(100), *range(9)])
        with store.open("never") as session:
            say(session, range(200))
        assert [info.name for info in store.list()] == ["s"]
        files = sorted(path.suffix for path in tmp_path.iterdir())
        assert files.count(".kv") == 1


def test_token_by_token_in_any_order_of_layers(store):
    with store.open("s") as session:
        ids = list(range(150))
        for at, token in enumerate(ids):
            for layer in np.random.default_rng(at).permutation(LAYERS):
                k, v = content(int(layer), ids[: at + 1])
                session.write(int(layer), at, k[:, :, at:], v[:, at:])
            if at % 40 == 39:
                session.commit([*ids[: at + 1], token], {})
                check(session, ids[: at + 1])
        check(session, ids)


def test_layers_of_different_lengths_count_as_far_as_all_reach(tmp_path):
    """As an interrupted prefill leaves them."""
    with open_store(tmp_path) as store, store.open("s") as session:
        say(session, range(100))
        session.commit(range(100), {})
        longer = list(range(300))
        for layer, end in enumerate((300, 130, 110)):
            k, v = content(layer, longer[:end])
            session.write(layer, 100, k[:, :, 100:], v[:, 100:])
        check(session, longer[:110])
        session.commit(longer, {}, close=True)
    with open_store(tmp_path) as store, store.open("s") as session:
        assert (session.tokens, session.stored) == (longer, 110)
        check(session, longer[:110])


def test_gaps_shapes_and_other_tokens_are_refused(store):
    with store.open("s") as session:
        k, v = content(0, range(5))
        with pytest.raises(ValueError, match="layer 0 has 0 tokens: cannot write from 1 on"):
            session.write(0, 1, k, v)
        for bad in ((k[:1], v), (k, v[:, :4]), (k.astype(np.float16), v)):
            with pytest.raises(ValueError, match="float32"):
                session.write(0, 0, *bad)
        say(session, range(5))
        with pytest.raises(ValueError, match="5 tokens are stored, 4 token ids"):
            session.commit(range(4), {})
        session.commit(range(5), {})
        say(session, range(9))
        with pytest.raises(ValueError, match="other token ids"):
            session.commit([9, *range(1, 9)], {})
        session.commit(range(9), {})
    with pytest.raises(TierError, match="'s' is closed"):
        session.commit(range(9), {})


# ---- another way from the middle ----


def test_going_another_way_leaves_the_commit_alone(tmp_path):
    """Wherever it branches off; the old way is there until the new one is committed."""
    old = list(range(200))
    for branch in (0, 1, 64, 100, 128, 192, 199, 200):
        new = [*old[:branch], *range(1000, 1150)]
        with open_store(tmp_path) as store:
            with store.open(f"s{branch}") as session:
                say(session, old)
                session.commit(old, {})
            with store.open(f"s{branch}") as session:
                session.truncate(branch)
                assert session.tokens == old[:branch]
                check(session, old[:branch])
                say(session, new)
                check(session, new)
            with store.open(f"s{branch}") as session:
                check(session, old)
                k, v = content(0, new)
                session.write(0, branch, k[:, :, branch:], v[:, branch:])  # the same, said by writing
                say(session, new)
                session.commit(new, {})
                check(session, new)
        with open_store(tmp_path) as store, store.open(f"s{branch}") as session:
            assert session.tokens == new
            check(session, new)


# ---- sharing ----


def test_a_prefix_is_shared_by_its_token_ids(tmp_path):
    with open_store(tmp_path) as store:
        with store.open("a") as session:
            say(session, range(300))
            session.commit(range(300), {"mine": 1})
        used = store.bytes_used
        other = [*range(200), *range(5000, 5100)]
        with store.open("b", other) as session:
            assert session.stored == session.reused == 192
            assert (session.tokens, session.state) == (list(range(192)), {})
            check(session, range(192))
            say(session, other)
            session.commit(other, {})
        assert store.bytes_used - used < used
        with store.open("c", [1, *range(1, 300)]) as session:
            assert session.stored == 0
        assert any("no stored session begins with" in note for note in store.notes)
        store.delete("a")
        with store.open("b") as session:
            check(session, other)
        with store.open("d", range(300)) as session:
            assert session.stored == 192
        store.delete("b")
        assert not list(tmp_path.glob("*.kv"))


def test_a_fork_goes_its_own_way(tmp_path):
    with open_store(tmp_path) as store:
        with store.open("a") as session:
            say(session, range(150))
            session.commit([*range(150), 3], {"n": 1})
            store.fork("a", "b")
            say(session, [*range(150), 3, *range(200)])
            session.commit([*range(150), 3, *range(200)], {"n": 2})
            with store.open("b") as fork:
                assert (fork.tokens, fork.state) == ([*range(150), 3], {"n": 1})
                mine = [*range(150), 3, *range(900, 1100)]
                say(fork, mine)
                fork.commit(mine, {})
                check(fork, mine)
            check(session, [*range(150), 3, *range(200)])
            session.truncate(70)  # into what the fork shares
            say(session, [*range(70), *range(80)])
            session.commit([*range(70), *range(80)], {})
        with store.open("a") as one, store.open("b") as two:
            check(one, [*range(70), *range(80)])
            check(two, mine)
        for taken, message in [("a", "already"), ("c", "")]:
            if message:
                with pytest.raises(UsageError, match=message):
                    store.fork("b", taken)
        with pytest.raises(UsageError, match="no session 'x'"):
            store.fork("x", "y")


@pytest.mark.parametrize(
    ("field", "value"),
    [("fingerprint", "other"), ("dtype", "bfloat16"), ("format_version", 2), ("layers", 4), ("head_dim", 16)],
)
def test_another_model_never_matches(tmp_path, field, value):
    with open_store(tmp_path) as store, store.open("s") as session:
        say(session, range(100))
        session.commit(range(100), {})
    values = {name: getattr(IDENTITY, name) for name in IDENTITY.__struct_fields__}
    other = Identity(**{**values, field: value})
    with SessionStore(tmp_path, identity=other) as store:
        with pytest.raises(
            UsageError, match="give --dtype float32" if field == "dtype" else f"'s' was made by .*{field} "
        ):
            store.open("s")
        with store.open("t", range(100)) as session:
            assert session.stored == 0
        assert "1 of another model" in store.notes[-1]
        assert [info.name for info in store.list()] == ["s"]


# ---- several at once, and what is lost ----


def test_a_second_writer_is_refused(tmp_path):
    with open_store(tmp_path) as store, open_store(tmp_path) as elsewhere:
        with store.open("s") as session:
            say(session, range(100))
            session.commit(range(100), {})
            for refused in (store, elsewhere):
                with pytest.raises(TierError, match="'s' is in use by another process"):
                    refused.open("s")
            with pytest.raises(TierError, match="'s' is in use"):
                elsewhere.delete("s")
            with elsewhere.open("t", range(100)) as other:
                check(other, range(64))
                say(session, range(400))
                say(other, [*range(64), *range(99)])
                other.commit([*range(64), *range(99)], {})
                session.commit(range(400), {})
                check(other, [*range(64), *range(99)])
                check(session, range(400))
        with elsewhere.open("s") as session:
            check(session, range(400))


def test_a_killed_process_loses_only_what_it_had_not_committed(tmp_path):
    script = f"""
    import os, signal, sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from sessions_kit import open_store, say
    store = open_store({str(tmp_path)!r})
    session = store.open("s")
    say(session, range(100))
    session.commit(range(100), {{}})
    say(session, range(1000))
    say(store.open("t"), range(700))
    os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    with open_store(tmp_path) as store:
        assert "an interrupted process left" in store.notes[0]
        assert len(list(tmp_path.glob("*.kv"))) == 1
        assert [info.name for info in store.list()] == ["s"]
        with store.open("s") as session:
            check(session, range(100))
            say(session, [*range(100), *range(300)])
            session.commit([*range(100), *range(300)], {})
        with store.open("s") as session:
            check(session, [*range(100), *range(300)])


@pytest.mark.parametrize("how", ["removed", "truncated"])
def test_what_a_lost_file_held_is_computed_again(tmp_path, how):
    with open_store(tmp_path) as store:
        with store.open("a") as session:
            say(session, range(300))
            session.commit(range(300), {})
        first = next(tmp_path.glob("*.kv"))
        ids = [*range(128), *range(400)]
        with store.open("b", ids) as session:
            say(session, ids)
            session.commit(ids, {"x": 1})
        second = next(path for path in tmp_path.glob("*.kv") if path != first)
    if how == "removed":
        second.unlink()
    else:
        os.truncate(second, 5000)
    with open_store(tmp_path) as store:
        with store.open("b") as session:
            assert (session.tokens, session.stored, session.state) == (ids, 128, {"x": 1})
            check(session, range(128))
            assert f"{second} is " in store.notes[-1]
            say(session, ids)
            session.commit(ids, {})
        with store.open("b") as session:
            check(session, ids)
        with store.open("a") as session:
            check(session, range(300))


# ---- privacy ----


def test_nobody_else_can_look_in(tmp_path):
    with open_store(tmp_path / "store") as store, store.open("s") as session:
        say(session, range(100))
        session.commit(range(100), {})
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in store.directory.iterdir()}
        assert {name.rpartition(".")[2] for name in modes} == {
            "kv",
            "lock",
            "sqlite",
            "sqlite-wal",
            "sqlite-shm",
        }
        assert set(modes.values()) == {0o600}
        assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o702])
def test_a_store_open_to_others_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(UsageError, match=rf"open to other users \(mode {mode:o}\); chmod 700 "):
        open_store(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_store_of_somebody_else_is_refused(tmp_path):
    with patch("os.geteuid", lambda: 12345), pytest.raises(UsageError, match=r"not to 12345 .*--store-dir"):
        open_store(tmp_path)


# ---- room ----


def test_past_sessions_make_room_oldest_first(tmp_path):
    with open_store(tmp_path) as store:
        for name in "abc":
            with store.open(name) as session:
                ids = [*name.encode(), *range(300)]
                say(session, ids)
                session.commit(ids, {})
        store.open("a").close()
        limit = store.bytes_used
    with open_store(tmp_path, limit_bytes=limit + 600_000) as store, store.open("d") as session:
        ids = list(range(1500))
        say(session, ids)
        session.commit(ids, {})
        assert [info.name for info in store.list()] == ["a", "d"]
        assert store.bytes_used <= limit + 600_000
        with pytest.raises(TierError, match="is full"):
            say(session, range(9000))
        session.truncate(1500)
        check(session, ids)


def test_a_source_does_not_make_room_for_its_own_copy(tmp_path):
    with open_store(tmp_path) as store, store.open("a") as session:
        say(session, range(300))
        session.commit(range(300), {})
    with open_store(tmp_path) as store:
        limit = store.bytes_used + 270_000  # no room for a row beside what the catalogue keeps free
    with open_store(tmp_path, limit_bytes=limit) as store:
        with pytest.raises(TierError, match="is full"):
            store.fork("a", "b")
        with store.open("a") as session:
            check(session, range(300))
        with store.open("c", range(300)) as session:
            assert session.stored == 0, "what could have been shared made room"


def test_gc_to_a_budget(store):
    for name in "abc":
        with store.open(name) as session:
            ids = [*name.encode(), *range(300)]
            say(session, ids)
            session.commit(ids, {})
    with store.open("a") as session:
        freed = store.gc(store.bytes_used - 200_000)
        assert freed == ["b"]
        with pytest.raises(TierError, match="still takes"):
            store.gc(0)
        assert [info.name for info in store.list()] == ["a"]
        check(session, [*b"a", *range(300)])


# ---- any history ----


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_history_gives_back_what_was_committed(tmp_path_factory, data):
    """Sessions that grow, branch off, are forked, shared, abandoned and deleted: each stays what it was."""
    directory = tmp_path_factory.mktemp("store")
    committed: dict[str, list[int]] = {}
    with open_store(directory) as store:
        for step in range(data.draw(st.integers(3, 12))):
            action = data.draw(st.sampled_from(["talk", "talk", "talk", "fork", "delete"]))
            name = data.draw(st.sampled_from("abcd"))
            if action == "fork":
                free = next((other for other in "abcd" if other not in committed), None)
                if name in committed and free:
                    store.fork(name, free)
                    committed[free] = committed[name]
            elif action == "delete":
                if committed.pop(name, None) is not None:
                    store.delete(name)
            else:
                committed |= talk(store, name, committed, data, step)
        for name, ids in committed.items():
            with store.open(name) as session:
                assert session.tokens == ids
                check(session, ids[: session.stored])
        for name in committed:
            store.delete(name)
        assert not list(directory.glob("*.kv"))


def talk(
    store: SessionStore, name: str, committed: dict[str, list[int]], data: st.DataObject, step: int
) -> dict[str, list[int]]:
    """Opens a session, lets it go on from anywhere, and maybe commits; what is committed then."""
    old = committed.get(name)
    like = data.draw(st.sampled_from([*committed.values(), [0]]))
    with store.open(name, None if old is not None else like) as session:
        if old is None:
            assert session.stored <= len(like) // SESSION_GROUP * SESSION_GROUP
        old, ids = session.tokens, session.tokens
        check(session, ids[: session.stored])
        saved = {}
        for part in range(data.draw(st.integers(1, 3))):
            keep = data.draw(
                st.sampled_from([len(ids), len(ids), len(ids) // 2, len(ids) * 2 // 3 // 64 * 64])
            )
            if keep < len(ids):
                session.truncate(keep)
            ids = [
                *ids[:keep],
                *range(1000 * step + 100 * part, 1000 * step + data.draw(st.integers(100, 300))),
            ]
            say(session, ids)
            check(session, ids)
            if data.draw(st.booleans()):
                session.commit(ids, {})
                saved = {name: list(ids)}
        return saved


def test_a_session_reads_no_more_than_it_needs(store):
    with store.open("s") as session:
        say(session, range(640))
        session.commit(range(640), {})
    with store.open("s") as session:
        assert isinstance(session, Session)
        before = store.counts
        check(session, range(640))
        after = store.counts
        assert after.reads - before.reads == LAYERS
