"""`python -m swapkv_jax.store`: what it says, mends, moves and deletes, and how it ends."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from sessions_kit import IDENTITY, LAYERS, check, content, open_store, say

from swapkv_jax.errors import TierError
from swapkv_jax.sessions import AesGcm, Identity, SessionStore
from swapkv_jax.store import main
from swapkv_jax.tiers.header import COPY_BYTES, HEADER_BYTES


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two sessions: `b` began as `a`."""
    path = tmp_path / "store"
    with open_store(path) as store:
        with store.open("a") as session:
            say(session, range(300))
            session.commit([*range(300), 7], {"turn": 1}, close=True)
        with store.open("b", range(300)) as session:
            say(session, [*range(256), *range(100)])
            session.commit([*range(256), *range(100)], {})
    return path


def run(directory: Path, *arguments: str | Path, key: Path | None = None) -> int:
    keys = ["--key-file", str(key)] if key else []
    return main(["--store-dir", str(directory), *keys, *map(str, arguments)])


def poke(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def intact(directory: Path) -> None:
    with open_store(directory) as store:
        with store.open("a") as session:
            assert (session.tokens, session.state) == ([*range(300), 7], {"turn": 1})
            check(session, range(300))
        with store.open("b") as session:
            check(session, [*range(256), *range(100)])


def test_list_and_show(directory, capsys):
    assert run(directory, "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["NAME", "TOKENS", "STORED"],
        ["a", "301", "300"],
        ["b", "356", "356"],
    ]
    with open_store(directory) as store, store.open("b"):
        assert run(directory, "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["bytes"] > 100_000
    a, b = listed["sessions"]
    assert (a["name"], a["tokens"], a["in_use"], b["in_use"]) == ("a", 301, False, True)
    assert a["shared_bytes"] == b["shared_bytes"] > 0 < b["own_bytes"]
    assert run(directory, "show", "b") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["identity"]["fingerprint"] == "model-1"
    assert [part["groups"] for part in shown["files"]] == [4, 1]
    assert run(directory, "show", "x") == 2
    assert "no session 'x'; there are a, b" in capsys.readouterr().err


def test_as_a_program(directory, tmp_path):
    command = [sys.executable, "-m", "swapkv_jax.store", "--store-dir"]
    done = subprocess.run([*command, str(directory), "verify"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"2 sessions, {LAYERS * 9} records read" in done.stderr
    done = subprocess.run(
        [*command, str(tmp_path / "no"), "list"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no sessions are stored in" in done.stderr
    assert not (tmp_path / "no").exists()


def test_verify_mends_a_header_and_cuts_off_damaged_records(directory, capsys):
    with open_store(directory) as store, store.open("a") as session:
        (file,) = session._opened.values()
        path, place = file.path, file.runs(1, 2, 1)[0].file_offset
    poke(path, COPY_BYTES + 40)
    poke(path, place + 100)
    for _ in range(2):
        assert run(directory, "verify") == 1
        out, err = capsys.readouterr()
        assert f"python -m swapkv_jax.store --store-dir {directory} verify --repair" in err
        assert f"copy 1 of the header of {path} is damaged" in out
        assert out.count("layer 1, group 2 in ") == 2
        assert "repaired" not in out
    with (
        open_store(directory) as store,
        store.open("a") as session,
        pytest.raises(
            TierError, match=f"written; .* --store-dir {directory} verify --repair keeps what is intact"
        ),
    ):
        session.kv(1)
    assert run(directory, "verify", "--repair") == 0
    out, err = capsys.readouterr()
    assert "verify --repair" not in out + err
    assert out.count("kept K and V of 128 of ") == 2
    assert "written anew from the other copy" in out
    assert run(directory, "verify") == 0
    with open_store(directory) as store:
        for name, ids in (("a", [*range(300), 7]), ("b", [*range(256), *range(100)])):
            with store.open(name) as session:
                assert session.tokens == ids
                check(session, range(128))
                say(session, ids)
                session.commit(ids, {})
    assert run(directory, "verify", "a", "b") == 0


def test_verify_skips_what_is_in_use_or_has_another_key(directory, tmp_path, capsys):
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    with open_store(directory, cipher=AesGcm.from_file(key)) as store, store.open("secret") as session:
        say(session, range(70))
        session.commit(range(70), {})
    with open_store(directory) as store, store.open("a"):
        assert run(directory, "verify", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["intact"]
    assert found["sessions"] == 1
    assert found["skipped"] == {
        "a": "it is in use",
        "secret": "it is encrypted with a key that was not given",
    }
    assert run(directory, "verify", "secret", key=key) == 0
    capsys.readouterr()
    assert run(directory, "verify", "a", "secret") == 1  # named, and not looked at
    assert "session 'secret' was not looked at" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["row", "page", "head"])
def test_verify_saves_what_is_intact_of_a_damaged_catalogue(directory, capsys, damage):
    path = directory / "catalog.sqlite"
    assert not Path(f"{path}-wal").exists()
    if damage == "row":
        ids = np.array([*range(300), 7], "<i4").tobytes()  # a's, which no overflow page breaks up
        poke(path, path.read_bytes().index(ids[:400]) + 40)
    elif damage == "page":
        with sqlite3.connect(path) as db:
            (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'spans_by_file'").fetchone()
        db.close()
        poke(path, (page - 1) * 4096)
    else:
        path.write_bytes(b"x" * 100 + path.read_bytes()[100:])
    files = set(directory.glob("*.kv"))
    assert run(directory, "verify") == 1
    assert str(path) in capsys.readouterr().out
    assert set(directory.glob("*.kv")) == files
    assert run(directory, "verify", "--repair") == (0 if damage == "page" else 1)
    out, err = capsys.readouterr()
    assert f"the old one is {path}.quarantined-1" in out
    assert "verify --repair" not in out + err
    if damage == "head":
        assert "0 sessions are in a new catalogue, nobody can tell how many could not be saved" in out
        assert "2 session files are left that no catalogue knows" in err
        assert f"--store-dir {directory} sweep" in err
    assert run(directory, "verify") == 0
    if damage == "page":
        intact(directory)
    elif damage == "row":
        with open_store(directory) as store:
            assert [info.name for info in store.list()] == ["b"]
            with store.open("b") as session:
                check(session, [*range(256), *range(100)])


@pytest.mark.parametrize("damage", ["short", "noise"])
def test_repair_says_that_sessions_are_gone(directory, capsys, damage):
    path = directory / "catalog.sqlite"
    whole = path.read_bytes()
    path.write_bytes(whole[:9000] if damage == "short" else np.random.default_rng(1).bytes(len(whole)))
    assert run(directory, "verify", "--repair") == 1
    out, err = capsys.readouterr()
    assert "0 could not be saved" not in out
    assert "2 session files are left that no catalogue knows" in err
    assert run(directory, "list") == 0
    assert "2 session files are left that no catalogue knows" in capsys.readouterr().err
    assert len(list(directory.glob("*.kv"))) == 2
    assert run(directory, "sweep") == 0
    assert not list(directory.glob("*.kv"))


def test_an_empty_catalogue_loses_no_file(directory, capsys):
    (directory / "catalog.sqlite").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(TierError, match=r"catalog\.sqlite is empty, so nobody can tell whose 2 files"):
            open_store(directory)
        for command in (
            ["list"],
            ["show", "a"],
            ["verify"],
            ["verify", "--repair"],
            ["delete", "a"],
            ["gc", "1KiB"],
        ):
            assert run(directory, *command) == 1
            out, err = capsys.readouterr()
            assert "catalog.sqlite is empty, so nobody can tell whose 2 files" in out + err
    assert len(list(directory.glob("*.kv"))) == 2


def test_a_missing_catalogue_loses_no_file(directory, capsys):
    os.rename(directory / "catalog.sqlite", directory / "elsewhere")
    files = set(directory.glob("*.kv"))
    for command in (["list"], ["verify"], ["verify", "--repair"]):
        assert run(directory, *command) == 1
        assert "catalog.sqlite is missing, so nobody can tell whose 2 files" in capsys.readouterr().err
    with pytest.raises(TierError, match=r"catalog\.sqlite is missing, so nobody can tell whose 2 files"):
        open_store(directory)
    assert set(directory.glob("*.kv")) == files
    os.rename(directory / "elsewhere", directory / "catalog.sqlite")
    intact(directory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_and_import(tmp_path, capsys, dtype):
    identity = Identity(**{**{f: getattr(IDENTITY, f) for f in IDENTITY.__struct_fields__}, "dtype": dtype})
    source, target, file = tmp_path / "one", tmp_path / "two", tmp_path / "a.safetensors"
    with SessionStore(source, identity=identity) as store, store.open("a") as session:
        kv = [
            tuple(part.astype(session._layout.dtype) for part in content(i, range(130)))
            for i in range(LAYERS)
        ]
        for layer, (k, v) in enumerate(kv):
            session.write(layer, 0, k, v)
        session.commit([*range(130), 7], {"turn": 1})
    assert run(source, "export", "a", file) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    if dtype == "float32":
        tensors = load_file(file)
        assert tensors["tokens"].tolist() == [*range(130), 7]
        np.testing.assert_array_equal(tensors["v.2"], kv[2][1])
    assert run(source, "export", "a", file) == 2
    assert "name a new file" in capsys.readouterr().err
    assert run(source, "import", file) == 2
    assert "there is a session 'a' already" in capsys.readouterr().err
    assert run(target, "import", file, "--name", "z") == 0
    with SessionStore(target, identity=identity) as store, store.open("z") as session:
        assert (session.tokens, session.state, session.stored) == ([*range(130), 7], {"turn": 1}, 130)
        for layer, (k, v) in enumerate(kv):
            for got, expected in zip(session.kv(layer), (k, v), strict=True):
                np.testing.assert_array_equal(got, expected)
    poke(file, file.stat().st_size - 5)
    assert run(target, "import", file, "--name", "y") == 1
    assert "damaged" in capsys.readouterr().err
    os.truncate(file, file.stat().st_size - 5)
    assert run(target, "import", file, "--name", "y") == 1
    assert "truncated" in capsys.readouterr().err
    file.write_text("nonsense" * 9)
    assert run(target, "import", file) == 2
    assert "not an exported session" in capsys.readouterr().err
    assert run(target, "verify") == 0


def test_delete_gc_and_sweep(directory, capsys):
    assert run(directory, "delete", "a", "x") == 2
    assert run(directory, "delete", "a") == 0
    assert np.arange(20, 90, dtype="<i4").tobytes() in (directory / "catalog.sqlite").read_bytes()  # b's
    with open_store(directory) as store:
        assert [info.name for info in store.list()] == ["b"]
        with store.open("b") as session:
            check(session, [*range(256), *range(100)])
            capsys.readouterr()
            assert run(directory, "delete", "b") == 1
            assert "session 'b' is in use" in capsys.readouterr().err
            assert run(directory, "gc", "1KiB") == 1
            assert "still takes" in capsys.readouterr().err
    assert run(directory, "delete", "b", "b") == 0
    assert np.arange(20, 90, dtype="<i4").tobytes() not in (directory / "catalog.sqlite").read_bytes()
    with open_store(directory) as store, store.open("b") as session:
        say(session, range(100))
        session.commit(range(100), {})
    assert run(directory, "gc", "100KiB") == 0
    assert capsys.readouterr().out == "b\n"
    with open_store(directory) as store:
        assert store.list() == []
        assert not list(directory.glob("*.kv"))
    (directory / "session%3Aorphan.kv").write_bytes(bytes(HEADER_BYTES))
    assert run(directory, "sweep") == 0
    assert not list(directory.glob("*.kv"))
    assert run(directory, "gc", "lots") == 2


def test_fork(directory, capsys):
    before = sum(file.stat().st_blocks for file in directory.glob("*.kv"))
    assert run(directory, "fork", "a", "c") == 0
    assert "'c' goes on from where 'a' is" in capsys.readouterr().err
    assert sum(file.stat().st_blocks for file in directory.glob("*.kv")) == before
    with open_store(directory) as store, store.open("c") as session:
        assert session.tokens == [*range(300), 7]
        check(session, range(300))
    intact(directory)
    assert run(directory, "fork", "a", "b") == 2
    assert run(directory, "fork", "x", "d") == 2


def test_gc_names_what_it_deleted_in_vain(directory, capsys):
    with open_store(directory) as store, store.open("c") as session:
        say(session, range(900, 1000))
        session.commit(range(900, 1000), {})
        assert run(directory, "gc", "1KiB") == 1
        assert sorted(capsys.readouterr().out.split()) == ["a", "b"]
        assert [info.name for info in store.list()] == ["c"]


def test_flags_go_before_the_command_or_after_it(directory, tmp_path, capsys):
    assert main(["list", "--quiet", "--store-dir", str(directory)]) == 0
    assert capsys.readouterr().err == ""
    assert main(["--quiet", "list", "--store-dir", str(directory)]) == 0
    assert capsys.readouterr().err == ""
    assert run(directory, "verify", "--key-file", tmp_path / "no") == 2
    assert "cannot read the key file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "   ", "n" * 201, "a\nb"])
def test_names_that_cannot_be(directory, tmp_path, capsys, name):
    assert run(directory, "export", "a", tmp_path / "a.safetensors") == 0
    for command in (["import", tmp_path / "a.safetensors", "--name", name], ["fork", "a", name]):
        capsys.readouterr()
        assert run(directory, *command) == 2
        err = capsys.readouterr().err.splitlines()[-1]
        assert "must be 1 to 200 printable characters" in err
        assert "n" * 61 not in err


FULL = """
import os, shutil, sys
from pathlib import Path
from swapkv_jax.store import main
source, disk, out = map(Path, sys.argv[1:])
store = disk / "store"
shutil.copytree(source, store)
with open(disk / "ballast", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        print(error)
def run(*arguments):
    print(arguments[0], main(["--store-dir", str(store), *map(str, arguments)]), flush=True)
run("list")
run("verify")
run("export", "a", out)
run("delete", "t", "b")  # which have no files of their own
run("delete", "c")
run("verify")
run("list")
"""


def test_a_full_disk(directory, tmp_path):
    with open_store(directory) as store:
        for name, ids in (("b", range(256)), ("c", range(900, 1000)), ("t", range(9))):
            with store.open(name) as session:
                session.truncate(0 if name != "b" else 256)
                say(session, ids)
                session.commit(ids, {})
    disk, out = tmp_path / "disk", tmp_path / "a.safetensors"
    disk.mkdir()
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody mount a small disk")
    inside = 'mount -t tmpfs -o size=1m,mode=700 tmpfs "$3" && exec "$1" -c "$0" "$2" "$3" "$4"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inside, FULL, sys.executable, str(directory), str(disk), str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    codes = [line for line in done.stdout.splitlines() if line[-2:] in (" 0", " 1", " 2")]
    assert "No space left on device" in done.stdout
    assert codes == ["list 0", "verify 0", "export 0", "delete 0", "delete 0", "verify 0", "list 0"], done
    assert "1 sessions; everything in" in done.stderr
    assert out.exists()
