"""The smallest tokenizer files of each kind that a backend may insist on, for calls that ask whether it answers."""

from __future__ import annotations

import functools
import json
from typing import Any

from layerzero.ipc.vocabulary.tokenizer_identity import SPACE, byte_symbols


@functools.cache
def small_tokenizers() -> tuple[bytes, ...]:
    """One that every release of tokenizers reads, byte pairs of bytes as tiktoken computes them, and byte pairs of
    characters as SentencePiece does. Each knows the text "a", and the id 0."""
    return tuple(json.dumps(one, ensure_ascii=False).encode() for one in (_words(), _bytes(), _characters()))


def _file(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    rest = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": [], **rest, **parts, "model": model}


def _pairs(tokens: list[str], merges: list[str], **more: Any) -> dict[str, Any]:
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    vocab = {token: number for number, token in enumerate(tokens)}
    plain = {**dict.fromkeys(options), "fuse_unk": False, "byte_fallback": False}
    return {"type": "BPE", **plain, **more, "vocab": vocab, "merges": merges}


def _words() -> dict[str, Any]:
    model = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    return _file(model, pre_tokenizer={"type": "Whitespace"})


def _bytes() -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = _pairs([*byte_symbols(), "ab"], ["a b"])
    return _file(model, pre_tokenizer=level, decoder=level)


def _characters() -> dict[str, Any]:
    steps = [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", "b", "ab"]
    model = _pairs(tokens, ["a b"], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return _file(model, normalizer={"type": "Sequence", "normalizers": steps})
