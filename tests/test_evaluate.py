"""tools/evaluate.py on a tiny checkpoint: a plan that selects everything loses nothing, a smaller one something;
needles lie where they are said to; flags that cannot work."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from engines import compile_once
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY, tiny_checkpoint

from swapkv_jax import Plan, UsageError, load_model, make_plan
from swapkv_jax.accounting import kv_bytes
from swapkv_jax.calibration import calibrate, default_text
from swapkv_jax.models import Model
from swapkv_jax.planner import SELECTION
from swapkv_jax.quality import row_interval, surprise
from swapkv_jax.selection import Selection

TOOLS = Path(__file__).parents[1] / "tools"
EMMA = Path(__file__).parent / "texts" / "emma.txt"
CONTEXT, TOKENS, ROWS = 61, 7, 3
EVERYTHING = ["--selected-groups", "18", "--rank", "8", "--recent", "2"]  # of 4 tokens: 72, the window has 69
Run = Callable[..., tuple[int, str, str, Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with room for a needle's question."""
    with patch.dict(TINY, long=replace(TINY["llama"], config={"max_position_embeddings": 2048})):
        return tiny_checkpoint("long", tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return load_model(str(checkpoint))


@pytest.fixture(scope="module")
def adapter(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("adapter")
    calibrate(model, default_text()[:20_000], tokens=512, window=128, place_tokens=4).save(place)
    return place


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setattr("swapkv_jax.engine.compile_program", compile_once)
    monkeypatch.setattr("swapkv_jax.capture.compile_program", compile_once)
    return importlib.import_module("evaluate")


@pytest.fixture
def run(
    evaluate: ModuleType, checkpoint: Path, adapter: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Runs the tool; returns exit code, stdout, stderr and the report (None where nothing was written)."""

    def run(task: str, *flags: str) -> tuple[int, str, str, Any]:
        out = tmp_path / "out.json"
        base = ["--task", task, "--model", str(checkpoint), "--adapter", str(adapter), "--texts", str(EMMA)]
        base += ["--store-dir", str(tmp_path / "store"), "--json", str(out), "--batch", "2"]
        if task == "text":
            base += ["--rows", str(ROWS), "--context", str(CONTEXT), "--tokens", str(TOKENS)]
        try:
            code = evaluate.main([*base, *flags])
        except SystemExit as stop:
            code = int(stop.code or 0)
        text = capfd.readouterr()
        return code, text.out, text.err, json.loads(out.read_text()) if out.exists() else None

    return run


# --- task text ---


@pytest.mark.slow
def test_everything_selected_loses_nothing(run: Run, model: Model, tmp_path: Path) -> None:
    code, out, err, report = run("text", *EVERYTHING)
    assert code == 0
    (row,) = report["plans"]
    assert 0 <= row["kl"] <= 1e-6
    assert row["top1"] == 1
    assert row["perplexity"] == pytest.approx(report["resident_perplexity"], rel=1e-4)
    assert len(row["by_row"]) == len(report["rows"]) == ROWS
    plan = msgspec.convert(row["plan"], Plan)
    assert (plan.batch, plan.max_context) == (2, CONTEXT + TOKENS + 1)
    held = kv_bytes(plan, model.geometry)
    assert row["kv_bytes"] == held
    assert row["memory_fraction"] == (held["device"] + held["dram"]) / plan.full_kv_bytes
    assert f"| {row['name']} | {(held['device'] + held['dram']) / 1e6:.1f} |" in out
    assert "prefill (layers)" in err
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (
            ["--group-tokens", "8", "--selected-groups", "30", "--rank", "12"],
            f"group G8 M30 C{SELECTION.reuse_slots} r12",
        ),
        (
            [
                *("--selected-groups", "9", "--reuse-slots", "20", "--rank", "8", "--load-buckets", "2,4"),
                *("--sink", "2", "--recent", "3", "--summary", "token", "--refresh", "1,2,1,3"),
            ],
            "group G4 M9 C20 r8 sink groups 2 recent groups 3 summary token refresh 1,2,1,3",
        ),
    ],
)
def test_plans_are_named_by_their_sizes_and_what_is_unusual(
    evaluate: ModuleType, model: Model, flags: list[str], name: str
) -> None:
    args = evaluate._parser().parse_args(["--task", "text", "--texts", str(EMMA), *flags])
    (named,) = evaluate._plans(args, model, "float32")
    assert named == name


def test_several_plans_and_what_they_lose(run: Run, model: Model, tmp_path: Path) -> None:
    """Fewer groups lose more; an exact policy nothing at all; what was captured is used again."""
    plans = {
        "few": make_plan(model.geometry, cache="group", selection=_selection(4)),
        "all": make_plan(model.geometry, cache="group", selection=_selection(18)),
        "exact": make_plan(model.geometry, cache="layer", tier="dram"),
    }
    files = []
    for name, plan in plans.items():
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(plan.to_json())
    flags = ["--plan-json", ",".join(map(str, files)), "--capture-dir", str(tmp_path / "kept")]
    code, out, _, report = run("text", *flags)
    assert code == 0
    few, everything, exact = report["plans"]
    assert [row["name"] for row in report["plans"]] == list(plans)
    assert few["kl"] > 1e-3 > 1e-6 >= everything["kl"] >= exact["kl"] >= 0
    assert few["top1"] <= everything["top1"] == exact["top1"] == 1
    assert few["kl_interval"][0] <= few["kl"] <= few["kl_interval"][1]
    assert np.mean([row["kl"] for row in few["by_row"]]) == pytest.approx(few["kl"])
    assert few["memory_fraction"] < everything["memory_fraction"]
    assert exact["reuse_rate"] is None
    assert 0 < few["reuse_rate"] < 1
    assert [line.split(" | ")[0] for line in out.splitlines()[4:]] == ["| few", "| all", "| exact"]
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()}
    assert len(kept) == 3 * ROWS
    _, _, err, again = run("text", *flags)
    assert again["plans"] == report["plans"]
    assert "prefill (layers)" not in err
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def _selection(groups: int) -> Selection:
    return Selection(selected_groups=groups, reuse_slots=groups, rank=8, recent_groups=1)


def test_resident_is_held_against_the_text_itself(run: Run, model: Model, evaluate: ModuleType) -> None:
    """Perplexity of the right tokens: an ordinary generation, forced along the same windows, has it too."""
    from swapkv_jax import Engine

    _, _, _, report = run("text", *EVERYTHING)
    cut_windows = importlib.import_module("windows").cut_windows
    windows = cut_windows(model, {"emma.txt": EMMA.read_text()}, ROWS, CONTEXT, TOKENS)
    ids = model.tokenizer.encode(EMMA.read_text(), chat=False)
    size = CONTEXT + TOKENS + 1
    assert [(w.text, w.offset) for w in windows] == [(r["text"], r["offset"]) for r in report["rows"]]
    assert all(b.offset - a.offset >= size - 1 for a, b in itertools.pairwise(windows))
    assert windows[-1].offset + size <= len(ids)
    losses = []
    for w in windows:
        # The tokenizer begins every text with its BOS, which stands in front of every window.
        assert [*w.prompt, *w.following] == [ids[0], *ids[1 + w.offset : w.offset + size]]
        plan = make_plan(model.geometry, cache="resident", max_context=size)
        with Engine(model, plan) as engine:
            steps = engine.generate(
                [w.prompt],
                max_new_tokens=TOKENS + 1,
                ignore_eos=True,
                return_logits=True,
                forced=[w.following],
            )
            logits = np.concatenate([step.logits for step in steps if step.logits is not None])
        losses.append(surprise(logits[1:], w.following[1:]))
    assert report["resident_perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)


def test_intervals() -> None:
    assert row_interval(np.ones((1, 9))) is None
    assert row_interval(np.full((4, 9), 0.25)) == (0.25, 0.25)
    values = np.random.default_rng(0).normal(3, 1, (40, 1)) + np.zeros(
        (40, 50)
    )  # a row's tokens are all alike
    low, high = row_interval(values) or (0, 0)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values[:, 0].std() / np.sqrt(40), rel=0.1)
    assert row_interval(values) == (low, high)


# --- task needle ---


@settings(max_examples=12, deadline=None)
@given(length=st.integers(600, 1500), count=st.integers(1, 4), seed=st.integers(0, 2**40), chat=st.booleans())
def test_needles(model: Model, length: int, count: int, seed: int, chat: bool) -> None:
    """Within the budget and close to it, one needle each, where it is said to be, the same per seed."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(TOOLS))
        make = importlib.import_module("needles").make_needles
    texts = {"a": EMMA.read_text(), "b": EMMA.read_text()[5000:]}
    options: dict[str, Any] = {"length": length, "count": count, "seed": seed, "chat": chat}
    needles = make(model.tokenizer, texts, **options)
    assert needles == make(model.tokenizer, texts, **options)
    assert needles != make(model.tokenizer, texts, **{**options, "seed": seed + 1})
    assert [needle.text for needle in needles] == ["a", "b", "a", "b"][:count]
    assert [needle.depth for needle in needles] == (
        [0.5] if count == 1 else np.linspace(0, 1, count).tolist()
    )
    for needle in needles:
        assert (
            length - 40 < len(needle.prompt) <= length
        )  # a word more is up to 40 of this tokenizer's tokens
        text = model.tokenizer.decode(needle.prompt)
        sentence = f" One of the special magic numbers for {needle.key} is: {needle.number}."
        assert text.count(str(needle.number)) == 1
        assert text.endswith(f"The special magic number for {needle.key} mentioned in the provided text is")
        before, after = text.replace("\n", " ").split(sentence)
        words = [
            len(before.split("afterwards.")[1].split()),
            len(after.split("What is the special")[0].split()),
        ]
        assert needle.position == pytest.approx(words[0] / sum(words), abs=1e-9)
        prose = [*before.split("afterwards.")[1].split(), *after.split("What is the special")[0].split()]
        ends = [i for i, word in enumerate(prose, start=1) if word.rstrip("\"'”’)")[-1:] in (".", "!", "?")]
        longest = max(
            np.diff([0, *ends, sum(words)])
        )  # "Mr." ends none for the tool: a sentence may span three
        assert abs(needle.position - needle.depth) <= 3 * longest / sum(words)
        if 0 < needle.depth < 1 and words[0]:
            assert before.rstrip("\"'”’) ")[-1] in ".!?"


@pytest.mark.slow
def test_needles_found_and_lost(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model that cannot read finds nothing; then what counts as found is changed to resident's own answers to
    the first two needles of a length."""
    flags = ["--lengths", "700", "--needles", "3", "--seed", "5"]
    code, out, _, report = run("needle", *flags, *EVERYTHING, "--selected-groups", "179")
    assert code == 0
    assert (report["seed"], report["form"], len(report["lengths"])) == (5, "chat", 1)
    for result in report["lengths"]:
        (row,) = result["plans"]
        assert (result["found_by_resident"], row["found"], row["lost"], row["gained"]) == (0, 0, 0, 0)
        assert [needle["depth"] for needle in result["needles"]] == [0, 0.5, 1]
        assert f"| {result['length']} | {row['name']} |" in out
        for needle in result["needles"]:
            assert needle["tokens"] <= result["length"]
            assert needle["plans"][row["name"]] == needle["resident"]  # everything selected: the same answer
    assert list((tmp_path / "store").iterdir()) == []

    said = {needle["resident"]["answer"] for result in report["lengths"] for needle in result["needles"][:2]}
    needles = importlib.import_module("needles")
    monkeypatch.setattr(needles.Needle, "found_in", lambda self, answer: answer in said)
    _, out, _, few = run("needle", *flags, "--selected-groups", "4", "--rank", "4", "--recent", "1")
    lost = 0
    for result in few["lengths"]:
        (row,) = result["plans"]
        assert result["found_by_resident"] == 2
        by_needle = [(n["resident"]["found"], n["plans"][row["name"]]["found"]) for n in result["needles"]]
        assert row["lost"] == by_needle.count((True, False))
        assert row["gained"] == by_needle.count((False, True))
        assert row["found"] == 2 - row["lost"] + row["gained"]
        lost += row["lost"]
    assert lost > 0  # so few groups answer otherwise


# --- flags ---


@pytest.mark.parametrize(
    ("task", "flags", "code", "message"),
    [
        ("poem", [], 2, "invalid choice: 'poem'"),
        ("text", ["--texts", "/no/such/text"], 2, "cannot read /no/such/text: No such file"),
        ("text", ["--texts", f"{EMMA},{EMMA}"], 2, "give each text once"),
        ("text", ["--rows", "0"], 2, "'0' is not a positive number"),
        ("text", ["--rows", "4000"], 2, "give longer or more texts, or lower --rows"),
        ("text", ["--context", "3000"], 2, "use at most 2048"),
        ("text", ["--selected-groups", "5"], 2, "use selected_groups of at least 9"),
        ("text", ["--selected-groups", "50", "--reuse-slots", "40"], 2, "use at least 50"),
        ("text", ["--rank", "99"], 2, "rank 99 is not between"),
        ("text", ["--aggregate", "max"], 2, "invalid choice: 'max'"),
        ("text", ["--plan-json", "/no/such/plan"], 2, "cannot read plan /no/such/plan"),
        ("text", ["--plan-json", str(EMMA)], 2, "is not a plan"),
        ("text", ["--plan-json", str(EMMA), "--rank", "8"], 2, "leave one of them out"),
        ("text", ["--json", "/no/such/place/out.json"], 2, "give --json a file"),
        ("text", ["--store-dir", "/proc/none"], 2, "choose another --store-dir"),
        ("text", ["--capture-dir", "/proc/none"], 2, "choose another"),
        ("text", ["--adapter", "/no/such/adapter"], 1, "/no/such/adapter"),
        ("text", ["--model", "/no/such/model"], 1, "no such model"),
        ("needle", ["--lengths", "700,x"], 2, "'x' is not a positive number"),
        ("needle", ["--lengths", "100"], 2, "100 are too few; give --lengths more"),
        ("needle", ["--lengths", "2040"], 2, "use at most 2048"),
        ("needle", ["--seed", "-1"], 2, "'-1' is not a number from 0 on"),
    ],
)
def test_bad_flags(run: Run, task: str, flags: list[str], code: int, message: str, tmp_path: Path) -> None:
    plan = (
        [] if "--plan-json" in flags or "--selected-groups" in flags or "--rank" in flags else ["--rank", "8"]
    )
    got, out, err, report = run(task, *plan, *flags)
    assert message in err
    assert got == code
    assert (out, report) == ("", None)
    if (tmp_path / "store").exists():
        assert list((tmp_path / "store").iterdir()) == []


def test_a_text_too_short_for_a_needle(model: Model, evaluate: ModuleType) -> None:
    needles = importlib.import_module("needles")
    with pytest.raises(UsageError, match="short has 5 words, which do not fill 1000 tokens"):
        needles.make_needles(
            model.tokenizer, {"short": "He was not at home."}, length=1000, count=2, seed=0, chat=True
        )
