"""Command line over stored sessions: what there is, whether it is intact, and getting rid of it.

Exit codes: 0 done, 2 usage, 143 SIGTERM, 1 Ctrl-C or failure (for `verify`: something is damaged and was not
repaired, a session is gone, or one that was named was not looked at).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from swapkv_jax.errors import SwapKVError
from swapkv_jax.interrupts import exit_code, interrupts_at_checkpoints, run_command

_NAME = "python -m swapkv_jax.store"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = _make_parser().parse_args(argv)
    from swapkv_jax.store_commands import run  # once interrupts are handled and the arguments are good
    from swapkv_jax.talk import Talk

    say = Talk(options.quiet)
    try:
        with interrupts_at_checkpoints():
            return run(options, say)
    except SwapKVError as error:
        say.always(f"{_NAME}: error: {error}")
        return error.exit_code
    except OSError as error:
        say.always(f"{_NAME}: error: {error}; check that file or device")
        return 1
    except KeyboardInterrupt as stop:
        say.always(f"{_NAME}: interrupted")
        return exit_code(stop)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_NAME,
        description="Looks after stored sessions.",
        epilog="Sizes: 512MiB = 512·2^20 bytes, 2GB = 2·10^9. Exit codes: 0 done, 2 usage, 1 failure.",
    )
    _add_common(parser)
    common = argparse.ArgumentParser(
        add_help=False, argument_default=argparse.SUPPRESS
    )  # or it undoes the above
    _add_common(common)
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[common])

    sub = command("list", "all sessions, least recently used first")
    sub.add_argument("--json", action="store_true", help="for programs")
    sub = command("show", "one session, as JSON")
    sub.add_argument("name")
    sub = command("verify", "reads everything back and checks it")
    sub.add_argument("names", nargs="*", metavar="NAME", help="of sessions (default: all)")
    sub.add_argument("--repair", action="store_true", help="mend what can be, cut off or put aside the rest")
    sub.add_argument("--json", action="store_true", help="for programs")
    sub = command("fork", "a second session that goes on from where the first one is; copies no data")
    sub.add_argument("name")
    sub.add_argument("new_name")
    sub = command("export", "a session into a safetensors file, not encrypted")
    sub.add_argument("name")
    sub.add_argument("file", type=Path)
    sub = command("import", "an exported session into the store")
    sub.add_argument("file", type=Path)
    sub.add_argument("--name", help="instead of the one it had")
    sub = command("delete", "sessions, and what no other shares with them")
    sub.add_argument("names", nargs="+", metavar="NAME")
    sub = command("gc", "deletes sessions, least recently used first, until the store is small enough")
    sub.add_argument("bytes", metavar="SIZE", help="what everything in the store may take")
    command("sweep", "deletes what interrupted processes left")
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    """What may be given before the command or after it."""
    default = {"default": parser.argument_default}
    parser.add_argument("--store-dir", type=Path, help="the store (default: in the user's cache)", **default)
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="key of encrypted sessions", **default)
    parser.add_argument("--keyring", metavar="NAME", help="the key's name in the system's keyring", **default)
    quiet = parser.argument_default or False
    parser.add_argument("--quiet", action="store_true", help="only results and errors", default=quiet)


if __name__ == "__main__":
    run_command(_NAME, main)
