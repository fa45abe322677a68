"""What the command line over stored sessions does: a function per command, (options, say) → exit code."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import Any

import msgspec

from swapkv_jax.errors import TierError, UsageError
from swapkv_jax.memory_limits import format_bytes
from swapkv_jax.planner.sizes import parse_size
from swapkv_jax.sessions import AesGcm, SessionInfo, SessionStore
from swapkv_jax.sessions.aes_gcm import cipher_of
from swapkv_jax.sessions.identity import Identity
from swapkv_jax.sessions.info import session_infos
from swapkv_jax.sessions.privacy import check_private
from swapkv_jax.sessions.salvage import catalog_problems, salvage, salvageable
from swapkv_jax.sessions.store import delete_session, erase_deleted
from swapkv_jax.sessions.transfer import export_session, import_session, read_header
from swapkv_jax.sessions.verify import verify
from swapkv_jax.store_paths import default_store_dir
from swapkv_jax.talk import Talk
from swapkv_jax.tiers import DiskStore
from swapkv_jax.tiers.catalog import CATALOG_NAME, repair_advice


def run(options: argparse.Namespace, say: Talk) -> int:
    """Runs `options.command` and returns its exit code.

    Raises:
      UsageError: there is no store, or no session of that name. TierError: it is damaged, in use, or full.
    """
    options.store_dir = options.store_dir or default_store_dir()
    check_private(options.store_dir)
    if options.command != "import":
        _check_stored(options.store_dir)
    return _COMMANDS[options.command](options, say)


def _check_stored(directory: Path) -> None:
    if not (directory / CATALOG_NAME).exists():
        if any(directory.glob("*.kv")):
            with DiskStore(directory, limit_bytes=None, fingerprint="") as disk, disk.exclusive():
                disk.sessions.check_catalog()
        raise UsageError(f"no sessions are stored in {directory}; name another --store-dir")


def _list(options: argparse.Namespace, say: Talk) -> int:
    with _disk(options) as disk, disk.exclusive():
        infos, used, strangers = _infos(disk), disk.bytes_used, len(disk.sessions.strangers())
    if options.json:
        sessions = [_record(info) for info in infos]
        print(json.dumps({"bytes": used, "unknown_files": strangers, "sessions": sessions}, indent=2))
        return 0
    rows = [("NAME", "TOKENS", "STORED", "OWN", "SHARED", "LAST USE", "")]
    for info in infos:
        marks = [mark for mark, is_so in (("in use", info.in_use), ("encrypted", info.encrypted)) if is_so]
        used_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.last_use))
        own, shared = _mebibytes(info.own_bytes), _mebibytes(info.shared_bytes)
        rows.append((info.name, str(info.tokens), str(info.stored), own, shared, used_at, ", ".join(marks)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) if 0 < i < 5 else cell.ljust(width) for i, (cell, width) in
                 enumerate(zip(row, widths, strict=True))]  # fmt: skip
        print("  ".join(cells).rstrip())
    say(f"{len(infos)} sessions; everything in {options.store_dir} takes {format_bytes(used)}")
    _tell_of_strangers(strangers, options, say)
    return 0


def _show(options: argparse.Namespace, say: Talk) -> int:
    with _disk(options) as disk, disk.exclusive():
        infos = {info.name: info for info in _infos(disk)}
        if options.name not in infos:
            raise UsageError(f"no session {options.name!r}; there are {', '.join(infos) or 'none'}")
        catalog = disk.sessions.catalog()
        entry = catalog.entry(options.name)
        assert entry is not None
        spans = [
            {"file": str(disk.path(span.file)), "first_group": span.first, "groups": span.groups}
            for span in catalog.spans(entry.id)
        ]
    print(json.dumps({**_record(infos[options.name]), "files": spans}, indent=2))
    return 0


def _verify(options: argparse.Namespace, say: Talk) -> int:
    problems = catalog_problems(options.store_dir)
    mended = []
    all_saved = True
    if problems and options.repair and salvageable(options.store_dir):
        done = salvage(options.store_dir)
        lost = "nobody can tell how many" if done.lost is None else str(done.lost)
        all_saved = done.lost == 0
        mended.append(
            f"{len(done.saved)} sessions are in a new catalogue, {lost} could not be saved; the old one is "
            f"{done.quarantined}"
        )
    result = None
    if not problems or mended:
        with say.bars() as progress:
            result = verify(
                options.store_dir,
                names=options.names or None,
                repair=options.repair,
                cipher=_cipher(options),
                progress=progress,
            )
    strangers = 0
    if result is not None:
        with _disk(options) as disk, disk.exclusive():
            strangers = len(disk.sessions.strangers())
    all_saved = all_saved and not (mended and strangers)
    intact = (not problems or bool(mended)) and all_saved and result is not None and result.intact
    unseen = [name for name in options.names if result is not None and name in result.skipped]
    code = 0 if intact and not unseen else 1
    if options.json:
        record = {
            "intact": intact,
            "catalog": {"problems": problems, "repaired": mended},
            "unknown_files": strangers,
        }
        print(json.dumps(record | (msgspec.to_builtins(result) if result else {}), indent=2))
        return code
    for problem in problems:
        print(problem)
    for line in mended:
        print(f"  repaired: {line}")
    for finding in result.findings if result else ():
        print(f"session {finding.session!r}: {finding.problem}")
        if finding.repaired:
            print(f"  repaired: {finding.repaired}")
    for name, why in result.skipped.items() if result else ():
        print(f"session {name!r} was not looked at: {why}")
    if result is not None:
        say(f"{result.sessions} sessions, {result.records} records read")
    _tell_of_strangers(strangers, options, say)
    if problems and not mended and options.repair:
        say("there is nothing in the catalogue to repair it from")
    elif not intact:
        remedy = "what is named above is lost" if options.repair else repair_advice(options.store_dir)
        say(f"not all of it is as it was written; {remedy}")
    return code


def _tell_of_strangers(count: int, options: argparse.Namespace, say: Talk) -> None:
    if count:
        sweep = f"python -m swapkv_jax.store --store-dir {shlex.quote(str(options.store_dir))} sweep"
        say.always(
            f"{count} session files are left that no catalogue knows; put a copy of {CATALOG_NAME} back before "
            f"anything else opens the store, or delete them with {sweep}"
        )


def _fork(options: argparse.Namespace, say: Talk) -> int:
    with _store(options, _identity(options)) as store:
        store.fork(options.name, options.new_name)
    say(f"session {options.new_name!r} goes on from where {options.name!r} is")
    return 0


def _export(options: argparse.Namespace, say: Talk) -> int:
    identity = _identity(options)
    with _store(options, identity) as store, store.open(options.name) as session, say.bars() as progress:
        export_session(
            session, identity, options.file, lambda done, total: progress("export (layers)", done, total)
        )
    say(f"{options.file} holds session {options.name!r}" + (", not encrypted" if _cipher(options) else ""))
    return 0


def _import(options: argparse.Namespace, say: Talk) -> int:
    header, _ = read_header(options.file)
    identity = Identity.from_json(header["__metadata__"]["identity"])
    with _store(options, identity) as store, say.bars() as progress:
        name = import_session(
            store, options.file, options.name, lambda done, total: progress("import (layers)", done, total)
        )
    say(f"session {name!r} is stored")
    return 0


def _delete(options: argparse.Namespace, say: Talk) -> int:
    with _disk(options) as disk:
        names = list(dict.fromkeys(options.names))
        known = [info.name for info in _infos(disk)]
        for name in names:
            if name not in known:
                raise UsageError(f"no session {name!r}; there are {', '.join(known) or 'none'}")
        for name in names:
            say(f"deleted session {name!r}, {format_bytes(delete_session(disk, name))}")
        try:
            erase_deleted(disk)
        except TierError as error:
            raise TierError(
                f"deleted, but their token ids may still be found in the catalogue: {error}"
            ) from error
    return 0


def _gc(options: argparse.Namespace, say: Talk) -> int:
    size = parse_size(options.bytes)
    with _disk(options) as disk:
        before = _infos(disk)
        try:
            disk.shrink(size)
        finally:  # what could be deleted is, even where that is not enough
            left = {(info.name, info.created) for info in _infos(disk)}
            gone = [info.name for info in before if (info.name, info.created) not in left]
            for name in gone:
                print(name)
            say(f"deleted {len(gone)} sessions; everything takes {format_bytes(disk.bytes_used)} now")
    return 0


def _sweep(options: argparse.Namespace, say: Talk) -> int:
    with _disk(options) as disk, disk.exclusive():
        freed, problem = disk.sessions.sweep()
        if problem is not None:
            say.always(problem)
            return 1
        say(f"{format_bytes(freed + disk.reclaimed_bytes)} are free again")
    return 0


def _disk(options: argparse.Namespace) -> DiskStore:
    return DiskStore(options.store_dir, limit_bytes=None, fingerprint="")


def _store(options: argparse.Namespace, identity: Identity) -> SessionStore:
    return SessionStore(options.store_dir, identity=identity, cipher=_cipher(options))


def _cipher(options: argparse.Namespace) -> AesGcm | None:
    return cipher_of(options.key_file, options.keyring)


def _infos(disk: DiskStore) -> list[SessionInfo]:
    with disk.exclusive():
        disk.sessions.check_catalog()
        return session_infos(disk)


def _identity(options: argparse.Namespace) -> Identity:
    with _disk(options) as disk:
        infos = {info.name: info.identity for info in _infos(disk)}
    if options.name not in infos:
        raise UsageError(f"no session {options.name!r}; there are {', '.join(infos) or 'none'}")
    return infos[options.name]


def _record(info: SessionInfo) -> dict[str, Any]:
    return msgspec.to_builtins(info)


def _mebibytes(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


_COMMANDS = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "fork": _fork,
    "export": _export,
    "import": _import,
    "delete": _delete,
    "gc": _gc,
    "sweep": _sweep,
}
