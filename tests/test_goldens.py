"""Greedy tokens and logits against Hugging Face's, from the files that tools/make_goldens.py wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tiny import TINY, golden_name, tiny_checkpoint, tiny_prompts, weights_digest

from swapkv_jax import Engine, load_model, make_plan
from swapkv_jax.models import Model
from swapkv_jax.planner import CacheChoice

GOLDENS = Path(__file__).parent / "goldens"
# transformers' float32 lies within 6e-5 of a float64 forward on every golden, the real model's included.
# Small mistakes are larger: an RMS epsilon of 1e-6 for 1e-5 moves the tiny logits by 1e-3 and more, a RoPE
# length off by one by 0.6.
TINY_TOLERANCE = 5e-4
REAL_TOLERANCE = 2e-3
# Every comparison has to get this far before a near-tie may end it.
LEAST_STEPS = 24
REAL_PROMPTS = ("short", "chat", "long")
# The rest under `layer` are slow tests: tests of `layer` against `resident` cover them by another way.
LAYER_BY_DEFAULT = ("llama", "llama-dynamic", "qwen3")


@dataclass(frozen=True, kw_only=True)
class Golden:
    """What transformers decoded after one prompt."""

    prompt: list[int]
    tokens: np.ndarray  # [T]
    indices: np.ndarray  # [T, N] the token ids whose logits were kept, largest logit first
    values: np.ndarray  # [T, N] those logits
    whole: dict[int, np.ndarray]  # step → logits [V], where all were kept

    def difference(self, step: int, logits: np.ndarray) -> float:
        """The largest absolute difference of `logits` [V] to the kept ones of `step`."""
        worst = np.abs(logits[self.indices[step]] - self.values[step]).max()
        if step in self.whole:
            worst = max(worst, np.abs(logits - self.whole[step]).max())
        return float(worst)

    def margin(self, step: int) -> float:
        """How far the best logit of `step` lies above the second best."""
        return float(self.values[step, 0] - self.values[step, 1])


@dataclass(frozen=True, kw_only=True)
class Decoded:
    tokens: np.ndarray  # [T, B]
    logits: np.ndarray  # [T, B, V]


def tiny_goldens(name: str) -> list[Golden]:
    rows = []
    with np.load(GOLDENS / f"{golden_name(name)}.npz") as file:
        for i in range(sum(key.startswith("prompt_") for key in file)):
            logits = file[f"logits_{i}"]
            order = np.argsort(-logits, axis=1, kind="stable")
            rows.append(
                Golden(
                    prompt=file[f"prompt_{i}"].tolist(),
                    tokens=file[f"tokens_{i}"],
                    indices=order,
                    values=np.take_along_axis(logits, order, axis=1),
                    whole={},
                )
            )
    return rows


def real_golden(name: str) -> Golden:
    with np.load(GOLDENS / f"smollm2-{name}.npz") as file:
        tokens = file["tokens"]
        return Golden(
            prompt=file["prompt"].tolist(),
            tokens=tokens,
            indices=file["top_indices"],
            values=file["top_logits"],
            whole={0: file["first_logits"], len(tokens) - 1: file["last_logits"]},
        )


def agreeing_steps(golden: Golden, decoded: Decoded, row: int, tolerance: float) -> int:
    """Compare one decoded row step by step; the number of steps until a near-tie went the other way.

    At a step whose two best logits lie closer than `tolerance` either token is right, and if ours is not
    transformers' the texts differ from there on and the comparison ends.
    """
    assert len(decoded.tokens) == len(golden.tokens)
    for step, theirs in enumerate(golden.tokens):
        logits, ours = decoded.logits[step, row], decoded.tokens[step, row]
        assert ours == logits.argmax(), f"step {step}: token {ours} is not the best of its own logits"
        difference = golden.difference(step, logits)
        assert difference <= tolerance, f"step {step}: logits differ by {difference:.2g}"
        if ours != theirs:
            assert golden.margin(step) <= tolerance, f"step {step}: token {ours} instead of {theirs}"
            return step
    return len(golden.tokens)


def decode(model: Model, cache: CacheChoice, prompts: Sequence[list[int]], new_tokens: int) -> Decoded:
    longest = max(map(len, prompts)) + new_tokens
    plan = make_plan(model.geometry, cache=cache, batch=len(prompts), max_context=longest, dtype="float32")
    tokens, logits = [], []
    with Engine(model, plan) as engine:
        for step in engine.generate(prompts, max_new_tokens=new_tokens, ignore_eos=True, return_logits=True):
            assert step.logits is not None
            assert step.logits.dtype == np.float32
            tokens.append(step.tokens)
            logits.append(np.array(step.logits))
    return Decoded(tokens=np.array(tokens, np.int64), logits=np.stack(logits))


def check(model: Model, cache: CacheChoice, goldens: Sequence[Golden], tolerance: float) -> None:
    """Decode all goldens' prompts as one ragged batch and compare every row."""
    decoded = decode(model, cache, [g.prompt for g in goldens], len(goldens[0].tokens))
    for row, golden in enumerate(goldens):
        steps = agreeing_steps(golden, decoded, row, tolerance)
        assert steps >= LEAST_STEPS, f"row {row}: a near-tie ended the comparison after {steps} steps"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    models: dict[str, Model] = {}

    def load(name: str) -> Model:
        if name not in models:
            directory = tiny_checkpoint(name, tmp_path_factory.mktemp(name))
            models[name] = load_model(str(directory), dtype="float32")
        return models[name]

    return load


