"""The command line of `evaluate.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from flag_types import count, counts, names, paths
from kinds import KINDS
from policies import POLICIES, add_policy_flags
from selection_flags import ABOUT, add_selection_flags


def make_parser() -> argparse.ArgumentParser:
    """The parser of all flags."""
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description="What plans of policy `group`, and of the literature's, lose against `resident`, from the same "
        "prefill.",
        epilog="A captured prefill takes 46,080 bytes of disk per token for smollm2-135m in float32: 8 rows of 7,680 "
        "tokens 2.8 GB, 20 questions of 8,000 tokens 7.4 GB (one kind and length at a time, unless they are kept). "
        "Task text also keeps resident's logits in memory: 197 kB per token of --rows × --tokens.",
    )
    add = parser.add_argument
    add("--task", choices=["text", "needle"], required=True)
    add("--texts", type=paths, required=True, metavar="FILE[,FILE]", help="real texts, not calibration's")
    add("--model", default="smollm2-135m", help="Hugging Face directory, hub id, GGUF file, or smollm2-135m")
    add(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: float32 on a CPU, else bfloat16"
    )
    add("--batch", type=count, default=4, metavar="B", help="rows decoded together (default 4)")
    add("--adapter", type=Path, metavar="DIR", help="default: the one kept for the model, made if need be")
    add("--store-dir", type=Path, metavar="DIR", help="for the disk tier and captured prefills")
    add(
        "--capture-dir",
        type=Path,
        metavar="DIR",
        help="keep captured prefills here, and use those that are here",
    )
    add(
        "--resume",
        type=Path,
        metavar="DIR",
        help="keep finished parts (a plan's, of each kind and length) and unfinished prefills here, and go on from "
        "those that are here",
    )
    add("--json", type=Path, metavar="FILE", help="write the report, by row or question, as JSON")
    add("--plots", type=Path, metavar="DIR", help="draw what is lost against memory (needs matplotlib)")
    add("--quiet", action="store_true", help="nothing on stderr but errors and warnings")

    text = parser.add_argument_group("task text")
    text.add_argument(
        "--rows", type=count, default=8, metavar="N", help="windows, over all texts (default 8)"
    )
    text.add_argument("--context", type=count, default=7680, metavar="N", help="tokens before (default 7680)")
    text.add_argument("--tokens", type=count, default=128, metavar="N", help="compared per row (default 128)")

    needle = parser.add_argument_group("task needle")
    needle.add_argument(
        "--lengths",
        type=counts,
        default=[1024, 2048, 4096, 8000],
        metavar="N[,N]",
        help="tokens of a prompt",
    )
    needle.add_argument(
        "--kinds",
        type=names("kind", tuple(KINDS)),
        default=["single"],
        metavar="NAME[,NAME]",
        help=f"of questions: {', '.join(KINDS)} (default single)",
    )
    needle.add_argument(
        "--needles", type=count, default=20, metavar="N", help="questions per kind and length (default 20)"
    )
    needle.add_argument("--seed", type=_seed, default=0, help="of what is hidden and where (default 0)")
    needle.add_argument("--raw", action="store_true", help="ask in plain text, not in the chat template")

    plan = parser.add_argument_group(
        "the plan",
        f"Flags for one plan, or files for several; batch and context are always the task's. {ABOUT}",
    )
    plan.add_argument("--plan-json", type=paths, metavar="FILE[,FILE]", help="plans to compare")
    plan.add_argument(
        "--policies",
        type=names("policy", POLICIES[1:]),
        default=["group"],
        metavar="NAME[,NAME]",
        help=f"without plans: those of {', '.join(POLICIES[1:])} (default group)",
    )
    add_selection_flags(plan)
    add_policy_flags(plan, memories=True)
    return parser


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)
