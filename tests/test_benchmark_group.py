"""tools/benchmark.py under policy `group`: what it counts per step, its floors, its growth, its flags."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_checkpoint
from tool_runs import Outcome, run_tool, small_benchmark

from swapkv_jax import Engine, load_model, make_plan
from swapkv_jax.accounting import kv_bytes
from swapkv_jax.adapter import Adapter
from swapkv_jax.capture import capture
from swapkv_jax.planner import GROUP_SIZE, SELECTION, load_buckets, weight_bytes
from swapkv_jax.selection import Selection

TOOLS = Path(__file__).parents[1] / "tools"
EMMA = Path(__file__).parent / "texts" / "emma.txt"
CONTEXT, BATCH, STEPS, BURST = 70, 2, 5, 2
NEW = 1 + 2 * BURST + STEPS  # the prefill's, the warm-up's, the timed
CHOICE = msgspec.structs.replace(SELECTION, selected_groups=8, reuse_slots=8, rank=8, recent_groups=2)
FLAGS = [
    "--selected-groups",
    "8",
    "--reuse-slots",
    "8",
    "--rank",
    "8",
    "--recent",
    "2",
    "--record-alignment",
    "512",
]
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("benchmark"))


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    tool = small_benchmark(monkeypatch)
    monkeypatch.setattr(importlib.import_module("contenders"), "RANDOM_READS", 128)
    monkeypatch.setattr(importlib.import_module("scan"), "_MORE_THAN_CACHES", 1 << 20)
    return tool


@pytest.fixture
def adapter(benchmark: ModuleType, checkpoint: Path, tmp_path: Path) -> Path:
    """Random directions: which groups they select matters to no test here."""
    importlib.import_module("random_model").random_adapter(load_model(str(checkpoint))).save(
        tmp_path / "adapter"
    )
    return tmp_path / "adapter"


@pytest.fixture
def run(benchmark: ModuleType, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the tool on the tiny checkpoint."""

    def run(*flags: str) -> Outcome:
        out = tmp_path / "out.json"
        base = [
            "--model",
            str(checkpoint),
            "--context",
            str(CONTEXT),
            "--steps",
            str(STEPS),
            "--burst",
            str(BURST),
        ]
        base += ["--store-dir", str(tmp_path / "store"), "--json", str(out), "--breakdown", "0", *FLAGS]
        return run_tool(benchmark.main, [*base, *flags], out, capfd)

    return run


