"""--session on the command line: a conversation goes on where it was, and only what is new is prefilled."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cli import Runner, amid_text, decode_command, stopped

from swapkv_jax.models import Model

PROMPT = "the quick brown fox jumps over the lazy dog " * 4


pytestmark = pytest.mark.usefixtures("shared_programs")


def test_an_answer_goes_on_and_a_conversation_continues(run: Runner) -> None:
    more = " and then"
    whole = run("--prompt", PROMPT, "--max-new-tokens", "30", "--ignore-eos")[3]
    (first,) = whole["prompt_tokens"]
    ids = whole["generated"][0]["token_ids"]
    assert whole["reused_tokens"] == [0]
    assert "session" not in whole

    session = ["--session", "fox", "--ignore-eos"]
    begun = run(*session, "--prompt", PROMPT, "--max-new-tokens", "12", "--cache", "layer")[3]
    assert begun["generated"][0]["token_ids"] == ids[:12]
    assert begun["reused_tokens"] == [0]
    assert begun["session"]["stored_tokens"] == begun["session"]["tokens"] - 1 == first + 11
    written = begun["session"]["bytes_written"]
    assert written == pytest.approx(begun["session"]["bytes_written_per_token"] * (first + 11))
    assert written > 0

    code, out, err, gone_on = run(*session, "--max-new-tokens", "18", "--tier", "disk")
    assert code == 0
    assert gone_on["generated"][0]["token_ids"] == ids[12:]
    assert out == gone_on["generated"][0]["text"] + "\n"
    assert gone_on["reused_tokens"] == [first + 11]
    assert f"{first + 11} tokens reused" in err

    turn = run(*session, "--prompt", more, "--max-new-tokens", "5")[3]
    assert turn["reused_tokens"] == [first + 29]
    assert turn["prompt_tokens"][0] > first + 30
    assert turn["session"]["tokens"] == turn["prompt_tokens"][0] + 5


def test_an_encrypted_session(run: Runner, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key, other = tmp_path / "key", tmp_path / "other"
    for file in (key, other):
        file.touch(0o600)
        file.write_text(os.urandom(32).hex())
    session = ["--session", "fox", "--ignore-eos", "--max-new-tokens", "6"]
    secret = [*session, "--key-file", str(key)]
    begun = run(*secret, "--prompt", PROMPT)[3]
    assert run(*secret)[3]["reused_tokens"] == [begun["session"]["stored_tokens"]]
    code, _, err, _ = run(*session)
    assert code == 1
    assert "encrypted" in err
    code, _, err, _ = run(*session, "--key-file", str(other))
    assert code == 1
    assert "key" in err
    code, _, err, _ = run(*secret, "--tier", "disk")
    assert code == 2
    assert "--tier dram" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--session", "new"], "does not exist yet: begin it with --prompt"),
        (["--session", "new", "--prompt", "a", "--prompt", "b"], "--session goes on with one prompt, not 2"),
        (["--session", "", "--prompt", "a"], "must be 1 to 200 printable characters"),
        (["--session", "a\nb", "--prompt", "a"], "must be 1 to 200 printable characters"),
        (["--session", "new", "--key-file", "none-such", "--prompt", "a"], "make one with"),
        (["--key-file", "none-such", "--prompt", "a"], "give --session NAME too"),
        (["--session", "new", "--durability", "sometimes", "--prompt", "a"], "invalid choice"),
    ],
)
def test_what_cannot_be_continued(run: Runner, arguments: list[str], message: str) -> None:
    code, out, err, report = run(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert report is None


def test_chat_and_raw_do_not_mix_and_what_has_ended_has(run: Runner, tiny_llama: Path) -> None:
    run("--session", "s", "--prompt", PROMPT, "--max-new-tokens", "3", "--ignore-eos")
    chat = ["--model", str(tiny_llama), "--chat", "--session", "s", "--prompt", "a"]
    code, _, err, _ = run(*chat, own_model=True)
    assert code == 2
    assert "begun with --raw" in err or "no chat template" in err


def test_limits_are_said_before_the_work_and_no_session_goes_for_working_files(run: Runner) -> None:
    begun = ["--prompt", PROMPT, "--max-new-tokens", "5", "--ignore-eos"]
    assert run("--session", "kept", *begun)[0] == 0
    for arguments, complaint in (
        (["--session", "kept", "--max-new-tokens", "300"], "session 'kept' holds"),
        (["--session", "kept", "--prompt", ""], "the prompt is empty"),
        (["--session", "new", *begun, "--disk-space", "100KiB"], "of --disk-space"),
        (["--session", "kept", "--dtype", "bfloat16"], "give --dtype float32"),
    ):
        code, out, err, _ = run(*arguments)
        assert (code, out) == (2, "")
        assert complaint in err
        assert "prompt 1" not in err
    code, _, err, _ = run(*begun, "--tier", "disk", "--disk-space", "400KiB")
    assert code == 1
    assert "swapkv_jax.store" in err
    assert run("--session", "kept", "--max-new-tokens", "1", "--ignore-eos")[3]["reused_tokens"][0] > 40


@pytest.mark.filterwarnings("always::RuntimeWarning")
def test_the_least_recent_session_goes_with_a_warning(run: Runner) -> None:
    begun = ["--prompt", PROMPT, "--max-new-tokens", "5", "--ignore-eos"]
    assert run("--session", "old", *begun)[0] == 0
    held = run("--session", "old", "--max-new-tokens", "1", "--ignore-eos")[3]
    assert held["reused_tokens"][0] > 0
    code, _, err, _ = run("--session", "new", "--prompt", PROMPT[::-1], *begun[2:], "--disk-space", "1050KiB")
    assert code == 0, err
    assert "warning: to keep to --disk-space, past sessions were deleted: 'old'" in err
    code, _, err, _ = run("--session", "old", "--max-new-tokens", "1")
    assert code == 2
    assert "does not exist yet" in err


def test_ephemeral_files_have_no_name(tiny_llama: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = decode_command(
        *(tiny_llama, "--quiet", "--tier", "disk", "--store-dir", store, "--ephemeral"),
        *("--prompt", "hi", "--max-new-tokens", "200", "--ignore-eos"),
    )
    with amid_text(command) as amid:
        assert store.exists()
        assert list(store.glob("*.kv")) == []
        amid.process.kill()
    assert list(store.glob("*.kv")) == []


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_interrupted_answers_are_saved(
    tiny_llama: Path, tmp_path: Path, run: Runner, number: signal.Signals
) -> None:
    """Ctrl-C and SIGTERM in the middle: what was decoded by then is in the session, which goes on from there."""
    begun = decode_command(
        *(tiny_llama, "--quiet", "--store-dir", tmp_path / "store", "--session", "fox"),
        *("--prompt", "hi", "--max-new-tokens", "200", "--ignore-eos"),
    )
    code, err = stopped(begun, number)
    assert code == (143 if number == signal.SIGTERM else 1)
    assert err == "swapkv-decode: interrupted; the text above is incomplete, no report was written\n"
    same = ["--max-context", "256", "--ignore-eos"]
    code, _, err, gone_on = run("--session", "fox", *same, "--max-new-tokens", "4")
    assert code == 0, err
    (held,) = gone_on["prompt_tokens"]
    whole = run("--prompt", "hi", *same, "--max-new-tokens", str(held + 4))[3]
    decoded = held - whole["prompt_tokens"][0]
    assert decoded > 0
    assert gone_on["reused_tokens"] == [held - 1]
    assert gone_on["generated"][0]["token_ids"] == whole["generated"][0]["token_ids"][decoded : decoded + 4]


def test_one_more_turn_of_a_chat(smollm2: Model) -> None:
    tokenizer = smollm2.tokenizer
    history = tokenizer.encode("Hello", chat=True)
    (start,), (end,), newline = (
        tokenizer.encode(t, chat=False) for t in ("<|im_start|>", "<|im_end|>", "\n")
    )
    answer = tokenizer.encode("Hi!", chat=False)
    cut = tokenizer.encode_turn("And now?", [*history, *answer], chat=True)
    ended = tokenizer.encode_turn("And now?", [*history, *answer, end], chat=True)
    assert cut == [end, *ended]
    user = [start, *tokenizer.encode("user\nAnd now?", chat=False), end, *newline]
    assert ended == [*newline, *user, start, *tokenizer.encode("assistant\n", chat=False)]
    assert tokenizer.encode_turn("And now?", history, chat=False) == tokenizer.encode("And now?", chat=False)
