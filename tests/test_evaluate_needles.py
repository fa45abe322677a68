"""What tools/evaluate.py makes of answers to questions: losses count where `resident` succeeds, what it cannot do is
said, intervals, tables and plots; and finished parts."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from tiny import TINY, tiny_checkpoint

from swapkv_jax import Plan, PlanError, UsageError, load_model, make_plan
from swapkv_jax.models import Model
from swapkv_jax.selection import Selection

EMMA = (Path(__file__).parent / "texts" / "emma.txt").read_text()
KINDS = ["single", "multivalue", "extraction"]
LENGTH, COUNT = 1500, 4


@pytest.fixture(scope="module")
def tools() -> Iterator[Callable[[str], ModuleType]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
        yield importlib.import_module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    with patch.dict(TINY, long=replace(TINY["llama"], config={"max_position_embeddings": 2048})):
        return load_model(str(tiny_checkpoint("long", tmp_path_factory.mktemp("needles"))))


# ---- the task ------------------------------------------------------------------------------------------


@dataclass
class Oracle:
    """Answers that name the right things that `knows` says of a plan, kind and question. `asked`: titles so far."""

    knows: dict[str, dict[str, list[list[int]]]]
    questions: list[Any] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def decode(
        self,
        bench: Any,
        title: str,
        plan: Plan,
        prefill: None,
        prompts: Any,
        tokens: int,
        *,
        use: dict[str, Any],
    ) -> Iterator[Any]:
        self.asked.append(title)
        where, name = title.split(": ")
        for row, prompt in enumerate(prompts):
            question = next(question for question in self.questions if question.prompt is prompt)
            known = self.knows[name][where.split()[0]][row]
            answer = " and ".join(question.expected[i] for i in known) or "nothing"
            for number, token in enumerate(bench.model.tokenizer.encode(answer, chat=False)):
                yield [row], number, SimpleNamespace(tokens=[token, None])
        use["reuse_rate"] = 0.5


PAIR, NONE = [0, 1], [[]] * 4
KNOWS = {
    "resident": {"single": [[0], [0], [0], []], "multivalue": [PAIR] * 4, "extraction": [[], [], [], [5]]},
    "few": {"single": [[0], [], [0], [0]], "multivalue": [PAIR, [1], [2, 3], [0, 1, 2]], "extraction": NONE},
    "same": {"single": [[0], [0], [0], []], "multivalue": [PAIR] * 4, "extraction": [[], [], [], [5]]},
}


@pytest.fixture(scope="module")
def questions() -> dict[str, list[Any]]:
    """Those that were made, by kind."""
    return {}


@pytest.fixture
def ask(
    tools: Callable[[str], ModuleType],
    model: Model,
    questions: dict[str, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[..., tuple[Oracle, dict[str, Any]]]:
    """The task's result where an oracle decodes."""
    task, tasks, kinds = tools("needle_task"), tools("tasks"), tools("kinds")
    oracle = Oracle(KNOWS)

    def make_questions(kind: str, *args: Any, **options: Any) -> list[Any]:
        if kind not in questions:
            questions[kind] = kinds.make_questions(kind, *args, **options)
        oracle.questions += questions[kind]
        return questions[kind]

    monkeypatch.setattr(task, "make_questions", make_questions)
    monkeypatch.setattr(task, "decode", oracle.decode)
    monkeypatch.setattr(tasks, "capture", lambda *_args, **_options: None)
    monkeypatch.setattr(tasks, "plan_adapter", lambda *_args: (None, None))

    def ask(**fields: Any) -> tuple[Oracle, dict[str, Any]]:
        plans = {
            name: make_plan(model.geometry, cache="group", selection=Selection(
                selected_groups=groups, reuse_slots=groups, rank=4, recent_groups=1
            ))
            for name, groups in (("few", 20), ("same", 40))
        }  # fmt: skip
        bench = tasks.Bench(**{
            "model": model, "adapters": {}, "plans": plans, "batch": 2, "store_dir": tmp_path, "capture_dir": None,
            "reference": make_plan(model.geometry, cache="resident"), "progress": lambda *_: None, **fields,
        })  # fmt: skip
        result = task.answer_questions(
            bench, {"emma": EMMA}, kinds=KINDS, lengths=[LENGTH], count=COUNT, seed=0, chat=True
        )
        return oracle, result

    return ask


