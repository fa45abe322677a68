"""Flags of `python -m swapkv_jax.planner`."""

from __future__ import annotations

import argparse

from swapkv_jax.analysis import KV_BYTES
from swapkv_jax.devices import device_names
from swapkv_jax.errors import UsageError
from swapkv_jax.models.named import model_names
from swapkv_jax.planner.choose import MAX_OVERHEAD
from swapkv_jax.planner.sizes import parse_rate, parse_seconds, parse_size

CONTEXT = 32_768  # tokens per row of models that take as many
_DTYPES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m swapkv_jax.planner",
        description="What a model's KV cache needs on a device, how far its memory and its link reach, and which "
        "policy would be chosen. Neither has to be here: no weights are read.",
        epilog="Sizes: 85GB = 85·10^9 bytes, 1GiB = 2^30; rates likewise: 56GB/s or 56GBps; times: 200ms or 0.2s. "
        "Exit codes: 0 done, 2 usage, 1 failure, or no plan fits (with --json that is 0).",
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="a Hugging Face config.json or its directory, a GGUF file, or one of "
        + ", ".join(model_names()),
    )
    add("--device", help=f"a JSON file, or one of {', '.join(device_names())} (default: flags alone)")
    add("--device-memory", type=_size, metavar="SIZE", help="in place of the device's, weights included")
    add("--weights-bytes", type=_size_or_none, metavar="SIZE", help="in place of what the shapes say")
    add(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens per row (default: the model's limit, at most {CONTEXT})",
    )
    add("--batch", type=int, default=1, metavar="N", help="rows of one request (default 1)")
    add(
        "--kv-dtype",
        type=_dtype,
        metavar="DTYPE",
        help=f"of the KV cache: {', '.join(KV_BYTES)} (default: float32 on a CPU, else bfloat16)",
    )
    add(
        "--physical-layers",
        type=int,
        metavar="P",
        help="layers on the device under policy layer (default 2)",
    )
    add("--link-bandwidth", type=_rate, metavar="RATE", help="in place of the device's, from host to device")
    add(
        "--tpot",
        type=_seconds,
        metavar="TIME",
        help="of one step (default: what reading weights and KV takes)",
    )
    add("--sigma", type=int, metavar="N", help="Hkv·D/r of policy group's summary (default 8; tight: 32)")
    add("--group-tokens", type=int, metavar="G", help="tokens per group (default: the device's, or 4)")
    add("--reuse-tokens", type=int, metavar="N", help="tokens of kept groups per row (default 400)")
    add(
        "--max-overhead",
        type=float,
        default=MAX_OVERHEAD,
        metavar="X",
        help="that policy layer may cost (0.3)",
    )
    add("--exact", action="store_true", help="never choose policy group, which is approximate")
    add(
        "--json",
        action="store_true",
        help="print one JSON object: the analysis, the plan that would be chosen and the candidates for it; null is "
        "unknown, or no plan",
    )
    return parser


def _flag(parse, text: str):
    try:
        return parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    return _flag(parse_size, text)


def _size_or_none(text: str) -> int:
    return 0 if text.strip() in ("0", "0B", "0b") else _size(text)


def _rate(text: str) -> int:
    return _flag(parse_rate, text)


def _seconds(text: str) -> float:
    return _flag(parse_seconds, text)


def _dtype(text: str) -> str:
    name = text.lower()
    return _DTYPES.get(name, "fp8" if name.startswith(("fp8", "float8")) else name)
