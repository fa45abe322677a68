"""The command line of `benchmark.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from flag_types import count, counts, names, paths, whole
from peers import PEERS
from policies import POLICIES, add_policy_flags
from selection_flags import ABOUT, add_selection_flags

from swapkv_jax.tiers.throttled import PROFILES

TIERS = ("dram", "disk")
OWN = "own"  # the storage profile of the disk as it is


def make_parser() -> argparse.ArgumentParser:
    """The parser of all flags; `--prefill` is None unless given."""
    parser = argparse.ArgumentParser(
        prog="benchmark.py", description="Time a decode step under each cache policy, and of peers."
    )
    add = parser.add_argument
    add("--model", "--geometry", default="smollm2-135m")
    add(
        "--weights",
        choices=("model", "random"),
        default="model",
        help="random: the model's geometry alone, with as much context as asked for; for timing only",
    )
    add("--policies", type=names("policy", POLICIES), default=["resident", "layer"])
    add("--context", type=counts, default=[7680], help="tokens of each prompt, N[,N]")
    add("--batch", type=counts, default=[1], help="rows, B[,B]")
    add("--steps", type=count, default=64, help="timed steps (default 64)")
    add(
        "--burst",
        type=count,
        default=16,
        metavar="N",
        help="steps of a turn, one right after the other (default 16): what is read between turns costs nothing, and "
        "what is done once in several steps falls into some turns, so the more, the less of either",
    )
    add(
        "--warm-up",
        type=count,
        default=None,
        metavar="N",
        help="steps of each before the timed ones (default: two turns)",
    )
    add("--tier", type=names("tier", TIERS), default=["dram"], help="where layer keeps KV")
    add("--physical-layers", type=count, default=None)
    add("--dtype", default="float32")
    add(
        "--peers",
        type=names("peer", PEERS),
        default=[],
        metavar="NAME[,NAME]",
        help=f"other systems beside ours, of {', '.join(PEERS)}; every setting of each is tried, and the fastest of "
        "our and of other precisions take part",
    )
    add(
        "--prompt-file",
        type=paths,
        metavar="FILE[,FILE]",
        help="real texts, over which rows are spread; decode then takes the text's own tokens. Random tokens without",
    )
    add(
        "--prefill",
        choices=("real", "once", "random"),
        help="once: all our engines start from one computation; random: keys and values are made up. Both time "
        "decode alone and give no ttft. Default: once for several of our engines on real text, else real",
    )
    add("--capture-dir", type=Path, metavar="DIR", help="keep --prefill once here, and use what is here")
    add("--store-dir", type=Path, help="directory of the disk tier, and of a prefill that is not kept")
    add(
        "--storage-profile",
        type=names("storage profile", (OWN, *PROFILES)),
        default=[OWN],
        metavar="NAME[,NAME]",
        help=f"what tier disk reads from is no faster than this disk: {OWN} (the disk as it is, the default), "
        f"{', '.join(PROFILES)} (the paper's devices); everything is measured under each",
    )
    add(
        "--breakdown",
        type=whole,
        default=4,
        metavar="N",
        help="profile so many more steps to say what a step consists of (default 4; 0: leave it out)",
    )
    add("--json", type=Path, required=True, metavar="OUT", help="the report; the table is printed")
    add("--plots", type=Path, metavar="DIR", help="PNG plots (extra plots): throughput and memory")
    add("--fresh", action="store_true", help="measure again what an interrupted run has kept beside --json")
    group = parser.add_argument_group("policy group", ABOUT)
    add = group.add_argument
    add("--group-tier", type=names("tier", TIERS), default=["disk"], help="dram: all rows there too")
    add("--adapter", type=Path, metavar="DIR", help="default: the one kept for the model, made if need be")
    add_selection_flags(group)
    add_policy_flags(parser)
    return parser