def test_group_rows(run: Run, checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    """Counted over the timed steps alone, as an engine that decodes the same counts them itself."""
    flags = ["--policies", "resident,group", "--group-tier", "disk,dram", "--batch", str(BATCH)]
    code, out, err, report = run(*flags, "--prompt-file", str(EMMA), "--adapter", str(adapter))
    assert code == 0
    assert (report["prefill"], report["burst"], report["notes"]) == ("once", BURST, [])
    assert "prefill (layers)" in err
    resident, disk, dram = report["rows"]
    assert [row["kv_dtype"] for row in report["rows"]] == ["float32", "bfloat16", "bfloat16"]
    assert [(row["policy"], row["tier"]) for row in (disk, dram)] == [("group", "disk"), ("group", "dram")]
    model = load_model(str(checkpoint))
    plan = make_plan(
        model.geometry,
        cache="group",
        tier="disk",
        batch=BATCH,
        max_context=CONTEXT + NEW,
        selection=msgspec.structs.replace(CHOICE, load_buckets=load_buckets(BATCH, CHOICE.selected_groups)),
        record_alignment=512,
    )
    windows = importlib.import_module("windows").cut_windows(
        model, {"emma.txt": EMMA.read_text()}, BATCH, CONTEXT, NEW - 1
    )
    prompts = [window.prompt for window in windows]
    prefilled = capture(model, prompts, tmp_path / "capture")
    with Engine(model, plan, store_dir=tmp_path, adapter=Adapter.load(adapter, model.fingerprint)) as engine:
        generation = engine.generate(
            prompts,
            max_new_tokens=NEW,
            ignore_eos=True,
            forced=[window.following for window in windows],
            prefilled=prefilled,
        )
        uses = [engine.use for _ in generation]
    before, after = uses[2 * BURST], uses[-1]
    selected = after.groups_selected - before.groups_selected
    read = after.groups_read - before.groups_read
    assert selected == STEPS * BATCH * model.geometry.layers * CHOICE.selected_groups
    assert 0 < read < selected
    bandwidth = report["machine"]["memory_bytes_per_s"]
    for row in (disk, dram):
        assert row["groups_selected_per_step"] == selected / STEPS
        assert row["groups_read_per_step"] == read / STEPS
        assert row["reuse_rate"] == pytest.approx(1 - read / selected)
        assert row["overflow_loads"] == after.overflow_loads - before.overflow_loads
        assert 0 <= row["wait_fraction"] < 1
        assert 0 <= row["hidden_fraction"] <= 1
        touched = weight_bytes(model.geometry, "float32") + after.summary_bytes
        touched += selected // STEPS * plan.payload_bytes
        assert row["floor_memory_s"] * bandwidth == pytest.approx(touched)
        assert row["tokens_as_first"] is None
        assert row["compiles_during_decode"] == 0
        assert row["scan_s"] > 0
        assert f"{row['reuse_rate']:.3f}" in out
    assert disk["kv_bytes"] == kv_bytes(plan, model.geometry)
    assert disk["memory_fraction"] < dram["memory_fraction"]
    assert (
        disk["memory_fraction"] * plan.full_kv_bytes == disk["kv_bytes"]["device"] + disk["kv_bytes"]["dram"]
    )
    assert resident["scan_s"] is resident["reuse_rate"] is resident["groups_read_per_step"] is None
    # What is still being written comes out of memory, not from the disk.
    assert 0 < disk["bytes_read_per_step"] <= disk["groups_read_per_step"] * plan.stride_bytes * (1 + 1e-9)
    assert 0 <= disk["read_between_fraction"] <= 1
    assert disk["random_reader_bytes_per_s"] > 1e5
    assert disk["floor_disk_s"] == pytest.approx(
        disk["bytes_read_per_step"] / disk["random_reader_bytes_per_s"]
    )
    assert dram["bytes_read_per_step"] is dram["random_reader_bytes_per_s"] is None
    assert dram["floor_disk_s"] == 0
    assert 0 < dram["groups_from_dram_per_step"] <= dram["groups_read_per_step"]
    assert report["growth"] == []
    assert list((tmp_path / "store").iterdir()) == []


def test_the_warm_up_is_as_long_as_asked(run: Run, checkpoint: Path, adapter: Path) -> None:
    """A note says so where it leaves some of the first steps, in which all layers select, to be timed."""
    refresh = ",".join(["4"] * load_model(str(checkpoint)).geometry.layers)
    flags = ["--policies", "group", "--batch", "1", "--prefill", "random", "--adapter", str(adapter)]
    flags += ["--refresh", refresh]
    _, out, _, short = run(*flags, "--opening-steps", "4", "--warm-up", "3")
    _, _, _, long = run(*flags, "--opening-steps", "4", "--warm-up", "4")
    assert (short["warm_up"], long["warm_up"]) == (3, 4)
    assert f"{STEPS} steps in turns of {BURST} after 3" in out
    assert any("give --warm-up 4" in note for note in short["notes"])
    assert not any("warm-up" in note for note in long["notes"])


@given(timed=st.integers(1, 40), burst=st.integers(1, 20), warm_up=st.none() | st.integers(1, 40))
def test_turns_are_of_the_steps_that_were_asked_for(timed: int, burst: int, warm_up: int | None) -> None:
    steps = importlib.import_module("rounds").Steps(timed=timed, burst=burst, warm_up=warm_up, breakdown=3)
    sizes = {counts: [n for n, counted in steps.turns if counted == counts] for counts in (False, True)}
    assert (sum(sizes[False]), sum(sizes[True])) == (2 * burst if warm_up is None else warm_up, timed)
    assert max(sizes[False] + sizes[True]) <= burst
    assert [counts for _, counts in steps.turns] == sorted(counts for _, counts in steps.turns)
    assert steps.new_tokens == 1 + sum(n for n, _ in steps.turns) + 3


@pytest.mark.parametrize(("flags", "kv"), [([], "bfloat16"), (["--kv-dtype", "float32"], "float32")])
def test_keys_and_values_of_what_selects_have_a_dtype_of_their_own(
    benchmark: ModuleType, checkpoint: Path, flags: list[str], kv: str
) -> None:
    parser = importlib.import_module("benchmark_flags").make_parser()
    args = parser.parse_args(["--policies", "resident,group,quest", "--json", "x", *FLAGS, *flags])
    shape = importlib.import_module("benchmark_shapes").make_shape(
        args, load_model(str(checkpoint)), None, 70, 2
    )
    assert [(name, plan.cache_dtype) for name, plan in shape.plans] == [
        ("resident", "float32"),
        ("group", kv),
        ("quest", kv),
    ]
    assert len({plan.full_kv_bytes for _, plan in shape.plans}) == 1


@pytest.mark.slow
def test_growth_with_random_weights(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """At contexts that the model does not allow; nothing is calibrated for weights that mean nothing."""
    monkeypatch.setattr("swapkv_jax.calibration.calibrate", None)
    flags = ["--policies", "group", "--weights", "random", "--prefill", "random", "--context", "64,640"]
    code, out, _, report = run(*flags)
    assert code == 0
    short, long = report["rows"]
    (grown,) = report["growth"]
    assert (grown["tier"], grown["batch"], grown["contexts"]) == ("disk", 1, [64, 640])
    assert grown["step_s"] == long["tpot_s"] - short["tpot_s"]
    assert grown["scan_s"] == long["scan_s"] - short["scan_s"]
    per_group = CHOICE.rank * 2 * 4  # bfloat16, 4 layers
    expected = (640 - 64) // GROUP_SIZE * per_group / report["machine"]["memory_bytes_per_s"]
    assert grown["scan_floor_s"] == pytest.approx(expected)
    assert report["model"].endswith("with random weights")
    assert "reuse is lower" in report["notes"][0]
    assert report["notes"][0] in out
    assert "context 64 to 640: step" in out
    code, _, err, _ = run("--policies", "group", "--prefill", "random", "--context", "640")
    assert code == 2
    assert "use at most 256" in err


# --- parts ---


class Later(msgspec.Struct, frozen=True, kw_only=True):
    """A selection as it may become."""

    selected_groups: int = 9
    reuse_slots: int = 9
    rank: int | None = None
    ranks: tuple[int, ...] | None = None
    spans: tuple[tuple[int, int], ...] = ((1, 2),)
    share: float = 0.5
    mode: Literal["near", "far"] = "near"


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ([], {}),
        (["--rank", "8"], {"rank": 8}),
        (["--ranks", "8,4,2"], {"ranks": (8, 4, 2)}),
        (["--ranks", "8"], {"ranks": (8,)}),
        (["--ranks", "[8, 4]"], {"ranks": (8, 4)}),
        (["--spans", "[[3, 4], [5, 6]]"], {"spans": ((3, 4), (5, 6))}),
        (["--share", "0.25", "--mode", "far"], {"share": 0.25, "mode": "far"}),
        (["--selected-groups", "20"], {"selected_groups": 20, "reuse_slots": 20}),
        (["--selected-groups", "5"], {"selected_groups": 5}),
        (["--selected-groups", "20", "--reuse-slots", "10"], {"selected_groups": 20, "reuse_slots": 10}),
    ],
)
def test_any_field_of_a_selection_is_a_flag(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, flags: list[str], fields: dict[str, Any]
) -> None:
    selection_flags = importlib.import_module("selection_flags")
    monkeypatch.setattr(selection_flags, "Selection", Later)
    monkeypatch.setattr(selection_flags, "SELECTION", Later())
    parser = argparse.ArgumentParser()
    selection_flags.add_selection_flags(parser)
    args = parser.parse_args([*flags, "--group-tokens", "2"])
    chosen = {"selection": Later(**fields)} if flags else {}  # without a flag the planner chooses
    assert selection_flags.group_choices(args) == {**chosen, "group_tokens": 2}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rank", "x"], "'x' does not fit: Expected `int`"),
        (["--load-buckets", "8,x"], "'8,x' does not fit"),
        (["--aggregate", "max"], "invalid choice: 'max'"),
        (["--group-tokens", "0"], "'0' is not a positive number"),
    ],
)
def test_flags_that_do_not_fit(
    benchmark: ModuleType, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    selection_flags = importlib.import_module("selection_flags")
    parser = argparse.ArgumentParser()
    selection_flags.add_selection_flags(parser)
    assert (
        set(Selection.__struct_fields__) - {"strategy", "outlier_groups"}
        <= vars(parser.parse_args([])).keys()
    )
    with pytest.raises(SystemExit):
        parser.parse_args(flags)
    assert message in capsys.readouterr().err