def test_files_match_the_table() -> None:
    expected = {golden_name(name) for name in TINY} | {f"smollm2-{name}" for name in REAL_PROMPTS}
    assert {file.stem for file in GOLDENS.iterdir()} == expected


@pytest.mark.parametrize("name", sorted({golden_name(name) for name in TINY}))
def test_checkpoint_is_the_one_decoded(name: str) -> None:
    """A NumPy whose random stream changed would need new goldens: say so rather than fail on logits."""
    with np.load(GOLDENS / f"{name}.npz") as file:
        assert file["weights_sha256"] == weights_digest(name)
    assert [g.prompt for g in tiny_goldens(name)] == tiny_prompts(name)


@pytest.mark.parametrize("name", TINY)
def test_tiny_resident(name: str, tiny_model: Callable[[str], Model]) -> None:
    check(tiny_model(name), "resident", tiny_goldens(name), TINY_TOLERANCE)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in LAYER_BY_DEFAULT else pytest.mark.slow) for n in TINY]
)
def test_tiny_layer(name: str, tiny_model: Callable[[str], Model]) -> None:
    check(tiny_model(name), "layer", tiny_goldens(name), TINY_TOLERANCE)


@pytest.mark.parametrize("cache", ["resident", "layer"])
@pytest.mark.parametrize("row", range(len(TINY["llama-dynamic"].prompts)))
def test_dynamic_rope_one_row(cache: CacheChoice, row: int, tiny_model: Callable[[str], Model]) -> None:
    """The ragged batch holds these rows too; alone, each must give the same."""
    golden = tiny_goldens("llama-dynamic")[row]
    check(tiny_model("llama-dynamic"), cache, [golden], TINY_TOLERANCE)


@pytest.mark.parametrize("cache", ["resident", "layer"])
def test_smollm2_batch(cache: CacheChoice, smollm2: Model) -> None:
    check(smollm2, cache, [real_golden(name) for name in REAL_PROMPTS], REAL_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["resident", "layer"])
@pytest.mark.parametrize("name", REAL_PROMPTS)
def test_smollm2_one_row(cache: CacheChoice, name: str, smollm2: Model) -> None:
    check(smollm2, cache, [real_golden(name)], REAL_TOLERANCE)


@pytest.mark.parametrize("name", ["short", "chat"])
def test_smollm2_prompt_ids(name: str, smollm2: Model) -> None:
    with np.load(GOLDENS / f"smollm2-{name}.npz") as file:
        assert smollm2.tokenizer.encode(str(file["text"]), chat=name == "chat") == file["prompt"].tolist()


class TestComparison:
    """The comparison itself, on transformers' own output: it accepts that and refuses what it must."""

    golden = tiny_goldens("qwen3")[0]

    def theirs(self) -> Decoded:
        vocabulary = self.golden.indices.shape[1]
        logits = np.empty((len(self.golden.tokens), 1, vocabulary), np.float32)
        np.put_along_axis(logits[:, 0], self.golden.indices, self.golden.values, axis=1)
        return Decoded(tokens=self.golden.tokens[:, None].astype(np.int64), logits=logits)

    def test_accepts_itself(self) -> None:
        assert agreeing_steps(self.golden, self.theirs(), 0, TINY_TOLERANCE) == len(self.golden.tokens)

    def test_refuses_one_wrong_logit(self) -> None:
        decoded = self.theirs()
        decoded.logits[30, 0, self.golden.indices[30, -1]] += 2 * TINY_TOLERANCE
        with pytest.raises(AssertionError, match="step 30: logits differ"):
            agreeing_steps(self.golden, decoded, 0, TINY_TOLERANCE)

    def test_refuses_a_token_that_is_not_the_best(self) -> None:
        decoded = self.theirs()
        decoded.tokens[30] = self.golden.indices[30, 1]
        with pytest.raises(AssertionError, match="step 30: token"):
            agreeing_steps(self.golden, decoded, 0, TINY_TOLERANCE)

    def test_only_a_near_tie_ends_it(self) -> None:
        """Move the two best past each other, each by six tenths of the margin between them."""
        decoded, margin = self.theirs(), self.golden.margin(30)
        best, second = self.golden.indices[30, :2]
        decoded.logits[30, 0, best] -= 0.6 * margin
        decoded.logits[30, 0, second] += 0.6 * margin
        decoded.tokens[30] = second
        assert agreeing_steps(self.golden, decoded, 0, 1.1 * margin) == 30
        with pytest.raises(AssertionError, match=f"step 30: token {second} instead of {best}"):
            agreeing_steps(self.golden, decoded, 0, 0.7 * margin)
