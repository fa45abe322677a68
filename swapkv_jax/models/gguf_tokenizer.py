"""The tokenizer that a GGUF's metadata describes, rebuilt with the `tokenizers` library.

`gpt2` is byte-level BPE, whose way of splitting text into words is named by `tokenizer.ggml.pre`; `llama` is
SentencePiece BPE, whose merges follow from the pieces' scores.
"""

from __future__ import annotations

import warnings
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from swapkv_jax.errors import ModelError
from swapkv_jax.models.gguf_file import GGUFFile
from swapkv_jax.models.tokenizer import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + _WORDS + r"\p{N}" + _REST
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Regular expressions applied one after the other, each isolating its matches.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
}
# Words that are tokens are not merged from parts; a BOS is added unless the file says otherwise.
_LLAMA3_NAMES = {"llama-bpe", "llama3", "llama-v3"}


def load_gguf_tokenizer(file: GGUFFile, vocab: int) -> tuple[Tokenizer, frozenset[int]]:
    """The tokenizer, and the ids that end a generation.

    Raises ModelError naming the tokenizer kind, pre-tokenizer or metadata that is missing or unsupported.
    """
    meta = _Meta(file)
    kind = meta.get("model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(meta)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(meta)
    else:
        raise ModelError(f"{file.path}: GGUF tokenizer {kind!r} is not supported; supported: gpt2, llama")
    _add_tokens(backend, meta)
    special = {name: meta.token(key) for name, key in _NAMED.items() if meta.get(key) is not None}
    _add_bos_and_eos(backend, meta, special, adds_bos)
    template = file.metadata.get("tokenizer.chat_template")
    tokenizer = Tokenizer(backend, vocab=vocab, special_tokens=special, chat_template=template)
    return tokenizer, frozenset(meta.index(key) for key in _END_KEYS if meta.get(key) is not None)


class _Meta:
    """Access to `tokenizer.ggml.*`; `tokens` are the spellings and `kinds` their types, by id."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.tokens: list[str] = self.strings("tokens")
        if len(set(self.tokens)) != len(self.tokens):
            raise ModelError(f"{file.path}: tokenizer.ggml.tokens has duplicates; convert the model again")
        self.kinds: list[int] = self.get("token_type") or [_NORMAL] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise ModelError(f"{file.path}: tokenizer.ggml.token_type and .tokens differ in length")

    def get(self, key: str) -> Any:
        return self._file.metadata.get(f"tokenizer.ggml.{key}")

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.error(f"tokenizer.ggml.{key} is missing or no list of strings")
        return value

    def index(self, key: str) -> int:
        value = self.get(key)
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.error(f"tokenizer.ggml.{key}={value!r} is no token id")
        return value

    def token(self, key: str) -> str:
        return self.tokens[self.index(key)]

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self._file.path}: {what}; convert the model again")

    def pre(self) -> str:
        name = self.get("pre")
        if name is None:
            warnings.warn(
                f"{self._file.path}: no tokenizer.ggml.pre; the 'default' rules may split text wrongly",
                RuntimeWarning,
                stacklevel=4,
            )
            return "default"
        if name not in _SPLITS:
            raise ModelError(
                f"{self._file.path}: GGUF pre-tokenizer {name!r} is not supported; "
                f"supported: {', '.join(_SPLITS)}"
            )
        return name


def _byte_level(meta: _Meta) -> tuple[Backend, bool]:
    pre = meta.pre()
    pairs = [merge.partition(" ") for merge in meta.strings("merges")]
    merges = [(left, right) for left, _, right in pairs]
    vocabulary = {token: index for index, token in enumerate(meta.tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _LLAMA3_NAMES)
    except Exception as error:  # the library raises a bare Exception for merges that name no token
        raise meta.error(f"tokenizer.ggml.merges does not fit the tokens ({error})") from error
    backend = Backend(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _LLAMA3_NAMES


def _sentencepiece(meta: _Meta) -> tuple[Backend, bool]:
    scores = meta.get("scores")
    if not isinstance(scores, list) or len(scores) != len(meta.tokens):
        raise meta.error("tokenizer.ggml.scores is missing or does not fit the tokens")
    if meta.get("precompiled_charsmap") or meta.get("remove_extra_whitespaces"):
        raise meta.error("a SentencePiece tokenizer that normalises text (as T5's) is not supported")
    byte_fallback = _BYTE in meta.kinds
    backend = Backend(
        models.BPE(
            vocab={token: index for index, token in enumerate(meta.tokens)},
            merges=_merges(meta, scores),
            unk_token=meta.token("unknown_token_id") if meta.get("unknown_token_id") is not None else None,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )
    # As in Llama 2's and Mistral's tokenizer.json and in llama.cpp: the space goes before every run of text
    # between special tokens.
    prefix = meta.get("add_space_prefix") in (None, True)
    prepend = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


def _merges(meta: _Meta, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first.

    SentencePiece joins the pair whose union scores best and, among equals, the leftmost; as ranks, that is
    all splits of the best piece, then all of the next. Llama's runs of spaces share one score: with the
    longest left part first a run grows from its left end, which is what leftmost-first does. For other
    pieces of equal score the order would depend on positions, which ranks cannot express.
    """
    pieces = {t: s for t, s, kind in zip(meta.tokens, scores, meta.kinds, strict=True) if kind == _NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    joined: dict[float, str] = {}
    for piece, score in pieces.items():
        cuts = [cut for cut in range(1, len(piece)) if piece[:cut] in pieces and piece[cut:] in pieces]
        other = joined.setdefault(score, piece) if cuts else piece
        if other != piece and set(piece) | set(other) != {_SPACE}:
            raise meta.error(f"pieces {other!r} and {piece!r} have equal scores, which is not supported")
        ranked += [(-score, -cut, cut - len(piece), piece[:cut], piece[cut:]) for cut in cuts]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_tokens(backend: Backend, meta: _Meta) -> None:
    def of_kind(wanted: int, special: bool) -> list[AddedToken]:
        return [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(meta.tokens, meta.kinds, strict=True)
            if kind == wanted and token
        ]

    backend.add_special_tokens(of_kind(_CONTROL, special=True))
    backend.add_tokens(of_kind(_USER_DEFINED, special=False))


def _add_bos_and_eos(backend: Backend, meta: _Meta, special: dict[str, str], adds_bos: bool) -> None:
    parts = ["$A"]
    if meta.get("add_bos_token") is True or (meta.get("add_bos_token") is None and adds_bos):
        if "bos_token" not in special:
            raise meta.error("a BOS is to be added, but tokenizer.ggml.bos_token_id is missing")
        parts.insert(0, special["bos_token"])
    if meta.get("add_eos_token") is True:
        if "eos_token" not in special:
            raise meta.error("an EOS is to be added, but tokenizer.ggml.eos_token_id is missing")
        parts.append(special["eos_token"])
    if len(parts) > 1:
        added = [(token, meta.tokens.index(token)) for token in parts if token != "$A"]
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=added)
