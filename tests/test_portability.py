"""tools/portability.py on a tiny geometry: what passes, what must fail, what is skipped and said to be."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from swapkv_jax.kernels.gather_attention import gather_attention  # pyright: ignore[reportMissingImports]
from tiny import tiny_checkpoint
from tool_runs import Outcome, run_tool

from swapkv_jax import attention_choice, program
from swapkv_jax import plan as plan_module
from swapkv_jax.plan_buffers import Buffer, plan_buffers
from swapkv_jax.planner import make_plan, weight_bytes
from swapkv_jax.sampling import Sampling

TOOLS = Path(__file__).parents[1] / "tools"
CONTEXT, BATCH = 64, 2
Run = Callable[..., Outcome]
Segment = Callable[[Any], Callable[..., Any]]
real_segment, real_head = program._segment, program._head


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("portability")) / "config.json"


@pytest.fixture
def run(
    tools: Callable[[str], ModuleType],
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Run:
    """Runs the tool on the tiny geometry, for greedy tokens."""

    def run(*flags: str) -> Outcome:
        out = tmp_path / "out.json"
        sizes = ["--context", str(CONTEXT), "--batch", str(BATCH)]
        main = tools("portability").main
        # The head that samples compiles longer than all else together.
        monkeypatch.setattr(tools("portability"), "SAMPLINGS", (Sampling(),))
        return run_tool(main, ["--model", str(config), *sizes, "--json", str(out), *flags], out, capfd)

    return run


@pytest.fixture
def no_compilers(tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where neither extra is installed."""
    targets = tools("portability_targets")
    monkeypatch.setattr(targets.importlib, "util", SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(targets, "entry_points", lambda group: ())


# ---- what passes -----------------------------------------------------------------------------------------


def test_every_policy_compiles_for_the_cpu(run: Run) -> None:
    done = run("--targets", "cpu")
    assert done.code == 0, done.out
    rows = done.report["rows"]
    assert [row["plan"] for row in rows] == ["resident", "layer/dram", "layer/disk", "group"]
    assert done.report["counts"] == {"passed": 4, "failed": 0, "too large": 0, "skipped": 0}
    for row in rows:
        assert row["compiled"] == row["planned"] > 0
        assert row["status"] in done.out
        for graph in row["graphs"]:
            assert graph["arguments"] == graph["planned_arguments"] > 0
            assert graph["temporaries"] >= 0
            assert graph["failures"] == []
    names = {row["plan"]: [graph["name"] for graph in row["graphs"]] for row in rows}
    assert names["resident"] == ["segment", "head", "append"]
    assert "fill" in names["layer/disk"]
    assert {"segment", "predict"} <= set(names["group"])


def test_a_plan_from_a_file(
    run: Run, tmp_path: Path, config: Path, tools: Callable[[str], ModuleType]
) -> None:
    models, targets = tools("portability_models"), tools("portability_targets").TARGETS
    plan = models.plan_for("layer/dram", models.subject(str(config), 1, 32), targets["cpu"])
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    done = run("--targets", "cpu", "--plan", str(file), "--quiet")
    assert (done.code, done.err) == (0, "")
    assert done.report["counts"]["passed"] == 1
    assert [(row["plan"], row["plan_hash"]) for row in done.report["rows"]] == [("plan.json", plan.hash)]


def test_built_in_models_are_those_that_the_tool_names(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every built-in plan of every target is one that its geometry allows, with the target's kernel if it has one."""
    monkeypatch.setattr(attention_choice, "version", lambda name: "0.12.0")
    models = tools("portability_models")
    weights = {"smollm2-135m": 134_515_008, "llama-3.1-8b": 8_030_261_248, "qwen3-4b": 4_022_468_096}
    for name in models.MODELS:
        chosen = models.subject(name, None, None)
        assert weight_bytes(chosen.geometry, "bfloat16") == 2 * weights[name], name
        for label in models.PLANS:
            for target in tools("portability_targets").TARGETS.values():
                plan = models.plan_for(label, chosen, target)
                plan.validate(chosen.geometry)
                kernels = {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}
                served = label in ("group", "group/4") and target.name != "a100"
                expected = kernels.get(target.kind, "xla") if served else "xla"
                if label == "group" and target.name in ("h100", "h200"):
                    expected = "mosaic_hopper"
                assert plan.attention == expected, (name, label, target.name)


# ---- what must fail --------------------------------------------------------------------------------------


def with_callback(block: Any) -> Callable[..., Any]:
    def segment(layers, x, ks, vs, news, lengths):
        x = jax.pure_callback(lambda x: np.asarray(x), x, x)
        return real_segment(block)(layers, x, ks, vs, news, lengths)

    return segment


def with_print(block: Any) -> Callable[..., Any]:
    def segment(layers, x, *rest):
        jax.debug.print("{}", x[0, 0])
        return real_segment(block)(layers, x, *rest)

    return segment


def with_scan(block: Any) -> Callable[..., Any]:
    """The segment's layers stacked, and scanned over."""

    def segment(layers, x, ks, vs, news, lengths):
        def layer(x, one):
            params, k, v, new = one
            x, out = real_segment(block)([params], x, [k], [v], [new], lengths)
            return x, out[0]

        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        x, out = jax.lax.scan(layer, x, (stacked, jnp.stack(ks), jnp.stack(vs), jnp.stack(news)))
        return x, list(out)

    return segment


def with_host_transfer(block: Any) -> Callable[..., Any]:
    def segment(layers, x, *rest):
        x = jax.device_put(jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device)
        return real_segment(block)(layers, x, *rest)

    return segment


@pytest.mark.usefixtures("no_compilers")
@pytest.mark.parametrize(
    ("target", "mutated", "named"),
    [
        ("cpu", with_callback, "host callback (pure_callback)"),
        ("v5e", with_print, "host callback (debug"),
        ("v5e", with_callback, "host callback (pure_callback)"),
        ("h100", with_callback, "host callback (pure_callback)"),
        ("h100", with_scan, "loop (scan)"),
        ("h100", with_host_transfer, "host-memory transfer (device_put)"),
    ],
)
def test_what_no_segment_may_hold_fails(
    run: Run, monkeypatch: pytest.MonkeyPatch, target: str, mutated: Segment, named: str
) -> None:
    """Without any of the extras; only the mutated graph fails."""
    monkeypatch.setattr(program, "_segment", mutated)
    done = run("--targets", target, "--plans", "resident")
    assert done.code == 1
    assert f"resident {target} segment: {named}" in done.out
    assert [row["status"] for row in done.report["rows"]] == ["failed"]
    failed = {g["name"] for g in done.report["rows"][0]["graphs"] if g["failures"]}
    assert failed == {"segment"}


@pytest.mark.usefixtures("no_compilers")
def test_what_only_a_gpu_forbids_passes_elsewhere(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_segment", with_scan)
    done = run("--targets", "v5e", "--plans", "resident")
    assert done.code == 0, done.out
    assert [row["failures"] for row in done.report["rows"]] == [[]]


def test_a_buffer_that_no_graph_takes_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def more(*arguments: Any) -> Iterator[Buffer]:
        yield from plan_buffers(*arguments)
        yield Buffer(name="extra", shape=(3, 5), dtype="float32", tier="device")

    monkeypatch.setattr(plan_module, "plan_buffers", more)
    done = run("--targets", "cpu", "--plans", "layer/dram")
    assert done.code == 1
    assert "no decode graph takes buffer extra [3, 5] float32" in done.out


def test_bytes_that_no_plan_holds_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fewer(*arguments: Any) -> Iterator[Buffer]:
        return (buffer for buffer in plan_buffers(*arguments) if not buffer.name.startswith("kv."))

    monkeypatch.setattr(plan_module, "plan_buffers", fewer)
    done = run("--targets", "cpu", "--plans", "resident", "--context", "256", "--batch", "16")
    assert done.code == 1
    assert "device bytes: " in done.out


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_buffer_that_moves_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that gives its logits in another dtype cannot give them in the memory of those it takes."""

    def moved(geometry: Any, sampling: Any) -> Callable[..., Any]:
        def head(*arguments):
            x, tokens, lengths, logits = real_head(geometry, sampling)(*arguments)
            return x, tokens, lengths, logits.astype(jnp.bfloat16)

        return head

    monkeypatch.setattr(program, "_head", moved)
    done = run("--targets", "cpu", "--plans", "layer/dram")
    assert done.code == 1
    assert "layer/dram cpu head: of " in done.out
    assert "buffers would move" in done.out


# ---- what is skipped, and too large ----------------------------------------------------------------------


@pytest.mark.usefixtures("no_compilers")
def test_missing_compilers_are_named_and_never_passed(run: Run) -> None:
    done = run("--targets", "cpu,v6e,h200", "--plans", "resident")
    assert done.code == 0, done.out
    assert "v6e: skipped (install extra aot-tpu)" in done.out
    assert "h200: skipped (install extra aot-cuda)" in done.out
    assert [row["status"] for row in done.report["rows"]] == ["passed", "skipped", "skipped"]
    assert all(graph["arguments"] is None for row in done.report["rows"][1:] for graph in row["graphs"])
    assert done.report["counts"]["passed"] == 1


def test_a_compiler_that_cannot_be_set_up_is_no_skip(
    run: Run, tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(target: Any) -> Any:
        raise RuntimeError("of another version")

    monkeypatch.setattr(tools("portability_targets").Target, "missing", lambda self: None)
    monkeypatch.setitem(tools("portability_targets")._DEVICES, "tpu", broken)
    done = run("--targets", "v5e", "--plans", "resident")
    assert done.code == 1
    assert "v5e: its compiler cannot be set up: of another version" in done.out


def test_graphs_larger_than_a_device(
    run: Run,
    tools: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config: Path,
) -> None:
    """Of a plan of the tool's own it is said, of one that was asked for it is a failure."""
    targets, models = tools("portability_targets"), tools("portability_models")
    monkeypatch.setitem(targets.TARGETS, "cpu", replace(targets.TARGETS["cpu"], memory=1000))
    done = run("--targets", "cpu", "--plans", "resident")
    assert done.code == 0
    assert [row["status"] for row in done.report["rows"]] == ["too large"]
    assert "too large" in done.out
    assert "does not fit one device" in done.out
    file = tmp_path / "plan.json"
    file.write_text(
        models.plan_for("resident", models.subject(str(config), 1, 32), targets.TARGETS["cpu"]).to_json()
    )
    done = run("--targets", "cpu", "--plan", str(file))
    assert done.code == 1
    assert "bytes of one device, which has 1,000" in done.out


def test_graphs_of_one_name_are_numbered(tools: Callable[[str], ModuleType]) -> None:
    specs = [SimpleNamespace(name=name) for name in ("segment", "load", "load", "head")]
    assert tools("portability_graph").names(specs) == ["segment", "load.0", "load.1", "head"]


def test_usage(run: Run, tmp_path: Path) -> None:
    assert run("--targets", "cpu,h900").code == 2
    assert run("--targets", "cpu", "--plan", str(tmp_path / "none.json")).code == 2
    assert (
        run("--targets", "cpu", "--plan", "p.json", "--model", "qwen3-4b").code == 2
    )  # two models, one plan
    missing = run("--targets", "cpu", "--model", str(tmp_path / "none"))
    assert missing.code == 1
    assert "smollm2-135m" in missing.err


# ---- the parts -------------------------------------------------------------------------------------------


def test_of_branches_by_platform_the_one_that_runs_counts(tools: Callable[[str], ModuleType]) -> None:
    lint = tools("portability_lint").lint

    def looped(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda i, y: y + 1, x)

    def at_once(x: jax.Array) -> jax.Array:
        return x + 3

    x = jnp.zeros((), jnp.int32)
    safe = jax.jit(lambda x: jax.lax.platform_dependent(x, cuda=at_once, default=looped)).trace(x).jaxpr
    assert lint(safe, "cuda") == lint(safe, "cpu") == []
    wrong = jax.jit(lambda x: jax.lax.platform_dependent(x, cpu=at_once, default=looped)).trace(x).jaxpr
    assert [problem.partition(",")[0] for problem in lint(wrong, "cuda")] == ["loop (scan)"]
    inside = jax.jit(lambda x: jax.lax.cond(x > 0, looped, at_once, x)).trace(x).jaxpr
    assert lint(inside, "cuda")


def test_dynamic_shapes_are_found(tools: Callable[[str], ModuleType]) -> None:
    (size,) = jax.export.symbolic_shape("n")
    jaxpr = jax.jit(lambda x: x + 1).trace(jax.ShapeDtypeStruct((size,), jnp.float32)).jaxpr
    assert tools("portability_lint").lint(jaxpr, "tpu") == ["dynamic shape (add)"]


KERNEL = "001: kCustomKernel [source | sink] fusion grid: [1, 1, 1]\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("000: kCommandBuffer [source | sink] \n    " + KERNEL + "    " + KERNEL, None),
        (KERNEL * 4, None),
        (KERNEL * 5, "0 command buffers beside 5 launches, not exactly one"),
        (
            "000: kCommandBuffer [source] \n    " + KERNEL + KERNEL + "007: kCommandBuffer [sink] \n",
            "2 command buffers beside 1 launches, not exactly one",
        ),
        (
            "001: kCopy [source] kCopy\n002: kWhile [sink]\ncondition:\n    "
            + KERNEL
            + "  body:\n    "
            + KERNEL,
            "0 command buffers beside kWhile, not exactly one",
        ),
    ],
)
def test_thunks(tools: Callable[[str], ModuleType], text: str, problem: str | None) -> None:
    assert tools("portability_thunks").parse_thunks(text).problem == problem


@pytest.mark.parametrize(
    ("shape", "itemsize", "order", "tiling", "expected"),
    [  # as XLA's TPU compiler lays them out, and counts their bytes
        ((8, 32, 4, 64), 2, (0, 1, 2, 3), ((4, 128), (2, 1)), 262_144),
        ((576,), 2, (0,), ((1024,), (128,), (2, 1)), 2048),
        ((), 4, (), ((128,),), 512),
        ((1, 147), 1, (0, 1), ((4, 128), (4, 1)), 1024),
        ((1536, 576), 2, (1, 0), ((8, 128), (2, 1)), 1_769_472),
        ((1, 3, 64, 588), 2, (0, 1, 2, 3), ((8, 128), (2, 1)), 245_760),
        ((1, 3, 588, 64), 2, (0, 1, 3, 2), ((8, 128), (2, 1)), 245_760),
        ((3, 5, 7), 4, (0, 1, 2), (), 420),
    ],
)
def test_bytes_of_tiled_layouts(
    tools: Callable[[str], ModuleType],
    shape: tuple[int, ...],
    itemsize: int,
    order: tuple[int, ...],
    tiling: Any,
    expected: int,
) -> None:
    layout = SimpleNamespace(major_to_minor=order, tiling=tiling)
    assert tools("portability_bytes").laid_out_bytes(shape, itemsize, layout) == expected


def test_a_spare_slot_may_go_unused(tools: Callable[[str], ModuleType]) -> None:
    """What a compiler's temporaries may be of a plan whose graph holds two layers and half of one more: as on v4,
    which does without that half of Llama's, or as on the others; but no less, and no other buffer may be missing."""
    module = tools("portability_bytes")
    geometry = tools("portability_models").subject("llama-3.1-8b", None, None).geometry
    sizes = {"batch": 8, "max_context": 32_768, "dtype": "bfloat16", "platform": "tpu"}
    plan = make_plan(geometry, cache="layer", tier="dram", **sizes)
    held = {b.name: b for b in plan.buffers(geometry) if b.tier == "device" and b.phase == "always"}
    in_graph = [b.bytes for b in plan.buffers(geometry) if b.phase == "graph"]
    spare = in_graph[-1]
    assert in_graph == [spare] * 5

    def found(temporaries: int, names: Sequence[str]) -> Any:
        taken = [
            module.Argument(
                held[name].shape, held[name].dtype, weight=False, host=False, bytes=held[name].bytes
            )
            for name in names
        ]
        return module.plan_bytes(plan, geometry, [taken], temporaries)

    rest = sum(b.bytes for b in held.values())
    for temporaries, compiled in ((4 * spare, 4 * spare), (5 * spare, 5 * spare), (6 * spare, 5 * spare)):
        bytes_ = found(temporaries, list(held))
        assert bytes_.problems == ()
        assert (bytes_.planned, bytes_.compiled) == (5 * spare + rest, compiled + rest)
        assert bytes_.temporaries == max(0, temporaries - 5 * spare)
    (problem,) = found(3 * spare, list(held)).problems
    assert problem.startswith(f"device bytes: {3 * spare + rest:,} compiled")
    first, *_ = found(4 * spare, ()).problems
    assert first.startswith(f"no decode graph takes buffer {next(iter(held))} ")


def test_a_plan_for_another_generation_is_refused(
    tools: Callable[[str], ModuleType], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before its compiler is asked, which ends the process: other GPUs have no such instruction."""
    (tmp_path / "config.json").write_text(json.dumps(ALIGNED))
    models, out = tools("portability_models"), tmp_path / "out.json"
    chosen = models.subject(str(tmp_path), 1, 1024)
    fields = {"max_context": 1024, "dtype": "bfloat16", "group_tokens": 8, "attention": "mosaic_hopper"}
    (tmp_path / "plan.json").write_text(make_plan(chosen.geometry, cache="group", **fields).to_json())
    flags = ["--model", str(tmp_path), "--plan", str(tmp_path / "plan.json"), "--targets", "b200"]
    done = run_tool(tools("portability").main, [*flags, "--json", str(out)], out, capfd)
    assert done.code == 1
    assert (
        "mosaic_hopper needs compute capability 9.0 (Hopper), not 10.0; use attention mosaic_gpu" in done.out
    )
    assert done.report["rows"][0]["graphs"] == []


def test_each_generation_of_gpus_has_a_process(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, targets = tools("portability"), tools("portability_targets").TARGETS
    asked = [targets[name] for name in ("cpu", "b200", "a100", "h100", "v5e", "h200")]
    monkeypatch.setattr(tools("portability_targets").Target, "missing", lambda target: None)
    here, apart = tool.by_process(asked)
    assert [target.name for target in here] == ["cpu", "a100", "v5e", "b200"]
    assert [[target.name for target in others] for others in apart] == [["h100", "h200"]]
    monkeypatch.setattr(tools("portability_targets").Target, "missing", lambda target: "not here")
    assert tool.by_process(asked) == (asked, [])


def test_artefacts_are_for_one_platform(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    done = run("--targets", "cpu", "--plans", "layer/dram", "--artefacts", str(tmp_path / "out"))
    assert done.code == 0, done.out
    files = list((tmp_path / "out").iterdir())
    assert len(files) == len(done.report["rows"][0]["graphs"])
    for file in files:
        assert jax.export.deserialize(bytearray(file.read_bytes())).platforms == ("cpu",)


def test_the_report_is_plain_json(run: Run) -> None:
    done = run("--targets", "cpu", "--plans", "layer/dram")
    assert json.loads(json.dumps(done.report)) == done.report
    assert {"jax", "compilers", "rows", "skipped", "notes", "counts"} == set(done.report)


def test_the_page(run: Run, tmp_path: Path, tools: Callable[[str], ModuleType]) -> None:
    page = tmp_path / "page.md"
    done = run("--targets", "cpu,v5e", "--plans", "layer/dram,group", "--markdown", str(page))
    text = page.read_text()
    assert "| cpu | layer/dram | 2/2 |" in text
    assert "| cpu | group, xla |" in text
    assert all(f"* *{name}*: " in text for name, _ in tools("portability_markdown").COLUMNS)
    if "v5e" in done.report["skipped"]:
        assert "* v5e: skipped (install extra aot-tpu)" in text


def test_the_page_that_is_kept(tools: Callable[[str], ModuleType]) -> None:
    """It is of the form that the tool writes today, and says that everything passed that must."""
    text = (TOOLS / "portability.md").read_text()
    markdown, models = tools("portability_markdown"), tools("portability_models")
    assert markdown.COMMAND in text
    header = "| target | " + " | ".join(name for name, _ in markdown.COLUMNS) + " | |"
    assert text.count(header) == len(models.MODELS)
    assert "FAILED" not in text
    sections = text.split("## ")
    for model in models.MODELS:
        (section,) = (section for section in sections if section.startswith(f"{model},"))
        for target in ("v5e", "v5p", "v6e", "h100"):
            rows = [line for line in section.splitlines() if line.startswith(f"| {target} |")]
            plans = [line.split(" | ")[1].partition(",")[0] for line in rows]
            assert plans == list(models.DEFAULT_PLANS), (model, target)
            assert all(" passed" in row or " too large" in row for row in rows), (model, target)


# ---- where the extras are installed ----------------------------------------------------------------------

ALIGNED = {  # sizes that fill a TPU's tiles, and a cache that arriving records are little beside
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
}


GROUP_PLAN = {"v5e": "mosaic_tpu", "h100": "mosaic_hopper"}


@pytest.fixture
def real(
    tools: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., Outcome]:
    """Runs the tool on the aligned geometry for a target, whose compiler must be installed."""

    def run(target: str, plans: str, *more: str) -> Outcome:
        if tools("portability_targets").TARGETS[target].missing():
            pytest.skip(f"the compiler for {target} is not installed (extras aot-tpu, aot-cuda)")
        monkeypatch.setattr(tools("portability"), "SAMPLINGS", (Sampling(),))
        (tmp_path / "config.json").write_text(json.dumps(ALIGNED))
        out = tmp_path / "real.json"
        targets = ",".join((target, *more))
        flags = ["--model", str(tmp_path), "--targets", targets, "--plans", plans, "--json", str(out)]
        return run_tool(tools("portability").main, flags, out, capfd)

    return run


@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_a_real_compiler(real: Callable[..., Outcome], target: str) -> None:
    done = real(target, "layer/dram,group,group/xla")
    assert done.code == 0, done.out
    new = attention_choice._jax_version() >= attention_choice.MIN_JAX
    kernel_here = GROUP_PLAN[target] if new or target == "v5e" else "xla"
    for row, kernel in zip(done.report["rows"], ("xla", kernel_here, "xla"), strict=True):
        assert row["status"] == "passed"
        assert row["attention"] == kernel
        assert row["planned"] <= row["compiled"] <= 1.02 * row["planned"]
        segment = next(graph for graph in row["graphs"] if graph["name"] == "segment")
        assert bool(segment["kernels"]) == (kernel != "xla")
        assert (segment["host"] > 0) == (target == "v5e" and row["plan"] == "layer/dram"), (
            "only a TPU's graph reads it"
        )
        if target == "h100":
            assert segment["command_buffers"] == 1
            assert segment["launches"] >= 5
    heads = [g["compile_s"] for row in done.report["rows"] for g in row["graphs"] if "head" in g["name"]]
    assert [seconds > 0 for seconds in heads] == [True, False, False], "what two plans share is compiled once"


def test_kernels_of_two_generations_of_gpus(real: Callable[..., Outcome]) -> None:
    done = real("h100", "group", "b200")
    for row in done.report["rows"]:
        segment = next(graph for graph in row["graphs"] if graph["name"] == "segment")
        assert not any("does not compile" in failure for failure in segment["failures"]), row["target"]
    assert [row["target"] for row in done.report["rows"]] == ["h100", "b200"]


def test_groups_of_four_tokens_are_attended_without_tensor_cores(
    real: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_choice, "version", lambda name: "0.12.0")
    done = real("h100", "group/4")
    (row,) = done.report["rows"]
    assert row["attention"] == "mosaic_gpu"
    segment = next(graph for graph in row["graphs"] if graph["name"] == "segment")
    assert len(segment["kernels"]) == 1
    if jax.__version_info__ >= attention_choice.MIN_JAX:
        assert row["status"] == "passed", done.out
        assert segment["command_buffers"] == 1


@pytest.mark.parametrize("target", ["v5e", "h100"])
@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ("group", "the plan's kernel is not in the compiled graph"),
        ("group/xla", "a kernel that the plan does not name is in the compiled graph"),
    ],
)
def test_kernels_are_those_of_the_plan(
    real: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, target: str, plan: str, named: str
) -> None:
    """The segment of the other plan in its place."""
    monkeypatch.setattr(attention_choice, "version", lambda name: "0.12.0")
    specs = program.decode_specs

    def swapped(plan: Any, *rest: Any) -> Any:
        other = GROUP_PLAN[target] if plan.attention == "xla" else "xla"
        return specs(msgspec.structs.replace(plan, attention=other), *rest)

    monkeypatch.setattr(importlib.import_module("portability"), "decode_specs", swapped)
    done = real(target, plan)
    assert done.code == 1
    assert f"{plan} {target} segment: {named}" in done.out


def test_a_loop_is_found_in_what_was_compiled_too(
    real: Callable[..., Outcome], tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools("portability_graph"), "lint", lambda *_: [])
    monkeypatch.setattr(program, "_segment", with_scan)
    done = real("h100", "resident")
    assert done.code == 1
    assert "command buffers beside kWhile, not exactly one" in done.out


@pytest.mark.parametrize("group", [8, 16])
def test_the_hopper_kernel_multiplies_with_tensor_cores(
    tools: Callable[[str], ModuleType], group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the PTX of both GPU kernels; and nothing takes the place of registers in memory."""
    target = tools("portability_targets").TARGETS["h100"]
    if reason := target.missing():
        pytest.skip(reason)
    pool, dtype, place = (2, 3, 70, group, 512), jnp.bfloat16, target.sharding()
    operands = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        for shape, dtype in (
            ((2, 3, 5, 256), dtype),
            (pool, dtype),
            ((2, 65), jnp.int32),
            ((2, 65), jnp.bool_),
            ((*pool[:2], *pool[3:]), dtype),
            ((2,), jnp.int32),
        )
    ]
    products = {}
    for backend in ("mosaic_gpu", "mosaic_hopper"):
        dump = tmp_path / backend
        dump.mkdir()
        monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(dump))
        jax.jit(partial(gather_attention, backend=backend)).trace(*operands).lower().compile()
        (ptx,) = (path.read_text() for path in dump.glob("*.ptx"))
        (said,) = (path.read_text() for path in dump.glob("*.ptxas"))
        assert "0 bytes spill stores, 0 bytes spill loads" in said, backend
        products[backend] = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx))
    assert products == {
        "mosaic_gpu": set(),
        "mosaic_hopper": {"m64n64k16.f32.bf16.bf16", "m64n128k16.f32.bf16.bf16"},
    }
