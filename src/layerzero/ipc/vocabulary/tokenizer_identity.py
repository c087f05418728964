"""What a tokenizer.json is: hashes of its parts, and the library besides tokenizers that computes exactly what it says.

tiktoken computes byte-level byte pairs of today's patterns, SentencePiece byte pairs of characters with bytes for those
that it does not know (Llama 2, Mistral), where the merges say an order of tokens (ipc/vocabulary/merge_order.py). Of
Unigram models SentencePiece adds scores up in float32 and tokenizers in float64, so near ties may differ: no file of
those is SentencePiece's.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from layerzero.ipc.version import __version__
from layerzero.ipc.vocabulary.merge_order import MergeOrder, merge_order

TIKTOKEN = "tiktoken"
SENTENCEPIECE = "sentencepiece"
LIBRARIES = (TIKTOKEN, SENTENCEPIECE)
_RULES = 1  # of this file and of merge_order.py: one more where a file may be another library's than it was
SPACE = "\u2581"  # what SentencePiece writes for a blank

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# Which tests compare in both libraries, over every character there is.
PATTERNS = frozenset(
    {
        GPT2,
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",  # cl100k, Llama 3
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",  # Qwen 2
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?|"  # o200k, GPT-OSS
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_LLAMA_NORMALIZER = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}


@dataclass(frozen=True)
class AddedToken:
    """A token that texts are split at before all else."""

    text: str
    index: int
    is_special: bool
    is_normalized: bool


@dataclass(frozen=True)
class Template:
    """Special tokens before and behind a text."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.before) + len(self.behind)


@dataclass(frozen=True)
class BytePairs:
    """A file that another library computes exactly.

    `library`: TIKTOKEN or SENTENCEPIECE; `pattern`: tiktoken's, which cuts texts into pieces; `is_whole_first`: a
    piece that is a token is that one, merges or not."""

    library: str
    vocab: Mapping[str, int]
    order: MergeOrder = field(repr=False)
    added: tuple[AddedToken, ...]
    template: Template
    pattern: str = ""
    is_whole_first: bool = False


class Kept(Protocol):
    """What earlier processes have worked out. `least_tokens`: of smaller vocabularies nothing is kept."""

    least_tokens: int

    def find(self, key: str) -> str | None:
        """The library of a vocabulary, "" for none, None where that is not known."""

    def add(self, key: str, library: str) -> None:
        """Keep it for later ones."""


def tokenizer_parts(document: Mapping[str, Any], digest: str, kept: Kept | None = None) -> dict[str, str]:
    """The attributes of a call that say which tokenizer it has. `document`: a parsed tokenizer.json, `digest`: the
    SHA-256 of its bytes, which is its `tokenizer_id` where no other library computes it exactly."""
    model = document.get("model")
    model = model if isinstance(model, Mapping) else {}
    hashes = {
        "vocab_hash": _hash(model.get("vocab")),
        "merges_hash": _hash(model.get("merges") or []),
        "added_tokens_hash": _hash(document.get("added_tokens") or []),
    }
    return {
        "tokenizer_id": _library(document, tuple(hashes.values()), kept) or digest,
        **hashes,
        "normalizer_id": "+".join(_types(document.get("normalizer")))[:256] or "none",
    }


def byte_pairs(document: Mapping[str, Any]) -> BytePairs | None:
    """A file as another library computes it; None where none does so exactly."""
    shape = _shape(document)
    if shape is None:
        return None
    library, pattern, added, template = shape
    model = document["model"]
    vocab: dict[str, int] = model["vocab"]
    symbols = set(byte_symbols()) if library == TIKTOKEN else {token for token in vocab if len(token) == 1}
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if not all(len(pair) == 2 and "".join(pair) in vocab for pair in merges):
        return None
    if library == SENTENCEPIECE and any(_BYTE.fullmatch("".join(pair)) for pair in merges):
        return None
    found = {one.text for one in added}  # before all else: no other part of a text has theirs
    order = merge_order([token for token in vocab if token not in found], merges, symbols)  # type: ignore[arg-type]
    if model.get("ignore_merges") and not order.is_safe_whole:
        return None
    return BytePairs(library, vocab, order, added, template, pattern, bool(model.get("ignore_merges")))