def test_losses_count_where_resident_succeeds(
    ask: Callable[..., Any], tools: Callable[[str], ModuleType]
) -> None:
    intervals = tools("intervals")
    _, result = ask()
    single, multivalue, extraction = result["cells"]
    assert [cell["kind"] for cell in result["cells"]] == KINDS
    assert single["resident"] == {"score": 0.75, "score_interval": intervals.wilson(3, 4), "can": True}
    few, same = single["plans"]
    assert (few["score"], few["lost"], few["gained"]) == (0.75, 1, 1)  # what is gained makes up for no loss
    assert few["relative"] == pytest.approx(2 / 3)
    assert few["relative_interval"] == intervals.wilson(2, 3)
    assert (same["relative"], same["relative_interval"], same["lost"]) == (1, intervals.wilson(3, 3), 0)
    assert same["reuse_rate"] == 0.5

    few, same = multivalue["plans"]
    assert multivalue["resident"]["score"] == 0.5
    assert (few["score"], few["lost"], few["gained"]) == (0.5, 1, 1)  # two other values are as good as two
    assert few["relative"] == 1
    assert few["relative_interval"][0] < 1 < few["relative_interval"][1]
    assert same["relative_interval"] == intervals.wilson(4, 4)

    assert extraction["resident"]["score"] == pytest.approx(1 / 48)
    assert not extraction["resident"]["can"]
    assert [row["relative"] for row in extraction["plans"]] == [0, 1]

    few, same = result["summary"]
    assert (few["name"], few["cells"], same["cells"]) == ("few", 2, 2)
    assert few["relative"] == pytest.approx((2 / 3 + 1) / 2)
    assert few["relative_interval"][0] < few["relative"] < few["relative_interval"][1]
    assert (same["relative"], same["relative_interval"]) == (1, intervals.wilson(7, 7))
    assert few["memory_fraction"] < same["memory_fraction"] < 1
    for cell in result["cells"]:
        for i, question in enumerate(cell["questions"]):
            known = KNOWS["few"][cell["kind"]][i]
            assert question["plans"]["few"]["score"] == len(known) / len(question["expected"])


def test_a_plan_without_room_is_said_to_have_none(
    ask: Callable[..., Any], tools: Callable[[str], ModuleType]
) -> None:
    """The others go on; where no plan has room, nothing is computed."""

    def resize(name: str, plan: Plan) -> Plan:
        if name == "few":
            raise PlanError("it needs more")
        return plan

    _, result = ask(resize=resize)
    assert [cell["unfit"] for cell in result["cells"]] == [{"few": "it needs more"}] * 3
    assert [[row["name"] for row in cell["plans"]] for cell in result["cells"]] == [["same"]] * 3
    assert result["summary"][0] == {
        "name": "few", "strategy": "kvswap", "cells": 0, "memory_fraction": None, "relative": None,
        "relative_interval": None,
    }  # fmt: skip
    out = tools("evaluation_table").table(_report(result))
    assert f"| single | {LENGTH} | few | – | – | 75.0 (" in out
    assert "not run: it needs more" in out

    def refuse(name: str, plan: Plan) -> Plan:
        raise PlanError(f"{name} needs more")

    oracle, _ = ask()
    oracle.asked.clear()
    with pytest.raises(PlanError, match="few needs more"):
        ask(resize=refuse)
    assert oracle.asked == []


