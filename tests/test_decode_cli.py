"""The decode command as a user meets it: text, report, and what may happen to it in the middle."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli import amid_text, decode_command, stopped

from swapkv_jax.plan import Plan

PROMPT = "the quick brown fox jumps over the lazy dog " * 4


pytestmark = pytest.mark.usefixtures("shared_programs")


def test_report_and_text(run) -> None:
    code, out, err, report = run(
        "--prompt", PROMPT, "--max-new-tokens", "12", "--ignore-eos", "--cache", "layer"
    )
    assert code == 0
    assert {
        "model", "policy", "plan", "plan_hash", "backend", "prompt_tokens", "generated", "ttft_s", "tpot_s",
        "tokens_per_s", "compiles_during_decode", "memory", "io",
    } <= report.keys()  # fmt: skip
    (row,) = report["generated"]
    assert len(row["token_ids"]) == 12
    assert row["finish_reason"] == "length"
    assert out == row["text"] + "\n"
    assert report["policy"] == "layer"
    assert report["compiles_during_decode"] == 0
    assert Plan.from_json(json.dumps(report["plan"])).hash == report["plan_hash"]
    memory = report["memory"]
    assert memory["device"]["planned"] == memory["device"]["compiled"] > 0
    assert memory["dram"]["planned"] == memory["dram"]["used"] > 0
    assert memory["full_kv"] > 0
    assert report["tpot_s"]["p90"] >= report["tpot_s"]["median"] > 0
    assert "tokens/s" in err
    assert "DRAM" in err


def test_the_same_tokens_whatever_holds_the_kv(run) -> None:
    arguments = ["--prompt", PROMPT, "--prompt", "a b", "--max-new-tokens", "40", "--ignore-eos"]
    reports = []
    for cache in (
        ["--cache", "resident"],
        ["--cache", "layer"],
        ["--tier", "disk", "--physical-layers", "3"],
    ):
        code, out, _, report = run(*arguments, *cache)
        assert code == 0
        assert out.startswith("=== prompt 1 ===\n")
        assert "\n=== prompt 2 ===\n" in out
        reports.append(report)
    tokens = [[row["token_ids"] for row in report["generated"]] for report in reports]
    assert tokens[0] == tokens[1] == tokens[2]
    assert reports[2]["io"]["bytes_read"] > 0
    assert 0 < reports[2]["memory"]["disk"]["used"] <= reports[2]["memory"]["disk"]["planned"]


def test_sampling_repeats_with_its_seed(run) -> None:
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "16", "--ignore-eos", "--temperature", "1.5"]
    first, again, other = (run(*arguments, "--seed", seed)[3]["generated"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_stop_string(run) -> None:
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "24", "--ignore-eos"]
    text = run(*arguments)[3]["generated"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    _, out, _, report = run(*arguments, "--stop", stop)
    (row,) = report["generated"]
    assert row["text"] == text[: text.index(stop)]
    assert out == row["text"] + "\n"
    assert row["finish_reason"] == "stop"
    assert len(row["token_ids"]) < 24


def test_prompt_files_and_flags_keep_their_order(run, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("one two three four five", encoding="utf-8")
    mixed = ["--prompt", "x", "--prompt-file", str(file), "--prompt", "y z", "--max-new-tokens", "2"]
    lengths = run(*mixed)[3]["prompt_tokens"]
    alone = [
        run("--prompt", text, "--max-new-tokens", "2")[3]["prompt_tokens"][0]
        for text in ("x", file.read_text(), "y z")
    ]
    assert lengths == alone


def test_dry_run_allocates_nothing(run, tmp_path: Path) -> None:
    code, out, err, report = run("--prompt", PROMPT, "--tier", "disk", "--dry-run")
    assert code == 0
    plan = Plan.from_json(out)
    assert plan.tier == "disk"
    assert plan.hash in err
    assert report is None
    assert not (tmp_path / "store").exists()


def test_dry_run_says_which_rows_are_in_dram(run) -> None:
    arguments = ["--prompt", PROMPT, "--prompt", "hi", "--cache", "group", "--dry-run"]
    cases = {(): 0, ("--tier", "disk"): 0, ("--tier", "dram"): 2, ("--dram-memory", "1GiB"): 2}
    for more, rows in cases.items():
        code, out, err, _ = run(*arguments, *more)
        assert code == 0
        plan = Plan.from_json(out)
        assert (plan.tier, plan.dram_rows) == (("dram", rows) if rows else ("disk", None))
        assert (f"tier dram, {rows} of 2 row(s) in DRAM too" if rows else "group (tier disk;") in err


def test_the_dtype_of_kv_can_be_chosen(run) -> None:
    arguments = ["--prompt", PROMPT, "--cache", "group"]
    for flags, dtype in ((), "bfloat16"), (("--kv-dtype", "float32"), "float32"):
        code, out, err, _ = run(*arguments, *flags, "--dry-run")
        assert code == 0
        assert Plan.from_json(out).cache_dtype == dtype
        assert ("float32, KV in bfloat16" in err) == (dtype == "bfloat16")
    code, _, err, _ = run("--prompt", PROMPT, "--cache", "layer", "--kv-dtype", "bfloat16")
    assert code == 2
    assert "leave --kv-dtype bfloat16 out, or use --cache group" in err


def test_a_dry_runs_plan_can_be_used(run, tmp_path: Path) -> None:
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "8", "--ignore-eos"]
    file = tmp_path / "plan.json"
    file.write_text(run(*arguments, "--tier", "dram", "--physical-layers", "3", "--dry-run")[1])
    code, _, _, report = run(*arguments, "--plan", str(file))
    assert code == 0
    assert report["plan"]["physical_layers"] == 3
    assert report["generated"] == run(*arguments)[3]["generated"]


def test_quiet(run) -> None:
    code, out, err, _ = run("--prompt", PROMPT, "--max-new-tokens", "2", "--quiet", "--cache", "resident")
    assert (code, err) == (0, "")
    assert out


def test_full_disk_during_prefill(run, tmp_path: Path) -> None:
    """A file size limit stands in for a full disk: the reservation fails before anything is decoded."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        code, out, err, report = run(
            "--prompt", PROMPT * 2, "--max-new-tokens", "8", "--tier", "disk", "--quiet"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert "File too large" in err
    assert str(tmp_path / "store") in err
    assert "Traceback" not in err
    assert out == ""
    assert report is None
    assert not list((tmp_path / "store").glob("*.kv*"))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupt_in_the_middle(tiny_llama: Path, tmp_path: Path, number: signal.Signals) -> None:
    store, report = tmp_path / "store", tmp_path / "report.json"
    command = decode_command(
        *(tiny_llama, "--prompt", "hi", "--max-new-tokens", "250", "--ignore-eos", "--tier", "disk"),
        *("--quiet", "--store-dir", store, "--report", report),
    )
    code, err = stopped(command, number)
    assert code == (143 if number == signal.SIGTERM else 1)
    assert err == "swapkv-decode: interrupted; the text above is incomplete, no report was written\n"
    assert not report.exists()
    assert store.exists()
    assert not list(store.glob("*.kv*"))