@functools.cache
def byte_symbols() -> str:
    """The characters that stand for the bytes 0 to 255 in byte-level vocabularies: GPT-2's bytes_to_unicode."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte) if byte in plain else chr(next(others)) for byte in range(256))


_known: dict[str, str] = {}


def _library(document: Mapping[str, Any], hashes: tuple[str, ...], kept: Kept | None) -> str:
    """Of byte_pairs, whose order of tokens is worked out once for a vocabulary and its merges; "" where it has none."""
    try:
        shape = _shape(document)
        if shape is None:
            return ""
        model = document["model"]
        key = _hash([__version__, _RULES, *hashes, *shape[:2], model.get("ignore_merges")])
        if key not in _known:
            is_large = kept is not None and len(model["vocab"]) >= kept.least_tokens
            _known[key] = _found(document, key, kept if is_large else None)
        return _known[key]
    except (AttributeError, KeyError, TypeError, ValueError):  # a file that makes no sense
        return ""


def _found(document: Mapping[str, Any], key: str, kept: Kept | None) -> str:
    library = None if kept is None else kept.find(key)
    if library is None:
        pairs = byte_pairs(document)
        library = "" if pairs is None else pairs.library
        if kept is not None:
            kept.add(key, library)
    return library


def _shape(document: Mapping[str, Any]) -> tuple[str, str, tuple[AddedToken, ...], Template] | None:
    """Library, pattern, added tokens and template of a file whose parts another library has."""
    model = document["model"]
    texts = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    if model.get("type") != "BPE" or model.get("dropout") or any(texts) or not model.get("merges"):
        return None
    added, template = _added(document), _template(document.get("post_processor"))
    if added is None or template is None or len(set(model["vocab"].values())) < len(model["vocab"]):
        return None
    pattern = _byte_level(document)
    if pattern is not None and all(symbol in model["vocab"] for symbol in byte_symbols()):
        return TIKTOKEN, pattern, added, template
    is_llama = document.get("normalizer") == _LLAMA_NORMALIZER and document.get("pre_tokenizer") is None
    has_bytes = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    if is_llama and has_bytes and not model.get("ignore_merges") and not any(one.is_normalized for one in added):
        return SENTENCEPIECE, "", added, template
    return None


def _added(document: Mapping[str, Any]) -> tuple[AddedToken, ...] | None:
    """None where one takes in blanks, stands for words alone, or has another id than tokenizers gives it."""
    vocab, found, top = document["model"]["vocab"], [], 0
    for one in document.get("added_tokens") or ():
        text = one["content"]
        expected = vocab.get(text, max(top, len(vocab)))
        if one.get("lstrip") or one.get("rstrip") or one.get("single_word") or not text or one["id"] != expected:
            return None
        top = max(top, expected + 1)
        found.append(AddedToken(text, expected, bool(one["special"]), bool(one["normalized"])))
    return tuple(found)


def _byte_level(document: Mapping[str, Any]) -> str | None:
    """The pattern of a byte-level file, if it is one of PATTERNS."""
    first = document.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", []) if first.get("type") == "Sequence" else [first]
    decoder = document.get("decoder") or {}
    if document.get("normalizer") is not None or decoder.get("type") != "ByteLevel" or not steps:
        return None
    *cuts, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    if not cuts:
        return GPT2 if last.get("use_regex", True) else None
    cut = cuts[0]
    way = (cut.get("type"), cut.get("behavior"), cut.get("invert"))
    pattern = (cut.get("pattern") or {}).get("Regex")
    is_known = len(cuts) == 1 and way == ("Split", "Isolated", False) and not last.get("use_regex", True)
    return pattern if is_known and pattern in PATTERNS else None


def _template(processor: Mapping[str, Any] | None) -> Template | None:
    """None for those that change more than what stands before and behind."""
    if processor is None:
        return Template()
    kind = processor.get("type")
    if kind == "Sequence":
        found = [_template(one) for one in processor["processors"]]
        full = [one for one in found if one is not None and len(one)]
        return None if None in found or len(full) > 1 else full[0] if full else Template()
    if kind == "ByteLevel":
        return None if processor.get("trim_offsets", True) else Template()
    if kind != "TemplateProcessing":
        return None
    sides: tuple[list[int], list[int]] = ([], [])
    texts = 0
    for item in processor["single"]:
        if "Sequence" in item:
            texts += 1
        else:
            sides[min(texts, 1)].extend(processor["special_tokens"][item["SpecialToken"]["id"]]["ids"])
    return Template(tuple(sides[0]), tuple(sides[1])) if texts == 1 else None


def _types(normalizer: Any) -> Sequence[str]:
    if not isinstance(normalizer, Mapping):
        return ()
    if normalizer.get("type") == "Sequence":
        return [name for one in normalizer.get("normalizers") or () for name in _types(one)]
    return (str(normalizer.get("type")),)


def _hash(part: Any) -> str:
    return hashlib.sha256(json.dumps(part, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()