def test_finished_answers_are_kept(
    ask: Callable[..., Any], tools: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    with tools("parts").Parts(tmp_path / "kept") as parts:
        oracle, first = ask(parts=parts)
        assert len(oracle.asked) == 9
        oracle.asked.clear()
        oracle, again = ask(parts=parts)
        assert oracle.asked == []
        assert json.dumps(again) == json.dumps(first)
        (tmp_path / "kept" / "prefills").mkdir()
        oracle, _ = ask(parts=parts, batch=3)
        assert len(oracle.asked) == 9  # other plans
        assert not (tmp_path / "kept" / "prefills").exists()


def _report(result: dict[str, Any]) -> dict[str, Any]:
    return {"task": "needle", "model": "tiny", "dtype": "float32", "texts": ["emma"], **result}


# ---- the report ----------------------------------------------------------------------------------------


def test_tables_and_plots_of_answers(
    ask: Callable[..., Any], tools: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    report = _report(ask()[1])
    out = tools("evaluation_table").table(report)
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")
    ]
    assert len({len(row) for row in rows[:8]}) == 1
    few = next(row for row in rows if row[:3] == ["single", str(LENGTH), "few"])
    assert few[5:] == ["75.0 (30.1–95.4)", "75.0 (30.1–95.4)", "66.7 (20.8–93.9)", "1", "1", "50.0"]
    cannot = [row[7] for row in rows if row[0] == "extraction"]
    assert cannot == ["resident cannot do it"] * 2
    (total,) = [row for row in rows if row[0] == "same" and len(row) == 4]
    assert total[2:] == ["100.0 (64.6–100.0)", "2 of 3"]

    plots = tools("evaluation_plots")
    with patch.object(plots, "line_plot") as line_plot:
        (path,) = plots.plot_report(report, tmp_path)
    assert path == tmp_path / "score_memory.png"
    _, _, _, _, series = line_plot.call_args.args
    assert [round(y, 1) for _, y, _, _ in series["group"]] == [83.3, 100]
    assert all(low <= y <= high for _, y, low, high in series["group"])
    assert "o group" in plots.terminal_plots(report)


def test_plots_of_texts(tools: Callable[[str], ModuleType], tmp_path: Path) -> None:
    def row(name: str, strategy: str | None, memory: float, kl: float) -> dict[str, Any]:
        return {
            "name": name, "strategy": strategy, "memory_fraction": memory, "kl": kl, "kl_interval": None,
            "top1": 0.9, "top1_interval": [0.8, 1.0],
        }  # fmt: skip

    plots = tools("evaluation_plots")
    rows = [
        row("flexgen", None, 0.2, 0),
        row("group at 8 %", "kvswap", 0.08, 0.04),
        row("x", "kvswap", 0.1, 0.03),
    ]
    report = {"task": "text", "model": "tiny", "dtype": "float32", "tokens": 5, "context": 60, "plans": rows}
    with patch.object(plots, "line_plot") as line_plot:
        assert [path.name for path in plots.plot_report(report, tmp_path)] == [
            "kl_memory.png",
            "top1_memory.png",
        ]
    kl, top1 = (call.args[4] for call in line_plot.call_args_list)
    assert kl == {"flexgen": [(20, 0, 0, 0)], "group": [(8, 0.04, 0.04, 0.04), (10, 0.03, 0.03, 0.03)]}
    assert top1["flexgen"] == [(20, 90, 80, 100)]
    assert plots.terminal_plots({**report, "plans": rows[:1]}) == ""


# ---- intervals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0, 0.2775), (10, 10, 0.7225, 1), (8, 10, 0.4902, 0.9433), (81, 263, 0.2553, 0.3662)],
)
def test_wilson(
    tools: Callable[[str], ModuleType], successes: int, trials: int, low: float, high: float
) -> None:
    """Published values: Newcombe 1998, Statistics in Medicine 17, table I, for 81 of 263."""
    assert tools("intervals").wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_bootstrap(tools: Callable[[str], ModuleType]) -> None:
    """As wide as the normal approximation where that holds; the same for the same numbers."""
    intervals = tools("intervals")
    rng = np.random.default_rng(1)
    scores = rng.uniform(0.2, 0.8, 60).tolist()
    low, high = intervals.mean_interval(scores)
    assert high - low == pytest.approx(2 * 1.96 * np.std(scores) / np.sqrt(60), rel=0.06)
    assert intervals.mean_interval(scores) == (low, high)
    assert intervals.mean_interval([1, 1, 0]) == intervals.wilson(2, 3)

    parts = [score * part for score, part in zip(scores, rng.uniform(0.5, 1, 60), strict=True)]
    ratio = sum(parts) / sum(scores)
    spread = (
        np.std([p - ratio * w for p, w in zip(parts, scores, strict=True)]) / np.mean(scores) / np.sqrt(60)
    )
    low, high = intervals.ratio_interval(parts, scores)
    assert low < ratio < high
    assert high - low == pytest.approx(2 * 1.96 * spread, rel=0.06)
    two = intervals.mean_of_ratios_interval([(parts, scores), (scores, scores)])
    assert two[1] - two[0] == pytest.approx((high - low) / 2, rel=0.06)
    nothing = [([0, 0], [1, 0.5]), ([0], [1])]
    assert intervals.mean_of_ratios_interval(nothing) == intervals.wilson(0, 3)