def test_a_reader_that_leaves(tiny_llama: Path) -> None:
    command = decode_command(
        tiny_llama, "--prompt", "hi", "--max-new-tokens", "200", "--ignore-eos", "--quiet"
    )
    with amid_text(command) as amid:
        amid.pipe.close()
    assert (amid.code, amid.err) == (1, b"")


def test_flipped_byte_in_a_stored_record(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that changes on disk between two steps is never decoded from."""
    from swapkv_jax.cache.disk import DiskLayerCache

    start = DiskLayerCache.start

    def damage(self: DiskLayerCache) -> None:
        start(self)
        path = self._tier.files[0].path
        raw = bytearray(path.read_bytes())
        at = self._tier.files[0].runs(1, 0, 1)[0].file_offset + 17
        raw[at] ^= 0x40
        with path.open("r+b") as file:
            file.seek(at)
            file.write(raw[at : at + 1])
            os.fsync(file.fileno())

    monkeypatch.setattr(DiskLayerCache, "start", damage)
    code, _, err, report = run("--prompt", PROMPT, "--max-new-tokens", "8", "--tier", "disk")
    assert code == 1
    assert "damaged" in err
    assert "layer 1, group 0" in err
    assert str(tmp_path / "store") in err
    assert report is None


def test_two_runs_share_a_store(run, tiny_llama: Path, tmp_path: Path) -> None:
    """One begins and ends while the other decodes."""
    store = tmp_path / "store"
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "40", "--ignore-eos", "--tier", "disk", "--quiet"]
    with amid_text(decode_command(tiny_llama, *arguments, "--store-dir", store)) as other:
        assert list(store.glob("*.kv"))
        code, out, err, _ = run(*arguments)
        assert (code, err) == (0, "")
        assert list(store.glob("*.kv"))
    assert (other.code, other.err) == (0, b"")
    assert other.out.decode() == out
    assert not list(store.glob("*.kv"))


def test_a_report_keeps_a_link_and_its_mode(run, tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    assert run("--prompt", "hi", "--max-new-tokens", "2", "--report", str(link))[0] == 0
    assert link.is_symlink()
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask
    assert json.loads(target.read_text())["policy"] == "resident"


def test_a_crlf_file_is_taken_as_it_is(run, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"a\r\nb\r\n")
    lengths = [run(*p, "--max-new-tokens", "2")[3]["prompt_tokens"][0]
               for p in (["--prompt-file", str(file)], ["--prompt", "a\r\nb\r\n"])]  # fmt: skip
    assert lengths[0] == lengths[1]


def test_installed_command() -> None:
    command = Path(sys.executable).with_name("swapkv-decode")
    done = subprocess.run([str(command), "--help"], capture_output=True, text=True, check=True)
    assert "--physical-layers" in done.stdout


def test_help_needs_no_jax() -> None:
    code = "import sys\nfrom swapkv_jax.options import make_parser\nmake_parser()\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
