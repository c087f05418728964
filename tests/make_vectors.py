"""Write workers/certify/vectors.json: cases of tokenizers, with results from tests/reference.py. Run it after
changing that.

    python -m tests.make_vectors  (at the top of the repository)

Cases of tensor ops are made where they run: workers/certify/problems.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from tests import reference

VECTORS = Path(__file__).parents[1] / "src" / "layerzero" / "workers" / "certify" / "vectors.json"

SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
PIECES = ["[UNK]", "[CLS]", "[SEP]", "kernel", "##s", "##el", "run", "un", "##run", "##ning", "in", "env", "##ir"]
PIECES += ["##on", "é", "##t", "##é"]
WORD_PIECE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 1, "content": "[CLS]", **SPECIAL}, {"id": 2, "content": "[SEP]", **SPECIAL}],
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    "model": {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {token: i for i, token in enumerate(PIECES)},
    },
}
BPE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "vocab": {token: i for i, token in enumerate(["a", "b", "c", "é", "ab", "bc", "abc", "éa"])},
        "merges": ["a b", "b c", "ab c", "é a"],
    },
}


SPLIT = [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"], ["Ġ", "w"], ["o", "r"], ["Ġw", "or"], ["Ã", "©"]]
BYTE_LEVEL: dict[str, Any] = {
    **BPE,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {
        **BPE["model"],
        "vocab": {
            token: i for i, token in enumerate([*reference.byte_level_alphabet(), *("".join(pair) for pair in SPLIT)])
        },
        "merges": [" ".join(pair) for pair in SPLIT],
    },
}
EXTENDED = {**BYTE_LEVEL, "model": {**BYTE_LEVEL["model"], "ignore_merges": True}}  # as Llama 3 has it
ROOTS = ["▁", "k", "e", "r", "n", "l", "s"]
CHARACTERS: dict[str, Any] = {  # as Llama 2 has it
    **BPE,
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    },
    "pre_tokenizer": None,
    "decoder": None,
    "model": {
        **BPE["model"],
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": {
            token: i
            for i, token in enumerate(
                ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *ROOTS, "er", "▁k", "▁ker", "ne", "nel", "▁kernel"]
            )
        },
        "merges": ["e r", "▁ k", "▁k er", "n e", "ne l", "▁ker nel"],
    },
}


def with_pairs(document: dict[str, Any]) -> dict[str, Any]:
    """The same BPE model in the form that newer releases write."""
    merges = [merge.split(" ") for merge in document["model"]["merges"]]
    return {**document, "model": {**document["model"], "merges": merges}}


LINES = ["hello world, hellé\n 12's", "", "  été\thell  "]


class Maker:
    def __init__(self) -> None:
        self.cases: list[dict[str, Any]] = []

    def tokenizers(self) -> None:
        texts = ["Kernels running  in", "", "unrun zzz ENVIRON été"]
        for special, limit in ((True, None), (True, 4), (False, None)):
            self.tokenize("WordPiece", WORD_PIECE, "plain", texts, special, limit)
        self.tokenize("BPE", BPE, "merges-strings", ["abc cab", "aéa bcb"], True, None)
        self.tokenize("BPE", with_pairs(BPE), "merges-pairs", ["abc cab", "aéa bcb"], True, None)
        self.tokenize("byte level", BYTE_LEVEL, "merges-strings", LINES, True, None)
        self.tokenize("byte level", with_pairs(BYTE_LEVEL), "merges-pairs", LINES, True, 4)
        self.tokenize("byte level, whole", EXTENDED, "extended", LINES, True, None)
        self.tokenize("characters", CHARACTERS, "merges-strings", ["kernel  kern\n", "né", "", "漢 s"], True, None)
        self.tokenize("characters", with_pairs(CHARACTERS), "merges-pairs", ["kernels", "er漢"], True, 5)
        rows = [[1, 3, 4, 11, 2], [], [8, 14, 16]]
        for skip in (True, False):
            self.detokenize("WordPiece", WORD_PIECE, "plain", rows, skip)
        self.detokenize("BPE", BPE, "merges-strings", [[6, 0], [7, 3]], True)
        rows = [[259, 260, 195, 169, 195], [262, 108, 999], []]
        self.detokenize("byte level", BYTE_LEVEL, "merges-strings", rows, True)
        self.detokenize("byte level", with_pairs(BYTE_LEVEL), "merges-pairs", rows, False)
        self.detokenize("byte level", EXTENDED, "extended", rows, True)

    def tokenize(
        self, name: str, document: dict[str, Any], kind: str, texts: list[str], special: bool, limit: int | None
    ) -> None:
        ids, splits, offsets = reference.tokenize(document, texts, add_special_tokens=special, max_length=limit)
        encoded = [text.encode() for text in texts]
        attrs = {
            "tokenizer_format": kind,
            "add_special_tokens": special,
            "max_length": limit,
            "return_offsets": True,
        }
        outputs = [integers("int32", ids), integers("int64", splits), integers("int32", offsets)]
        inputs = [text_of(json.dumps(document)), text_of("".join(texts)), integers("int64", starts(encoded))]
        self._text_case("tokenize", f"{name}, special {special}, limit {limit}", attrs, inputs, outputs)

    def detokenize(self, name: str, document: dict[str, Any], kind: str, rows: list[list[int]], skip: bool) -> None:
        texts = reference.detokenize(document, rows, skip_special_tokens=skip)
        attrs = {"tokenizer_format": kind, "skip_special_tokens": skip}
        outputs = [text_of("".join(texts)), integers("int64", starts([text.encode() for text in texts]))]
        flat = [i for row in rows for i in row]
        inputs = [text_of(json.dumps(document)), integers("int32", flat), integers("int64", starts(rows))]
        self._text_case("detokenize", f"{name}, skip {skip}", attrs, inputs, outputs)

    def _text_case(self, op: str, name: str, attrs: Any, inputs: Any, outputs: Any) -> None:
        case = {"op": op, "name": name, "attrs": attrs}
        sizes = [tensor["shape"][0] for tensor in outputs]
        self.cases.append({**case, "inputs": inputs, "outputs": outputs, "result": {"sizes": sizes}})


def integers(dtype: str, values: Any) -> dict[str, Any]:
    array = np.array(values, dtype)
    return {"dtype": dtype, "shape": list(array.shape), "values": array.ravel().tolist()}


def text_of(text: str) -> dict[str, Any]:
    return {"dtype": "uint8", "shape": [len(text.encode())], "text": text}


def starts(parts: Any) -> list[int]:
    return [0, *np.cumsum([len(part) for part in parts], dtype=int).tolist()]


def make() -> str:
    """The file's text."""
    maker = Maker()
    maker.tokenizers()
    document = {"made_by": "tests/make_vectors.py", "cases": maker.cases}
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: re.sub(r"\s*\n\s*", " ", found.group()), text) + "\n"


if __name__ == "__main__":
    VECTORS.write_text(make(), encoding="utf-8")
