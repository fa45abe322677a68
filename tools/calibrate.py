"""Make the adapter that policy `group` selects by, and say how much of the keys' variance each rank keeps.

    python tools/calibrate.py --model smollm2-135m
    python tools/calibrate.py --model DIR --text novel.txt --tokens 65536 --out adapter/ --json kept.json

Without --out the adapter goes where decode looks for it, and replaces one that is there. Exit codes: 0 done,
2 usage, 1 failure.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from swapkv_jax import ModelError, SwapKVError, UsageError, load_model
from swapkv_jax.adapter import Adapter, adapter_directory
from swapkv_jax.calibration import TOKENS, WINDOW, calibrate, default_text
from swapkv_jax.talk import Talk

RANKS = (8, 12, 16, 24, 32, 48, 64, 96, 128)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    say = Talk(args.quiet)
    try:
        _run(args, say)
    except SwapKVError as error:
        say.always(f"{parser.prog}: error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say.always(f"{parser.prog}: interrupted; nothing was written")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="calibrate.py", description="Make the low-rank adapter of policy `group` for a model."
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="Hugging Face directory, hub id, GGUF file, or smollm2-135m")
    add("--text", type=Path, metavar="FILE", help="UTF-8 text (default: the topics of Python's help)")
    add("--tokens", type=int, default=TOKENS, metavar="N", help=f"of the text, at most (default {TOKENS})")
    add("--window", type=int, default=WINDOW, metavar="N", help=f"tokens per window (default {WINDOW})")
    add(
        "--group-tokens",
        type=int,
        default=4,
        metavar="G",
        help="adapt to the mean keys of groups of G tokens (default 4; 1 for a summary of tokens)",
    )
    add("--rank", type=int, metavar="R", help="vectors to save per layer (default: all, but at most 256)")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="of the model (default: as decode)")
    add("--out", type=Path, metavar="DIR", help="where to save (default: in the user's cache)")
    add("--json", type=Path, metavar="FILE", help="write the table, by layer, as JSON")
    add("--verbose", action="store_true", help="print the table's layers too")
    add("--quiet", action="store_true", help="nothing on stderr but errors")
    return parser


def _run(args: argparse.Namespace, say: Talk) -> None:
    text = default_text() if args.text is None else _read(args.text)
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    with say.bars() as progress:
        model = load_model(args.model, dtype, progress)
        started = time.perf_counter()
        adapter = calibrate(
            model,
            text,
            tokens=args.tokens,
            window=args.window,
            rank=args.rank,
            place_tokens=args.group_tokens,
            progress=progress,
        )
        seconds = time.perf_counter() - started
    place = args.out or adapter_directory(model.fingerprint, adapter.place_tokens)
    adapter.save(place)
    means = f", in mean keys of {adapter.place_tokens}," if adapter.place_tokens > 1 else ""
    say(
        f"calibrated on {adapter.tokens} tokens{means} in {seconds:.1f} s; rank {adapter.rank} saved in {place}"
    )
    kept = {rank: adapter.variance_kept(rank) for rank in RANKS if rank <= adapter.spectrum.shape[1]}
    print(table(kept, args.verbose))
    if args.json is not None:
        _write(args.json, _report(model.name, dtype, adapter, kept, seconds))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read the text {path}: {error.strerror}; check the path") from None


def _report(
    name: str, dtype: str, adapter: Adapter, kept: dict[int, np.ndarray], seconds: float
) -> dict[str, Any]:
    return {
        "model": name,
        "dtype": dtype,
        "fingerprint": adapter.fingerprint,
        "text_digest": adapter.text_digest,
        "tokens": adapter.tokens,
        "group_tokens": adapter.place_tokens,
        "rank": adapter.rank,
        "seconds": seconds,
        "variance_kept": {str(rank): share.tolist() for rank, share in kept.items()},
    }


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}; the adapter itself is saved") from None


def table(kept: dict[int, np.ndarray], by_layer: bool) -> str:
    """Per cent of variance kept: a column per rank, rows for min, median and max over layers, and for each
    layer when asked."""
    rows: list[tuple[str, list[float]]] = [
        (name, [float(of(share)) for share in kept.values()])
        for name, of in (("min", np.min), ("median", np.median), ("max", np.max))
    ]
    if by_layer:
        layers = np.stack(list(kept.values()), axis=1)
        rows += [(f"layer {i}", shares.tolist()) for i, shares in enumerate(layers)]
    lines = ["variance kept, % " + "".join(f"{f'r={rank}':>8}" for rank in kept)]
    lines += [f"{name:<17}" + "".join(f"{100 * share:8.2f}" for share in shares) for name, shares in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
