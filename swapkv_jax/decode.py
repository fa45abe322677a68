"""Command line: decode one or several prompts. Text goes to stdout as it is made, all else to stderr.

Exit codes: 0 done, 2 usage (a flag, prompt, plan or budget that cannot work), 1 failure or Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

from swapkv_jax.errors import SwapKVError, UsageError
from swapkv_jax.interrupts import exit_code, interrupts_at_checkpoints, run_command

if TYPE_CHECKING:  # other imports wait until interrupts are handled, heavy ones until the arguments are good
    from swapkv_jax.models import ModelSource, Tokenizer
    from swapkv_jax.plan import DType, Plan
    from swapkv_jax.sampling import Sampling
    from swapkv_jax.talk import Talk


_SMALLER = "lower --max-context or the rows, or use --cache layer --tier disk"


def command() -> NoReturn:
    """The command as a process of its own."""
    run_command("swapkv-decode", main)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    from swapkv_jax.options import make_parser
    from swapkv_jax.talk import Talk

    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  (closed by whoever started us)
    parser = make_parser()
    options = parser.parse_args(argv)
    say = Talk(options.quiet)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_args, **_kwargs: say.always(f"warning: {message}")
        return _guarded(options, say, parser.prog)


def _guarded(options: argparse.Namespace, say: Talk, name: str) -> int:
    """Runs the command; whatever goes wrong becomes one line and an exit code."""
    try:
        _run(options, say)
    except SwapKVError as error:
        say.always(f"{name}: error: {error}")
        return error.exit_code
    except KeyboardInterrupt as stop:
        say.always(f"{name}: interrupted; the text above is incomplete, no report was written")
        return exit_code(stop)
    except BrokenPipeError:
        # Whoever read stdout is gone; keep the interpreter from complaining once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        say.always(f"{name}: error: {error}; check that file or device")
        return 1
    except MemoryError:
        say.always(f"{name}: error: out of memory; {_SMALLER}")
        return 1
    except (RuntimeError, ValueError) as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # how XLA says it
            raise
        say.always(f"{name}: error: the device is out of memory ({str(error).splitlines()[0]}); {_SMALLER}")
        return 1
    return 0


def _run(options: argparse.Namespace, say: Talk) -> None:
    from swapkv_jax.options import check_flags, prompt_text

    check_flags(options)
    if sys.stdout is None:
        raise UsageError("standard output is closed, so the text has nowhere to go; redirect it to a file")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a terminal that cannot show a character still gets the rest
    texts = [prompt_text(kind, value) for kind, value in options.prompts or ()]

    from swapkv_jax.models import open_model
    from swapkv_jax.sampling import Sampling

    sampling = Sampling(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed
    )
    with say.bars() as progress:
        source = open_model(options.model, progress)
    _platform()  # starts JAX's backend, which like the imports above nobody can lose anything by leaving
    with interrupts_at_checkpoints():
        _decode(options, say, source, texts, sampling)


def _decode(
    options: argparse.Namespace, say: Talk, source: ModelSource, texts: list[str], sampling: Sampling
) -> None:
    """The command from the model that was found to the report."""
    from swapkv_jax.conversation import open_conversation
    from swapkv_jax.decode_plan import decode_plan
    from swapkv_jax.engine import Engine
    from swapkv_jax.planner import parse_size
    from swapkv_jax.report import build_report, describe_plan, summarise, write_report

    chat = options.chat or (not options.raw and source.tokenizer.chat_template is not None)
    if chat and not options.chat:
        say("the model has a chat template and prompts go into it; --raw continues them as they are")
    disk_limit = parse_size(options.disk_space) if options.disk_space else None
    with ExitStack() as stack:
        model = conversation = None
        if options.session is None:
            prompts = [_encode(source.tokenizer, text, chat, i) for i, text in enumerate(texts, start=1)]
        else:
            with say.bars() as progress:
                model = source.load(_dtype(options), progress)
            opened = open_conversation(
                options, model, texts[0] if texts else None, chat, sampling, disk_limit
            )
            conversation = stack.enter_context(opened)
            prompts = [conversation.prompt]
            most = source.geometry.context_limit
            conversation.check_context(options.max_new_tokens, min(options.max_context or most, most))
        plan, why = decode_plan(options, source.geometry, [*map(len, prompts)], _dtype(options))
        if why:
            say(why)
        if conversation is not None:
            working = plan.memory(source.geometry).disk
            conversation.check_room(options.max_new_tokens, disk_limit, working)
            if working and (options.key_file or options.keyring):
                raise UsageError(
                    f"the session is encrypted, but {plan.policy} keeps keys and values on disk as they are while "
                    "it decodes: use --cache resident, or --cache layer --tier dram"
                )
        if options.dry_run:
            print(plan.to_json())
            print(describe_plan(plan, source.geometry), file=sys.stderr)
            return
        reference_plan = _reference_plan(options, source, plan)
        say(describe_plan(plan, source.geometry))

        if model is None:
            with say.bars() as progress:
                model = source.load(plan.dtype, progress)
        adapter = None
        if plan.policy == "group":
            from swapkv_jax.strategies.adapters import plan_adapter

            with say.bars() as progress:
                adapter, note = plan_adapter(model, plan, progress=progress)
            if note is not None:
                say(note)
        logits: list[Any] = []
        with Engine(
            model,
            plan,
            sampling=sampling,
            store_dir=options.store_dir,
            disk_limit=disk_limit,
            adapter=adapter,
            ephemeral=options.ephemeral,
        ) as engine:
            say(f"compiled in {engine.program.compile_s:.1f} s")
            sessions = None if conversation is None else [conversation.session]
            generation, rows = _generate(options, engine, sampling, prompts, sessions, say, logits)
            report = build_report(engine, generation, prompts, rows)
        if conversation is not None:
            report["session"] = conversation.report()
    if reference_plan is not None:
        import msgspec

        from swapkv_jax.quality import compare_with

        say(f"comparing with {reference_plan.policy} on the same {len(logits)} tokens")
        with Engine(model, reference_plan) as reference:
            quality = compare_with(reference, prompts, [row.token_ids for row in rows], logits)
        report["quality"] = msgspec.to_builtins(quality)
    say(summarise(report))
    if options.report:
        write_report(report, options.report)


def _generate(
    options: argparse.Namespace,
    engine: Any,
    sampling: Sampling,
    prompts: list[list[int]],
    sessions: Any,
    say: Talk,
    logits: list[Any],
) -> Any:
    """Decodes and streams the text; with --compare every step's logits are added to `logits`."""
    from swapkv_jax.text import OrderedOutput, RowText
    from swapkv_jax.trace import traced

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    rows = [RowText(engine.model.tokenizer, prompt, options.stop) for prompt in prompts]
    with say.bars() as progress:
        generation = engine.generate(
            prompts,
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            ignore_eos=options.ignore_eos,
            return_logits=options.compare is not None,
            on_prefill=lambda done, total: progress("prefill (layers)", done, total),
            sessions=sessions,
        )
        steps = iter([next(generation)])
    output = OrderedOutput(len(rows), write)
    for some in (steps, traced(generation, options.trace)):
        for step in some:
            if step.logits is not None:
                logits.append(step.logits)
            for row, token in enumerate(step.tokens):
                if token is None:
                    continue
                output.push(row, rows[row].push(token))
                if rows[row].stopped:
                    generation.finish_row(row, "stop")
                if generation.finish_reasons[row] is not None:
                    output.push(row, rows[row].flush())
                    output.end(row)
    return generation, rows


