"""Encrypted sessions: the same as others with the key, nothing without it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sessions_kit import IDENTITY, check, content, open_store, say

from swapkv_jax.errors import TierError, UsageError
from swapkv_jax.sessions import AesGcm
from swapkv_jax.sessions.aes_gcm import cipher_of
from swapkv_jax.sessions.layout import Layout
from swapkv_jax.tiers.header import HEADER_BYTES
from swapkv_jax.tiers.record import stamp

KEY, OTHER = AesGcm(b"k" * 32), AesGcm(b"o" * 32)
KEY_HEX = (b"k" * 32).hex()


def stored(directory: Path, cipher: AesGcm | None = KEY) -> None:
    with open_store(directory, cipher=cipher) as store, store.open("s") as session:
        say(session, range(200))
        session.commit(range(200), {"secret": "word"})


def test_with_the_key_it_is_as_any_other(tmp_path):
    stored(tmp_path)
    with open_store(tmp_path, cipher=KEY) as store:
        with store.open("s") as session:
            assert (session.tokens, session.state) == (list(range(200)), {"secret": "word"})
            check(session, range(200))
            session.truncate(150)
            say(session, [*range(150), *range(300)])
            session.commit([*range(150), *range(300)], {})
        store.fork("s", "t")
        with store.open("t") as session, store.open("u", range(200)) as other:
            check(session, [*range(150), *range(300)])
            check(other, range(128))


def test_without_the_key_there_is_nothing_to_see(tmp_path):
    stored(tmp_path)
    with open_store(tmp_path) as plain, open_store(tmp_path, cipher=OTHER) as other:
        for store, how in [(plain, "'s' is encrypted; give its key"), (other, "encrypted with another key")]:
            with pytest.raises(TierError, match=how):
                store.open("s")
            with pytest.raises(TierError, match=how):
                store.fork("s", "t")
            with store.open("t", range(200)) as session:
                assert session.stored == 0
            assert "1 with another key" in store.notes[-1]
        with plain.open("p") as session:
            say(session, range(100))
            session.commit(range(100), {})
        with pytest.raises(TierError, match="'p' is not encrypted; give no key"):
            other.open("p")


def test_nothing_said_is_on_the_disk(tmp_path):
    ids = np.arange(200, dtype="<i4")
    k, v = content(1, range(64))
    secrets = [b"word", ids[5:15].tobytes(), k[0, 3].tobytes(), v[1, 20:30].tobytes()]
    for cipher, seen in [(None, True), (KEY, False)]:
        directory = tmp_path / str(seen)
        stored(directory, cipher=cipher)
        on_disk = b"".join(path.read_bytes() for path in directory.iterdir())
        assert [secret in on_disk for secret in secrets] == [seen] * 4


def test_records_open_only_at_their_own_place(tmp_path):
    """Whoever can write the file can also make the checksums fit; but not the tags."""
    stored(tmp_path)
    (path,) = tmp_path.glob("*.kv")
    with open_store(tmp_path, cipher=KEY) as store, store.open("s") as session:
        ((_, first, _, nonce),) = store._sessions.catalog().spans(session.id)
        (file,) = session._opened.values()
        stride, payload = file.stride, file.header.payload_bytes
    assert (first, payload) == (0, Layout.of(IDENTITY).payload_bytes + KEY.overhead)
    records = np.fromfile(path, np.uint8)[HEADER_BYTES : HEADER_BYTES + 3 * stride].reshape(3, stride)
    swapped = np.ascontiguousarray(records[[1, 0, 2]])
    stamp(swapped, payload, layer=0, groups=np.arange(3), nonces=nonce, valid=64)
    with open(path, "r+b") as raw:
        raw.seek(HEADER_BYTES)
        raw.write(swapped.tobytes())
    with open_store(tmp_path, cipher=KEY) as store, store.open("s") as session:
        with pytest.raises(TierError, match=r"layer 0 .*\.kv was not encrypted for that place"):
            session.kv(0)
        session.kv(2)


def test_values_open_only_as_what_they_are(tmp_path):
    """As when an older row is put back with a checksum that fits."""
    stored(tmp_path)
    with open_store(tmp_path, cipher=KEY) as store:
        with store.open("t") as session:
            say(session, range(9))
            session.commit(range(9), {})
        catalog = store._sessions.catalog()
        entries = {entry.name: entry for entry in catalog.entries()}
        contents = catalog.contents(entries["t"])
        with catalog.transaction(durable=False):
            catalog.save(entries["s"].id, contents, stored=9, tokens=9)
        with pytest.raises(TierError, match=r"of session 's' in .* was not encrypted as that"):
            store.open("s")


def test_key_files(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(UsageError, match=r"cannot read the key file .*make one with: .*urandom"):
        AesGcm.from_file(path)
    path.write_bytes(b"k" * 32)
    path.chmod(0o640)
    with pytest.raises(UsageError, match=r"mode 640\); chmod 600"):
        AesGcm.from_file(path)
    path.chmod(0o600)
    assert AesGcm.from_file(path).name == KEY.name != OTHER.name
    path.write_text((b"k" * 32).hex() + "\n")
    assert AesGcm.from_file(path).name == KEY.name
    for bad in (b"", b"x" * 31, b"g" * 64):
        path.write_bytes(bad)
        with pytest.raises(UsageError, match="neither 32 bytes nor 64 hexadecimal digits"):
            AesGcm.from_file(path)


def test_a_key_from_the_keyring(monkeypatch):
    """A stand-in for the package: what holds keys on this machine is not the tests' to write to."""
    passwords = {("swapkv_jax", "mine"): KEY_HEX, ("swapkv_jax", "short"): "abcd"}
    broken = type("KeyringError", (Exception,), {})

    def get_password(service: str, name: str) -> str | None:
        if name == "locked":
            raise broken("locked")
        return passwords.get((service, name))

    errors = SimpleNamespace(KeyringError=broken)
    monkeypatch.setitem(sys.modules, "keyring", SimpleNamespace(get_password=get_password, errors=errors))
    ours = cipher_of(None, "mine")
    assert ours is not None
    assert ours.name == KEY.name
    for name, complaint in (
        ("none", "has no key 'none'"),
        ("short", "it must be 32"),
        ("locked", "give --key-file"),
    ):
        with pytest.raises(UsageError, match=complaint):
            cipher_of(None, name)
    monkeypatch.setitem(sys.modules, "keyring", None)
    with pytest.raises(UsageError, match="package keyring"):
        cipher_of(None, "mine")
    assert cipher_of(None, None) is None