# ---- parts ---------------------------------------------------------------------------------------------


def test_parts_are_found_by_all_that_they_depend_on(
    tools: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tools("parts")
    key = {"task": "text", "plan": "a", "prompts": [1, 2]}
    with module.Parts(tmp_path) as parts:
        assert parts.find(key) is None
        assert parts.part(key, lambda: {"kl": 0.1}) == {"kl": 0.1}
        with pytest.raises(UsageError, match=r"another evaluation goes on in .*; choose another --resume"):
            module.Parts(tmp_path)
    with module.Parts(tmp_path) as parts:
        assert parts.part(key, _never) == {"kl": 0.1}
        assert parts.find({**key, "plan": "b"}) is None
    monkeypatch.setattr(module, "code_digest", lambda: "other code")
    with module.Parts(tmp_path) as parts:
        assert parts.find(key) is None
    monkeypatch.undo()
    (path,) = (tmp_path / "text").iterdir()
    path.write_bytes(path.read_bytes().replace(b"0.1", b"0.2"))  # damaged
    with module.Parts(tmp_path) as parts:
        assert parts.part(key, lambda: {"kl": 0.3}) == {"kl": 0.3}


def _never() -> dict[str, float]:
    raise AssertionError("computed again")


def test_prefills_outlive_an_interrupt(
    tools: Callable[[str], ModuleType], model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not those of another plan or of other code, and are gone once all is done."""
    module = tools("parts")
    plan = make_plan(model.geometry, cache="resident")
    places = []

    def prefill(parts: Any, plan: Plan, *, stop: bool) -> None:
        with parts.prefills(plan) as place:
            place.mkdir(parents=True, exist_ok=True)
            (place / "prompt").touch()
            places.append(place)
            if stop:
                raise KeyboardInterrupt

    with module.Parts(tmp_path) as parts:
        with pytest.raises(KeyboardInterrupt):
            prefill(parts, plan, stop=True)
        with pytest.raises(KeyboardInterrupt):
            prefill(parts, msgspec.structs.replace(plan, max_context=77), stop=True)
    monkeypatch.setattr(module, "code_digest", lambda: "other code")
    with module.Parts(tmp_path) as parts:
        with pytest.raises(KeyboardInterrupt):
            prefill(parts, plan, stop=True)
    assert len({*places}) == 3
    assert all((place / "prompt").exists() for place in places)
    with module.Parts(tmp_path) as parts:
        prefill(parts, plan, stop=False)
    assert not (tmp_path / "prefills").exists()