def _encode(tokenizer: Tokenizer, text: str, chat: bool, number: int) -> list[int]:
    if not text:
        raise UsageError(f"prompt {number} is empty; give it some text")
    ids = tokenizer.encode(text, chat=chat)
    if not ids:
        raise UsageError(f"prompt {number} has no tokens; give it some text")
    return ids


def _reference_plan(options: argparse.Namespace, source: ModelSource, plan: Plan) -> Plan | None:
    """What --compare holds the result against; PlanError now if that does not fit."""
    if options.compare is None:
        return None
    from swapkv_jax.memory_limits import available_memory
    from swapkv_jax.planner import Budgets, make_plan

    return make_plan(
        source.geometry,
        cache=options.compare,
        batch=plan.batch,
        max_context=plan.max_context,
        dtype=plan.dtype,
        platform=_platform(),
        budgets=Budgets(host=available_memory() if _platform() == "cpu" else None),
    )


def _dtype(options: argparse.Namespace) -> DType:
    """What the weights will be in, known before there is a plan."""
    if options.plan is not None:
        from swapkv_jax.plan_files import load_plan

        return load_plan(options.plan).dtype
    return options.dtype or ("float32" if _platform() == "cpu" else "bfloat16")


def _platform() -> str:
    import jax

    return jax.default_backend()


if __name__ == "__main__":
    command()
