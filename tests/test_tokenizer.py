"""Tokenization against Hugging Face's, chat templates, streaming, and tokenizers that must be refused."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import BOS, EOS, SPECIALS, VOCAB, tiny_checkpoint, tiny_tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from swapkv_jax.errors import ModelError, UsageError
from swapkv_jax.models import Tokenizer
from swapkv_jax.models.chat import render_chat
from swapkv_jax.models.embedded import embedded_path
from swapkv_jax.models.gguf_file import GGUFFile
from swapkv_jax.models.gguf_tokenizer import load_gguf_tokenizer
from swapkv_jax.models.hf_tokenizer import load_hf_tokenizer

# Ids from transformers 5.24 with SmolLM2's published pre-tokenizer (digits one by one, then byte-level);
# the two agreed on 300 KB of Austen and 3,000 random strings besides.
SMOLLM2 = {
    "": [],
    "Emma Woodhouse, handsome, clever, and rich": [
        10809,
        2432,
        7817,
        4404,
        28,
        35012,
        28,
        15355,
        28,
        284,
        3428,
    ],
    "It cost 12,345.67": [1589, 1708, 216, 33, 34, 28, 35, 36, 37, 30, 38, 39],
    "  \n\n\ttabs and   spaces ": [256, 1116, 197, 100, 7366, 284, 256, 5600, 216],
    "naïve café — 中文 🙂½": [3546, 46494, 37366, 1841, 216, 28589, 29184, 47526, 16738],
    "it's <|im_end|> don't": [269, 506, 216, 2, 1326, 982],
}
SMOLLM2_CHAT = [
    1,
    9690,
    198,
    2683,
    359,
    253,
    5356,
    5646,
    11173,
    3365,
    3511,
    308,
    34519,
    28,
    7018,
    411,
    407,
    19712,
]
SMOLLM2_CHAT += [8182, 2, 198, 1, 4093, 198, 4898, 314, 216, 39, 9552, 47, 2, 198, 1, 520, 9531, 198]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    tokenizer, ends = load_gguf_tokenizer(GGUFFile(embedded_path()), 49_152)
    assert ends == {2}
    return tokenizer


@pytest.fixture
def tiny() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(add_bos=True), vocab=VOCAB)


@pytest.mark.parametrize(("text", "ids"), SMOLLM2.items())
def test_smollm2_is_hugging_faces(text: str, ids: list[int], smollm2: Tokenizer) -> None:
    assert smollm2.encode(text, chat=False) == ids
    assert smollm2.decode(ids) == text.replace("<|im_end|>", "")


def test_smollm2_chat(smollm2: Tokenizer) -> None:
    assert smollm2.encode("Why is 7 prime?", chat=True) == SMOLLM2_CHAT


def streamed(tokenizer: Tokenizer, ids: list[int], context: list[int] | None = None) -> str:
    stream = tokenizer.stream(context or [])
    return "".join(map(stream.push, ids)) + stream.flush()


@given(text=st.text(max_size=40))
@settings(deadline=None, max_examples=60)
def test_smollm2_streams_what_it_decodes(text: str, smollm2: Tokenizer) -> None:
    ids = smollm2.encode(text, chat=False)
    assert streamed(smollm2, ids) == smollm2.decode(ids)


@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=30), cut=st.integers(0, 30))
@settings(deadline=None)
def test_any_byte_sequence_streams_whole(ids: list[int], cut: int) -> None:
    """Random ids are mostly invalid UTF-8, which must neither be lost nor repeated."""
    tokenizer = Tokenizer(tiny_tokenizer(add_bos=True), vocab=VOCAB)
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    stream = tokenizer.stream()
    parts = [stream.push(i) for i in ids[:cut]]
    assert tokenizer.decode(ids[:cut]) == "".join(parts) + stream.flush()


def test_a_character_is_held_back_until_whole(tiny: Tokenizer) -> None:
    ids = tiny.encode("é🙂", chat=False)[1:]
    assert len(ids) == 6
    stream = tiny.stream()
    assert [stream.push(i) for i in ids] == ["", "é", "", "", "", "🙂"]
    assert stream.flush() == ""
    unfinished = tiny.stream()
    assert unfinished.push(ids[0]) == ""
    assert unfinished.flush() == "\ufffd"


def test_bos_rule_and_special_tokens(tiny: Tokenizer) -> None:
    assert tiny.encode("", chat=False) == [BOS]
    assert tiny.encode("a</s>", chat=False)[-1] == EOS
    assert Tokenizer(tiny_tokenizer(add_bos=False), vocab=VOCAB).encode("", chat=False) == []


def test_no_chat_template_names_raw(tiny: Tokenizer) -> None:
    with pytest.raises(UsageError, match="--raw"):
        tiny.encode("hello", chat=True)


def test_ids_beyond_the_embedding_are_refused() -> None:
    tokenizer = Tokenizer(tiny_tokenizer(add_bos=True), vocab=80)
    assert tokenizer.encode("", chat=False) == [BOS]
    with pytest.raises(ModelError, match="embeds 80 tokens"):
        tokenizer.encode("the", chat=False)


# Chat templates


def test_templates_render_as_jinja_does() -> None:
    template = (
        "{% for m in messages %}\n  {%- generation %}[{{ m['content'].strip() }}]{% endgeneration %}\n"
        "{{ m | tojson }}\n    {% if tools is none and not documents %}\nno tools\n    {% endif %}\n"
        "{% endfor %}"
        "{{ bos_token }}{{ '<>' if add_generation_prompt }}"
    )
    text = render_chat(template, " é<b> ", {"bos_token": "<s>"})
    assert text == '[é<b>]{"role": "user", "content": " é<b> "}\nno tools\n<s><>'
    assert len(render_chat("{{ strftime_now('%Y') }}", "", {})) == 4


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('only systems speak') }}", "{% for %}", "{{ messages[7].content.x }}"]
)
def test_failing_templates_are_usage_errors(template: str) -> None:
    with pytest.raises(UsageError, match="use --raw") as raised:
        render_chat(template, "hi", {})
    assert "\n" not in str(raised.value)


# Hugging Face directories


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny_checkpoint("llama", tmp_path / "llama")


def configure(directory: Path, **entries: Any) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_directory_tokenizer(directory: Path) -> None:
    tokenizer = load_hf_tokenizer(directory, VOCAB)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (SPECIALS[BOS], SPECIALS[EOS])
    chat = tokenizer.encode("hi", chat=True)
    assert chat[:2] == [BOS, 2]
    assert chat[-2:] == [EOS, 3]


def test_template_file_and_named_templates(directory: Path) -> None:
    configure(
        directory, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    )
    assert load_hf_tokenizer(directory, VOCAB).chat_template == "D"
    (directory / "chat_template.jinja").write_text("from the file")
    assert load_hf_tokenizer(directory, VOCAB).chat_template == "from the file"


def test_saved_truncation_does_not_cut_prompts(directory: Path) -> None:
    backend = tiny_tokenizer(add_bos=True)
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(directory / "tokenizer.json"))
    assert len(load_hf_tokenizer(directory, VOCAB).encode("x" * 30, chat=False)) == 31


def test_tokens_that_only_the_config_declares(directory: Path) -> None:
    configure(directory, added_tokens_decoder={"72": {"content": "e", "special": False}}, pad_token="<pad>")
    tokenizer = load_hf_tokenizer(directory, VOCAB + 1)
    assert tokenizer.encode("<pad>", chat=False) == [BOS, VOCAB]
    configure(directory, added_tokens_decoder={"9": {"content": "<tool>", "special": True}})
    with pytest.raises(ModelError, match="<tool>"):
        load_hf_tokenizer(directory, VOCAB)


def test_contradictory_bos_is_told(directory: Path) -> None:
    configure(directory, add_bos_token=False)
    with pytest.warns(RuntimeWarning, match="disagree about BOS"):
        tokenizer = load_hf_tokenizer(directory, VOCAB)
    assert tokenizer.encode("", chat=False) == [BOS]


def test_missing_and_broken_tokenizers(directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_text('{"model": {}}')
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        load_hf_tokenizer(directory, VOCAB)
    path.unlink()
    with pytest.raises(ModelError, match="save_pretrained"):
        load_hf_tokenizer(directory, VOCAB)


# GGUF


def write_tokenizer(path: Path, model: str, tokens: list[str], **entries: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for key, value in entries.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path) -> Tokenizer:
    return load_gguf_tokenizer(GGUFFile(path), 1000)[0]


ALPHABET = sorted(ByteLevel.alphabet())
BPE_TOKENS = [*ALPHABET, "12", "123", "Ġ1", "<s>", "<think>"]
BPE_MERGES = ["Ġ 1", "1 2", "12 3"]


def pieces(path: Path, text: str, **entries: Any) -> list[str]:
    types = [1] * len(ALPHABET) + [1, 1, 1, 3, 4]
    write_tokenizer(
        path, "gpt2", BPE_TOKENS, token_type=types, merges=BPE_MERGES, bos_token_id=259, **entries
    )
    return [BPE_TOKENS[i] for i in load(path).encode(text, chat=False)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["Ġ1", "2", "3", "4"]),
        ("smollm", ["Ġ", "1", "2", "3", "4"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", ["<s>", "Ġ", "123", "4"]),
        ("default", ["Ġ", "123", "4"]),
    ],
)
def test_pre_tokenizers_split_numbers_their_own_way(pre: str, expected: list[str], tmp_path: Path) -> None:
    assert pieces(tmp_path / "t.gguf", " 1234", pre=pre) == expected


def test_gguf_bos_and_added_tokens(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    assert pieces(path, "a<think><s>", pre="gpt-2") == ["a", "<think>", "<s>"]
    assert pieces(path, "a", pre="gpt-2", add_bos_token=True) == ["<s>", "a"]
    assert pieces(path, "a", pre="llama-bpe", add_bos_token=False) == ["a"]
    assert load(path).decode([259, 260]) == "<think>"
    with pytest.warns(RuntimeWarning, match="no tokenizer.ggml.pre"):
        pieces(path, "a")


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SPM_PIECES = {"▁t": -1.0, "he": -2.0, "▁the": -3.0, "▁▁": -1e9, "▁▁▁▁": -1e9, "▁▁▁": -1e9}
SPM_PIECES |= {"▁": -1e9, "t": -10.0, "h": -11.0, "e": -12.0}


def spm(path: Path, **entries: Any) -> Tokenizer:
    tokens = [*SPM_TOKENS, *SPM_PIECES]
    types = [2, 3, 3] + [6] * 256 + [1] * len(SPM_PIECES)
    scores = [0.0] * len(SPM_TOKENS) + list(SPM_PIECES.values())
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    write_tokenizer(path, "llama", tokens, **({"token_type": types, "scores": scores} | ids | entries))
    return load(path)


def test_sentencepiece(tmp_path: Path) -> None:
    """Scores order the merges; unknown characters fall back to bytes; the first word gets a space."""
    tokenizer = spm(tmp_path / "t.gguf")
    names = [*SPM_TOKENS, *SPM_PIECES]

    def split(text: str) -> list[str]:
        return [names[i] for i in tokenizer.encode(text, chat=False)]

    assert split("the") == ["<s>", "▁the"]
    assert split("the é</s>") == ["<s>", "▁the", "▁", "<0xC3>", "<0xA9>", "</s>"]
    assert split("    the") == ["<s>", "▁▁▁▁", "▁the"]
    ids = tokenizer.encode("the  é the", chat=False)
    assert tokenizer.decode(ids) == streamed(tokenizer, ids) == "the  é the"
    assert streamed(tokenizer, ids[1:2], context=ids) == " the"
    bare = spm(tmp_path / "bare.gguf", add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    assert [names[i] for i in bare.encode("the", chat=False)] == ["t", "he", "</s>"]


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"pre": "gpt-5"}, "gpt-5"),
        ({"pre": "gpt-2", "add_eos_token": True}, "eos_token_id is missing"),
        ({"pre": "gpt-2", "eos_token_id": 7000}, "eos_token_id=7000"),
    ],
)
def test_unsupported_byte_level_tokenizers(entries: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=named):
        pieces(tmp_path / "t.gguf", "a", **entries)


def test_unsupported_gguf_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    with pytest.raises(ModelError, match="supported: gpt2, llama"):
        load(write_tokenizer(path, "t5", ["a"]))
    with pytest.raises(ModelError, match="merges is missing"):
        load(write_tokenizer(path, "gpt2", ["a"], pre="gpt-2"))
    with pytest.raises(ModelError, match="does not fit the tokens"):
        load(write_tokenizer(path, "gpt2", ["a"], pre="gpt-2", merges=["a b"]))
    with pytest.raises(ModelError, match="duplicates"):
        load(write_tokenizer(path, "gpt2", ["a", "a"], pre="gpt-2", merges=["a a"]))
    with pytest.raises(ModelError, match="differ in length"):
        load(write_tokenizer(path, "gpt2", ["a"], pre="gpt-2", token_type=[1, 1]))
    with pytest.raises(ModelError, match="scores"):
        load(write_tokenizer(path, "llama", ["a"]))
    with pytest.raises(ModelError, match="'ab' and 'ba' have equal scores"):
        load(write_tokenizer(path, "llama", ["a", "b", "ab", "ba"], scores=[0.0, -1.0, -2.0, -2.0]))
    with pytest.raises(ModelError, match="normalises"):
        spm(path, remove_extra_whitespaces=True)
