"""tools/evaluate.py on a tiny checkpoint: a plan that selects everything loses nothing, a smaller one something; what
was interrupted goes on; flags that cannot work."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from engines import compile_once
from tiny import TINY, tiny_checkpoint

from swapkv_jax import Plan, load_model, make_plan
from swapkv_jax.accounting import kv_bytes
from swapkv_jax.calibration import calibrate, default_text
from swapkv_jax.models import Model
from swapkv_jax.planner import SELECTION
from swapkv_jax.quality import row_interval, surprise
from swapkv_jax.selection import Selection

TOOLS = Path(__file__).parents[1] / "tools"
EMMA = Path(__file__).parent / "texts" / "emma.txt"
CONTEXT, TOKENS, ROWS = 61, 7, 3
# 72 tokens, of which the window has 69
EVERYTHING = ["--group-tokens", "4", "--selected-groups", "18", "--rank", "8", "--recent", "2"]
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
    assert (
        0 <= row["kl"] <= 1e-3
    )  # of keeping KV in bfloat16, as plans by flags do: plans of float32 are below
    assert row["top1"] == 1
    assert row["perplexity"] == pytest.approx(report["resident_perplexity"], rel=1e-2)
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
                *("--group-tokens", "4", "--selected-groups", "9", "--reuse-slots", "20", "--rank", "8"),
                *("--load-buckets", "2,4"),
                *("--sink", "2", "--recent", "3", "--summary", "token", "--refresh", "1,2,1,3"),
            ],
            "group G4 M9 C20 r8 sink groups 2 recent groups 3 summary token refresh 1,2,1,3",
        ),
    ],
)
def test_plans_are_named_by_their_sizes_and_what_is_unusual(
    evaluate: ModuleType, model: Model, flags: list[str], name: str
) -> None:
    (named,) = _choices(evaluate, model, flags)
    assert named == name


def _choices(evaluate: ModuleType, model: Model, flags: list[str]) -> Any:
    args = evaluate.make_parser().parse_args(["--task", "text", "--texts", str(EMMA), *flags])
    return evaluate._choices(args, model, "float32")


def test_every_policy_at_every_memory(evaluate: ModuleType, model: Model) -> None:
    flags = ["--policies", "layer,group,loki", "--set", "loki.rank=3"]
    choices = _choices(evaluate, model, [*flags, "--kv-memory", "1/4,1/2"])
    assert {name: (choice.plan.policy, choice.memory) for name, choice in choices.items()} == {
        "layer": ("layer", None),
        "group at 25 %": ("group", 0.25),
        "group at 50 %": ("group", 0.5),
        "loki at 25 %": ("group", 0.25),
        "loki at 50 %": ("group", 0.5),
    }
    assert choices["loki at 50 %"].fixed == {"rank": 3}
    assert list(_choices(evaluate, model, [*flags, "--kv-memory", "1/2"])) == ["layer", "group", "loki"]


def test_several_plans_and_what_they_lose(run: Run, model: Model, tmp_path: Path) -> None:
    """Fewer groups lose more; an exact policy nothing at all; what was captured is used again."""
    plans = {
        "few": make_plan(model.geometry, cache="group", selection=_selection(4), group_tokens=4),
        "all": make_plan(
            model.geometry, cache="group", selection=_selection(18), kv_dtype="float32", group_tokens=4
        ),
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
    assert [line.split(" | ")[0] for line in out.splitlines()[4:7]] == ["| few", "| all", "| exact"]
    assert "KL to resident, nats against KV in memory" in out
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


# --- interrupted runs ---


class Decoded:
    """`names`: of what was decoded, in order. `stopped`: one that is interrupted after its first step."""

    def __init__(self, original: Callable[..., Iterator[Any]]):
        self.names: list[str] = []
        self.stopped = ""
        self._original = original

    def __call__(self, bench: Any, name: str, *args: Any, **options: Any) -> Iterator[Any]:
        self.names.append(name)
        for number, step in enumerate(self._original(bench, name, *args, **options)):
            if name == self.stopped and number:
                raise KeyboardInterrupt
            yield step


@pytest.fixture
def decoded(evaluate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Decoded:
    task = importlib.import_module("text_task")
    decoded = Decoded(task.decode)
    monkeypatch.setattr(task, "decode", decoded)
    return decoded


def test_an_interrupted_run_goes_on(run: Run, model: Model, decoded: Decoded, tmp_path: Path) -> None:
    """What was finished is not computed again, and every number is that of a run that was not interrupted."""
    files = []
    for name, replacement in (("lru", "lru"), ("fifo", "fifo")):
        selection = msgspec.structs.replace(_selection(4), replacement=replacement)
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(
            make_plan(model.geometry, cache="group", selection=selection, group_tokens=4).to_json()
        )
    flags = ["--plan-json", ",".join(map(str, files)), "--resume", str(tmp_path / "unfinished")]
    decoded.stopped = "fifo"
    code, out, err, report = run("text", *flags)
    assert (code, out, report) == (1, "", None)
    assert f"interrupted; the same command goes on with what {tmp_path / 'unfinished'} keeps" in err
    assert decoded.names == ["resident", "lru", "fifo"]
    assert len(list((tmp_path / "unfinished" / "prefills").glob("*/*"))) == 3 * ROWS
    decoded.names.clear()
    decoded.stopped = ""
    code, _, err, resumed = run("text", *flags)
    assert code == 0
    assert decoded.names == ["resident", "fifo"]  # resident again: all its logits are too many to keep
    assert "prefill (layers)" not in err
    assert not (tmp_path / "unfinished" / "prefills").exists()
    decoded.names.clear()
    _, _, _, again = run("text", *flags)
    assert decoded.names == []
    _, _, _, whole = run("text", *flags[:2])
    assert decoded.names == ["resident", "lru", "fifo"]
    for other in (again, whole):
        assert {**other, "date": ""} == {**resumed, "date": ""}
    decoded.names.clear()
    run("text", *flags, "--rows", str(ROWS - 1))
    assert decoded.names == ["resident", "lru", "fifo"]  # another question, nothing stale


# --- task needle ---


@pytest.mark.slow
def test_questions_of_several_kinds(run: Run, model: Model, tmp_path: Path) -> None:
    """With every group selected a plan answers as resident does, to whatever it is asked."""
    plan = make_plan(
        model.geometry, cache="group", selection=_selection(395), kv_dtype="float32", group_tokens=4
    )
    file = tmp_path / "all.json"
    file.write_text(plan.to_json())
    flags = ["--kinds", "multiquery,common-words", "--lengths", "1500", "--needles", "2", "--seed", "5"]
    code, out, _, report = run("needle", *flags, "--plan-json", str(file))
    assert code == 0
    assert (report["seed"], report["form"]) == (5, "chat")
    assert [cell["kind"] for cell in report["cells"]] == ["multiquery", "common-words"]
    for cell in report["cells"]:
        (row,) = cell["plans"]
        assert cell["resident"]["can"] is False  # random weights
        assert (row["relative"], row["lost"], row["gained"]) == (None, 0, 0)
        assert f"| {cell['kind']} | 1500 | all |" in out
        for question in cell["questions"]:
            assert question["tokens"] <= 1500
            assert question["plans"]["all"] == question["resident"]
            assert question["resident"]["answer"]
    assert "resident cannot do it" in out
    assert report["summary"][0]["cells"] == 0
    assert list((tmp_path / "store").iterdir()) == []


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
        ("needle", ["--kinds", "single,riddle"], 2, "unknown kind 'riddle'; known: single, multikey"),
        ("needle", ["--lengths", "700", "--kv-memory", "1/99"], 2, "raise --kv-memory"),
        ("text", ["--resume", "/proc/none"], 2, "choose another --resume"),
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
