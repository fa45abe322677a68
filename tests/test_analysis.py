"""The analysis through its command line: golden numbers of the two papers, models and devices of all kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapkv_jax.analysis import Question, analyse, step_seconds
from swapkv_jax.devices import device_names
from swapkv_jax.models.named import model_names, name_of, named_geometry
from swapkv_jax.plan import Plan
from swapkv_jax.planner.command import main

KEYS = ["kv_bytes_per_token", "tokens_resident", "tokens_layer", "tokens_transfer_limit", "requests_resident",
        "requests_layer", "layer_slot_bytes", "summary_bytes", "reuse_bytes", "rolling_bytes", "full_kv_bytes",
        "predicted_overhead"]  # fmt: skip
BESIDE = ["plan", "why", "candidates"]
MiB, GiB = 1 << 20, 1 << 30


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Runs the command in this process; returns exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as exit_:  # argparse's own errors
            code = int(exit_.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def ask(run):
    """The analysis as the command's JSON."""

    def ask(*arguments: str) -> dict[str, Any]:
        code, out, err = run(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    return ask


def config_file(directory: Path, **changes: Any) -> str:
    """A configuration of 24 layers whose KV takes 12 KiB per token in bfloat16, with changes."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 24,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "vocab_size": 32_000,
        "max_position_embeddings": 131_072,
        **changes,
    }
    path = directory / "config.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return str(path)


# --- golden numbers: SwapKV's slides, KVSwap's paper ---


def test_llama_3_70b_in_fp8_on_an_h100(ask) -> None:
    given_ = [
        "--device-memory",
        "85GB",
        "--weights-bytes",
        "80GB",
        "--link-bandwidth",
        "56GB/s",
        "--tpot",
        "200ms",
    ]
    for device in ([], ["--device", "h100"]):
        found = ask("--model", "Llama-3-70B", "--kv-dtype", "fp8", *given_, *device)
        assert list(found) == KEYS + BESIDE
        assert found["kv_bytes_per_token"] == 163_840
        assert found["tokens_resident"] == 5 * 10**9 // 163_840 == 30_517
        assert found["tokens_layer"] == 1_220_703, "two of 80 layers: forty times as many"
        assert found["tokens_transfer_limit"] == 68_359, "the slides' 70K"


def test_two_of_24_layers_let_eight_requests_into_a_gibibyte(ask, tmp_path: Path) -> None:
    model = config_file(tmp_path)
    memory = ["--device-memory", "1GiB", "--weights-bytes", "0", "--context", "131072"]
    found = ask("--model", model, *memory, "--physical-layers", "2")
    assert found["full_kv_bytes"] == 1.5 * GiB
    assert found["layer_slot_bytes"] == 0.125 * GiB
    assert (found["requests_resident"], found["requests_layer"]) == (0, 8)
    assert ask("--model", model, *memory, "--batch", "2")["requests_layer"] == 4
    assert ask("--model", model, *memory, "--physical-layers", "24")["layer_slot_bytes"] == 1.5 * GiB


@pytest.mark.parametrize(("sigma", "summary"), [([], 256 * MiB), (["--sigma", "32"], 64 * MiB)])
def test_kvswaps_memory_at_32k(ask, sigma: list[str], summary: int) -> None:
    found = ask("--model", "llama-3.1-8b", "--context", "32768", *sigma)
    assert found["summary_bytes"] == summary
    assert found["reuse_bytes"] == 50 * MiB
    assert found["rolling_bytes"] == 0.5 * MiB
    assert found["full_kv_bytes"] == 4 * GiB


@pytest.mark.parametrize(("context", "batch", "size"), [("16384", "4", 9 * GiB), ("32768", "12", 54 * GiB)])
def test_qwen3_4b(ask, context: str, batch: str, size: int) -> None:
    assert ask("--model", "Qwen/Qwen3-4B", "--context", context, "--batch", batch)["full_kv_bytes"] == size


# --- where facts come from ---


def test_flags_override_the_device(ask) -> None:
    base = ask("--model", "llama-3.1-8b", "--device", "l4", "--context", "8192")
    changes = {
        ("--device-memory", "40GB"): {"tokens_resident", "tokens_layer", "requests_resident", "requests_layer"},
        ("--weights-bytes", "8GB"): {"tokens_resident", "tokens_layer", "requests_resident", "requests_layer",
                                     "tokens_transfer_limit", "predicted_overhead"},
        ("--link-bandwidth", "10GBps"): {"tokens_transfer_limit", "predicted_overhead"},
        ("--tpot", "1ms"): {"tokens_transfer_limit", "predicted_overhead"},
        ("--physical-layers", "4"): {"tokens_layer", "requests_layer", "layer_slot_bytes"},
        ("--group-tokens", "8"): {"rolling_bytes"},
        ("--reuse-tokens", "800"): {"reuse_bytes"},
    }  # fmt: skip
    for flags, keys in changes.items():
        found = ask("--model", "llama-3.1-8b", "--device", "l4", "--context", "8192", *flags)
        assert {key for key in KEYS if found[key] != base[key]} == keys, flags


def test_what_is_not_known_is_null(ask, run) -> None:
    found = ask("--model", "qwen3-8b")
    unknown = {
        "tokens_resident",
        "tokens_layer",
        "tokens_transfer_limit",
        "requests_resident",
        "requests_layer",
    }
    assert {key for key in KEYS if found[key] is None} == unknown | {"predicted_overhead"}
    out = run("--model", "qwen3-8b")[1]
    assert "unknown: give --device or --device-memory" in out
    assert "why:" not in out


@pytest.mark.parametrize("device", device_names())
def test_every_device_has_an_answer(run, device: str) -> None:
    model = "smollm2-135m" if device == "cpu" else "qwen3-4b"  # the machine described there is small
    code, out, _ = run("--model", model, "--device", device, "--batch", "2")
    assert code == 0
    assert "why: " in out
    assert "unknown" not in out
    assert "?" not in out


def test_no_plan_is_offered_where_the_engine_has_none(run, tmp_path: Path) -> None:
    for flags, words in (
        (["--model", "qwen3-4b", "--kv-dtype", "fp8"], "keeps KV in"),
        (["--model", "qwen3-4b", "--weights-bytes", "2GB"], "not of the size given"),
        (["--model", config_file(tmp_path, model_type="abacus")], "does not decode"),
        (["--model", "qwen3-4b", "--context", "999999"], "over the model's limit"),
    ):
        code, out, _ = run(*flags, "--device", "l4")
        assert code == 0
        assert words in out.partition("why: no plan, since")[2]
        found = json.loads(run(*flags, "--device", "l4", "--json")[1])
        assert (found["plan"], found["candidates"]) == (None, [])
        assert words in found["why"]


@pytest.mark.parametrize("flags", [["--batch", "64"], ["--device-memory", "1B"]])
def test_where_no_plan_fits(run, ask, flags: list[str]) -> None:
    """The command fails, but for an analysis alone, which says so beside its numbers."""
    model = ["--model", "qwen3-14b", "--device", "l4", *flags]
    code, out, err = run(*model)
    assert code == 1
    assert "error: no plan fits: resident needs" in err
    assert "resident " in out
    found = ask(*model)
    assert found["plan"] is None
    assert found["why"].startswith("no plan fits")
    assert len(found["candidates"]) == 4
    assert all(candidate["short"] for candidate in found["candidates"])


def test_json_carries_the_plan_and_its_candidates(ask) -> None:
    found = ask("--model", "llama-3.1-8b", "--device", "l4", "--batch", "8", "--context", "32768")
    geometry = named_geometry("llama-3.1-8b")
    assert geometry is not None
    plan = msgspec.convert(found["plan"], Plan)
    plan.validate(geometry)
    assert (plan.policy, plan.batch, plan.max_context) == ("group", 8, 32_768)
    assert "moving whole layers" in found["why"]
    resident, *fitting = found["candidates"]
    assert resident["short"]
    assert not any(candidate["short"] for candidate in fitting)
    assert [(c["policy"], c["tier"]) for c in fitting] == [
        ("layer", "dram"),
        ("layer", "disk"),
        ("group", "dram"),
    ]


@pytest.mark.parametrize("device", ["l4", "h100", "tpu-v6e"])
def test_analysis_and_table_tell_one_overhead(ask, run, device: str) -> None:
    """Both over a step that reads the weights but for the embedding's table, where the context is of whole groups."""
    flags = ["--model", "llama-3.1-8b", "--device", device, "--batch", "8", "--context", "32768"]
    found = ask(*flags)
    layer = next(c for c in found["candidates"] if (c["policy"], c["tier"]) == ("layer", "dram"))
    assert found["predicted_overhead"] == pytest.approx(layer["overhead"], rel=1e-9)
    code, out, _ = run(*flags)
    assert code == 0
    assert f"adds {found['predicted_overhead']:.0%} to" in out
    assert f"{found['predicted_overhead']:+.0%}" in out


@pytest.mark.parametrize("flag", ["--physical-layers=4", "--sigma=32", "--reuse-tokens=800", "--tpot=1s"])
def test_the_table_says_that_its_sizes_are_its_own(run, flag: str) -> None:
    base = run("--model", "llama-3.1-8b", "--device", "l4")[1]
    changed = run("--model", "llama-3.1-8b", "--device", "l4", flag)[1]
    above, own, table = changed.partition("the plans below are of the planner's own sizes")
    assert flag.partition("=")[0] in table.splitlines()[0]
    assert own + table == own + base.partition(own)[2]
    assert above != base.partition(own)[0]


def test_models_by_file_directory_and_name(ask, tmp_path: Path) -> None:
    path = config_file(tmp_path)
    assert ask("--model", path) == ask("--model", str(tmp_path))
    assert ask("--model", path)["kv_bytes_per_token"] == 12 * 1024
    assert ask("--model", "smollm2-135m", "--device", "cpu")["kv_bytes_per_token"] == 46_080
    for name in model_names():
        geometry = named_geometry(name)
        assert geometry is not None
        assert name_of(geometry) == name
        assert ask("--model", f"Some-Org/{name.upper()}-Instruct")["kv_bytes_per_token"] > 0
    assert len(model_names()) >= 7


def test_a_model_the_engine_does_not_decode_has_kv_too(run, tmp_path: Path) -> None:
    """Quantised weights, experts and unknown architectures leave KV behind like any other, if in every layer."""
    for changes in (
        {"quantization_config": {"quant_method": "fp8"}},
        {"model_type": "mixtral", "num_local_experts": 8},
        {"model_type": "abacus", "vocab_size": None, "intermediate_size": None},
    ):
        model = config_file(tmp_path, **changes)
        code, out, err = run("--model", model, "--device-memory", "1GiB", "--json")
        assert code == 0
        assert "analysed only" in err
        assert "--weights-bytes" in err
        found = json.loads(out)
        assert found["kv_bytes_per_token"] == 12 * 1024
        assert found["tokens_resident"] is None
        with_weights = run("--model", model, "--device-memory", "1GiB", "--weights-bytes", "0", "--json")[1]
        assert json.loads(with_weights)["tokens_resident"] == GiB // (12 * 1024)
    for changes in (
        {"model_type": "gemma3", "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "deepseek_v3", "kv_lora_rank": 512},
        {"model_type": "mistral", "sliding_window": 4096},
        {"model_type": "abacus", "num_hidden_layers": "many"},
    ):
        code, out, err = run("--model", config_file(tmp_path, **changes))
        assert (code, out) == (1, "")
        assert "supported" in err


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--model", "/nonexistent"], 2, "llama-3.1-8b"),
        (["--model", "abacus"], 2, "llama-3.1-8b"),
        (["--model", "a" * 5000], 2, "llama-3.1-8b"),
        (["--model", "~abacus/config.json"], 2, "llama-3.1-8b"),
        (["--model", __file__], 1, "not JSON"),
        (["--device", "abacus"], 2, "h100, h200"),
        (["--device", __file__], 2, "does not describe a device"),
        (["--device-memory", "much"], 2, "write it like"),
        (["--weights-bytes", "-1"], 2, "at least 1 byte and less than 2^63"),
        (["--device", "l4", "--weights-bytes", "1PiB"], 0, "1,073,741,824.0 MiB of weights"),
        (["--weights-bytes", "1EiB"], 2, "KiB to PiB"),
        (["--link-bandwidth", "0"], 2, "must be over 0"),
        (["--link-bandwidth", "56"], 0, ""),
        (["--link-bandwidth", "fast"], 2, "write it like 56GB/s"),
        (["--tpot", "0ms"], 2, "must be over 0 and finite; write it like 200ms"),
        (["--tpot", "1h"], 2, "units are s, ms and us"),
        (["--kv-dtype", "int3"], 2, "bfloat16"),
        (["--context", "0"], 2, "must be 1 to 1,073,741,824"),
        (["--context", str(10**22)], 2, "must be 1 to 1,073,741,824"),
        (["--batch", "0"], 2, "must be 1 to 65,536"),
        (["--batch", "9" * 20], 2, "must be 1 to 65,536"),
        (["--sigma", "0"], 2, "must be 1 to 1,024"),
        (["--sigma", "1025"], 2, "must be 1 to 1,024 (no more than Hkv·D)"),
        (["--sigma", "1024"], 0, "σ 1024"),
        (["--physical-layers", "1"], 2, "must be 2 to 32"),
        (["--physical-layers", "33"], 2, "must be 2 to 32"),
        (["--context", "100", "--reuse-tokens", "101"], 2, "must be 1 to 100 (no more than the context)"),
        (["--context", "100", "--group-tokens", "101"], 2, "must be 1 to 100"),
        (["--context", "1000000", "--group-tokens", "65537"], 2, "must be 1 to 65,536"),
        (["--context", "3"], 0, "G 3, 3 tokens kept"),
        (["--device", "l4", "--context", "999999"], 0, "over the model's limit"),
        (["--device", "l4", "--max-overhead", "-1"], 2, "must be 0 or more"),
    ],
)
def test_what_cannot_be_said(run, flags: list[str], code: int, words: str) -> None:
    model = [] if "--model" in flags else ["--model", "llama-3.1-8b"]
    found, out, err = run(*model, *flags)
    assert found == code
    assert words in out + err
    assert "Traceback" not in err


