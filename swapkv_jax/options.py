"""The flags of the decode command, and what can be said of them before anything heavy is imported."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from swapkv_jax.errors import UsageError
from swapkv_jax.planner import MAX_OVERHEAD, parse_size

_PLANNED_BY_FLAGS = ("cache", "tier", "physical_layers", "max_context", "dtype", "kv_dtype")


class _Prompt(argparse.Action):
    """Collects --prompt and --prompt-file into one list, in the order given."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[override]
        namespace.prompts = [*(namespace.prompts or []), (self.dest, values)]


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="swapkv-decode",
        description="Decode long prompts with a KV cache that need not fit on the accelerator.",
        epilog="Sizes: 512MiB = 512·2^20 bytes, 2GB = 2·10^9. Exit codes: 0 done, 2 usage, 1 failure or "
        "Ctrl-C, 143 SIGTERM. Either signal ends it after the step at hand, what was decoded kept in the session; a "
        "second later once more, at once.",
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="Hugging Face directory, hub id, GGUF file, or the embedded "
        "smollm2-135m (default)")  # fmt: skip
    add("--prompt", action=_Prompt, metavar="TEXT", help="a prompt; repeat for more rows")
    add(
        "--prompt-file",
        action=_Prompt,
        metavar="FILE",
        help="a prompt from a UTF-8 file ('-': stdin); repeatable",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="put prompts into the chat template (default if there is one)"
    )
    form.add_argument("--raw", action="store_true", help="continue prompts as they are")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="tokens per row (default 128)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens of this probability together",
    )
    add("--top-k", type=int, default=0, help="sample from this many likeliest tokens (0: all)")
    add("--seed", type=int, default=0, help="of the sampling, 0 to 2**32 - 1 (default 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end a row before this text; repeatable")
    add("--ignore-eos", action="store_true", help="go on after end-of-text tokens")
    add(
        "--cache",
        choices=["auto", "resident", "layer", "group"],
        help="where KV lives: all on the device, two layers of it, or a summary and the groups in use, which is "
        "approximate (default auto: resident if it fits, else layer if moving it costs little, else group)",
    )
    add("--exact", action="store_true", help="never choose --cache group")
    add(
        "--max-overhead",
        type=float,
        default=MAX_OVERHEAD,
        metavar="X",
        help=f"what auto lets layer cost, in parts of a step with all KV on the device (default {MAX_OVERHEAD})",
    )
    add(
        "--tier",
        choices=["auto", "dram", "disk"],
        help="what holds the other layers (default auto: DRAM if they fit). --cache group keeps everything on disk, "
        "and with dram in DRAM too (auto: as many rows as --dram-memory holds, none without it)",
    )
    add("--physical-layers", type=int, metavar="P", help="device slots of one layer each (default 2)")
    add(
        "--max-context",
        type=int,
        metavar="N",
        help="tokens per row, prompt and answer (default: what is needed)",
    )
    dtypes = ["float32", "bfloat16", "float16"]
    add("--dtype", choices=dtypes, help="of weights and KV (default: float32 on a CPU, else bfloat16)")
    add("--kv-dtype", choices=(*dtypes, "int8"), help="of KV under --cache group (default: bfloat16 beside float32 "
        "weights, else as --dtype; int8 for models whose layers were measured)")  # fmt: skip
    add("--plan", metavar="FILE|NAME", help="a plan from a JSON file, or one that ships with the package")
    add("--device-memory", metavar="SIZE", help="budget on the device, weights included")
    add("--dram-memory", metavar="SIZE", help="budget of the DRAM tier")
    add("--disk-space", metavar="SIZE", help="budget of the disk tier")
    add("--store-dir", type=Path, metavar="DIR", help="directory of the disk store")
    add(
        "--ephemeral",
        action="store_true",
        help="files that decode works with have no name: nothing is left of them however it ends (sessions stay)",
    )
    add(
        "--session",
        metavar="NAME",
        help="keep the conversation in the store: the next call with this name goes on where it ended, or was "
        "killed; without a prompt, with an answer that was cut short",
    )
    add(
        "--durability",
        choices=["none", "close", "group"],
        default="group",
        help="when a session is safe from a power failure: never, at the end, or after every 64 tokens (default)",
    )
    add(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="encrypt the session with the key in FILE: 32 bytes or 64 hex digits, readable by you alone",
    )
    add("--keyring", metavar="NAME", help="encrypt it with the key of that name in the system's keyring")
    add("--report", type=Path, metavar="FILE", help="write a JSON report")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write what a few steps did when, for Perfetto (JSON, or JSON.gz)",
    )
    add("--compare", choices=["resident"], help="then decode the same tokens again and report what was lost")
    add("--dry-run", action="store_true", help="print the plan and its bytes per tier, allocate nothing")
    add("--quiet", action="store_true", help="nothing on stderr but errors and warnings")
    parser.set_defaults(prompts=None)
    return parser