def test_the_command_needs_no_jax() -> None:
    code = (
        "import sys; from swapkv_jax.planner.command import main; "
        "assert main(['--model', 'qwen3-4b', '--device', 'h100']) == 0; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    done = subprocess.run(
        [sys.executable, "-m", "swapkv_jax.planner", "--help"], capture_output=True, text=True, check=True
    )
    assert "--physical-layers" in done.stdout


# --- laws ---


sizes = st.integers(1, 1 << 40)
questions = st.builds(
    Question,
    layers=st.integers(2, 100),
    kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    context=st.integers(1, 1 << 20),
    batch=st.integers(1, 64),
    kv_dtype=st.sampled_from(["float32", "bfloat16", "float16", "fp8"]),
    physical_layers=st.just(2),
    sigma=st.just(1),
    group_tokens=st.just(1),
    reuse_tokens=st.just(1),
    device_memory=sizes,
    weights=sizes,
    transfer=st.floats(1e6, 1e12),
    memory=st.floats(1e9, 1e13),
    tpot=st.none() | st.floats(1e-4, 10),
)


@given(q=questions)
def test_answers_agree_with_each_other(q: Question) -> None:
    a = analyse(q)
    assert a.tokens_resident is not None
    assert a.tokens_layer is not None
    assert a.requests_resident is not None
    assert a.requests_layer is not None
    room = max(0, (q.device_memory or 0) - (q.weights or 0))
    assert a.tokens_resident * a.kv_bytes_per_token <= room < (a.tokens_resident + 1) * a.kv_bytes_per_token
    assert a.requests_resident * a.full_kv_bytes <= room < (a.requests_resident + 1) * a.full_kv_bytes
    assert a.requests_layer * a.layer_slot_bytes <= room < (a.requests_layer + 1) * a.layer_slot_bytes
    assert a.layer_slot_bytes * q.layers == a.full_kv_bytes * q.physical_layers
    assert a.tokens_layer >= a.tokens_resident
    step = step_seconds(q)
    assert step is not None
    assert a.predicted_overhead is not None
    assert q.transfer is not None
    # A token that travels within the step costs nothing, one that does not costs something.
    tokens = q.batch * q.context
    if a.tokens_transfer_limit is None:
        assert a.predicted_overhead < 1e-9
    elif tokens <= a.tokens_transfer_limit:
        assert a.predicted_overhead < 1e-6
    elif tokens > a.tokens_transfer_limit + 1:
        assert a.predicted_overhead > 0