def check_flags(options: argparse.Namespace) -> None:
    """Raises UsageError for what can be refused before anything is read."""
    if not options.prompts and options.session is None:
        raise UsageError("no prompt: give --prompt TEXT or --prompt-file FILE")
    if options.session is not None and len(options.prompts or ()) > 1:
        raise UsageError(f"--session goes on with one prompt, not {len(options.prompts)}; give one")
    for name in ("key_file", "keyring"):
        if getattr(options, name) is not None and options.session is None:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} encrypts a session: give --session NAME too, or leave it out")
    if options.key_file is not None and options.keyring is not None:
        raise UsageError("--key-file and --keyring both name a key; leave one of them out")
    if options.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens must be at least 1, not {options.max_new_tokens}")
    if options.max_context is not None and options.max_context < 2:
        raise UsageError(
            f"--max-context must be at least 2 (a prompt and an answer), not {options.max_context}"
        )
    if options.temperature == 0 and (options.top_k != 0 or options.top_p != 1.0):
        raise UsageError(
            "--top-k and --top-p choose nothing at temperature 0 (greedy): give --temperature too"
        )
    if options.plan is not None:
        for name in _PLANNED_BY_FLAGS:
            if getattr(options, name) is not None:
                raise UsageError(
                    f"--plan fixes what --{name.replace('_', '-')} would say; leave one of them out"
                )
    if not options.max_overhead >= 0:
        raise UsageError(f"--max-overhead must be 0 or more, not {options.max_overhead}; 0.3 allows 30 %")
    if options.exact and options.cache == "group":
        raise UsageError("--cache group is approximate, which --exact rules out; leave one of them out")
    if options.cache == "resident":
        for name in ("tier", "physical_layers"):
            if getattr(options, name) is not None:
                raise UsageError(
                    f"--cache resident keeps all KV on the device, so --{name.replace('_', '-')} contradicts it; "
                    "leave one of them out"
                )
    if options.cache == "group" and options.physical_layers is not None:
        raise UsageError(
            f"--cache group keeps no whole layers on the device, so --physical-layers {options.physical_layers} "
            "contradicts it; leave one of them out"
        )
    for what in ("report", "trace"):
        if path := getattr(options, what):
            _check_writable(path, what)
    for name in ("device_memory", "dram_memory", "disk_space"):
        if getattr(options, name) is not None:
            parse_size(getattr(options, name))


def prompt_text(kind: str, value: str) -> str:
    """A prompt as given on the command line, or the content of its file, to the byte.

    Raises:
      UsageError: it cannot be read, or is not UTF-8.
    """
    source = "a --prompt" if kind == "prompt" else f"prompt file {value}"
    try:
        if kind == "prompt":
            raw = os.fsencode(value)  # the bytes that were typed, whatever the locale
        elif value == "-":
            if sys.stdin is None:
                raise UsageError("--prompt-file - needs standard input, which is closed; give a file")
            raw = sys.stdin.buffer.read()
        else:
            raw = Path(value).read_bytes()
        return raw.decode("utf-8")
    except UnicodeError as error:
        where = f" ({error.reason} at byte {error.start})" if isinstance(error, UnicodeDecodeError) else ""
        raise UsageError(f"{source} is not UTF-8 text{where}; convert it") from None
    except OSError as error:
        raise UsageError(f"cannot read prompt file {value}: {error.strerror}; check the path") from None


def _check_writable(path: Path, what: str) -> None:
    """Raises UsageError now if the report or trace could not be written at the end."""
    try:
        path = path.resolve()
        usable = path.parent.is_dir() and os.access(path.parent, os.W_OK)
        if not usable or (path.exists() and not path.is_file()) or len(os.fsencode(path.name)) > 200:
            raise OSError
    except (OSError, ValueError):
        raise UsageError(
            f"cannot write the {what} to {str(path)[:300]}: give a regular file, of a name up to 200 bytes, in a "
            "directory that exists and is writable"
        ) from None
