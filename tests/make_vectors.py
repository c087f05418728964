"""Write workers/vectors.json: small cases with results from tests/reference.py. Run it after changing a reference.

    python -m tests.make_vectors  (at the top of the repository)

Values are multiples of 1/16 below 4, exact in every dtype, so that one case serves all of them.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
from tests import reference

VECTORS = Path(__file__).parents[1] / "workers" / "vectors.json"

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


def with_pairs(document: dict[str, Any]) -> dict[str, Any]:
    """The same BPE model in the form that newer releases write."""
    merges = [merge.split(" ") for merge in document["model"]["merges"]]
    return {**document, "model": {**document["model"], "merges": merges}}


class Maker:
    def __init__(self) -> None:
        # random's own generator is stable across releases; NumPy's distributions are not.
        self.random = random.Random(20)
        self.cases: list[dict[str, Any]] = []

    def values(self, *shape: int) -> reference.F64:
        count = int(np.prod(shape))
        return np.array([self.random.randint(-48, 48) / 16 for _ in range(count)]).reshape(shape)

    def add(self, op: str, name: str, attrs: dict[str, Any], needs: dict[str, Any], **tensors: Any) -> None:
        function = reference.TENSOR_OPS[op]
        names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        result = function(*(tensors.get(argument) for argument in names), **attrs)
        self.cases.append(
            {
                "op": op,
                "name": name,
                "attrs": attrs,
                "given": [argument for argument in names if tensors.get(argument) is not None],
                "needs": needs,
                "inputs": [stored(tensors.get(argument)) for argument in names],
                "outputs": [stored(result)],
            }
        )

    def attention(self) -> None:
        def add(
            name: str, heads: int, kv_heads: int, queries: int, keys: int, causal: str, mask: str, needs: Any
        ) -> None:
            attrs = {
                "is_causal": bool(causal),
                "scale": 0.25,
                "causal_alignment": causal or "top_left",
                "layout": "BHSD",
            }
            self.add(
                "attention",
                name,
                attrs,
                {"requires_layouts": "BHSD", **needs},
                q=self.values(1, heads, queries, 16),
                k=self.values(1, kv_heads, keys, 16),
                v=self.values(1, kv_heads, keys, 16),
                attn_mask={"": None, "bool": seen, "float": bias}[mask],
            )

        seen = np.array([[[[True, False, True, True, False], [False] * 5, [True] * 5]]])
        bias = np.where(seen, self.values(1, 1, 3, 5), -np.inf)
        add("plain", 2, 2, 3, 5, "", "", {})
        add("grouped heads", 4, 2, 2, 3, "", "", {"supports_gqa": True})
        add("causal from the top left", 2, 2, 3, 5, "top_left", "", {"causal_alignments": "top_left"})
        add("causal to the bottom right", 1, 1, 3, 5, "bottom_right", "", {"causal_alignments": "bottom_right"})
        add("causal, rows without a key", 1, 1, 5, 3, "bottom_right", "", {"causal_alignments": "bottom_right"})
        add("bool mask with a hidden row", 2, 2, 3, 5, "", "bool", {"attn_mask_types": "bool"})
        add("float mask with a hidden row", 2, 2, 3, 5, "", "float", {"attn_mask_types": "float"})

    def tensor_ops(self) -> None:
        v = self.values
        self.add("matmul", "plain", {}, {}, a=v(3, 8), b=v(8, 5))
        self.add("matmul", "broadcast batch", {}, {}, a=v(2, 1, 3, 4), b=v(2, 4, 5))
        self.add("linear", "with bias", {}, {"optional_args": "bias"}, x=v(2, 3, 8), weight=v(5, 8), bias=v(5))
        self.add("linear", "without bias", {}, {}, x=v(4, 8), weight=v(6, 8))
        self.add("softmax", "last dimension", {"dim": 1}, {}, x=v(3, 7))
        self.add("softmax", "middle dimension, large logits", {"dim": 1}, {}, x=v(2, 3, 4) * 256)
        both = {"weight": v(8), "bias": v(8)}
        self.add(
            "layer_norm", "weight and bias", {"ndim": 1, "eps": 1e-5}, {"optional_args": "bias"}, x=v(2, 3, 8), **both
        )
        self.add("layer_norm", "large mean", {"ndim": 1, "eps": 1e-5}, {}, x=np.round(v(3, 8)) / 2 + 96, weight=v(8))
        self.add("layer_norm", "large eps, two dimensions", {"ndim": 2, "eps": 0.5}, {}, x=v(3, 2, 4), weight=v(2, 4))
        self.add("rms_norm", "weight", {"ndim": 1, "eps": 1e-6}, {"optional_args": "weight"}, x=v(2, 3, 8), weight=v(8))
        self.add("rms_norm", "no weight, large eps", {"ndim": 1, "eps": 0.5}, {}, x=v(3, 8))
        for approximate in ("none", "tanh"):
            self.add("gelu", approximate, {"approximate": approximate}, {}, x=v(3, 9))
        self.add("silu", "plain", {}, {}, x=v(3, 9))
        for dtype in ("int32", "int64"):
            ids = np.array([[3, 0], [4, 3]], dtype)
            self.add("embedding", f"{dtype} ids", {}, {"index_dtypes": dtype}, ids=ids, weight=v(5, 4))

    def tokenizers(self) -> None:
        texts = ["Kernels running  in", "", "unrun zzz ENVIRON été"]
        for special, limit in ((True, None), (True, 4), (False, None)):
            self.tokenize("WordPiece", WORD_PIECE, "plain", texts, special, limit)
        self.tokenize("BPE", BPE, "merges-strings", ["abc cab", "aéa bcb"], True, None)
        self.tokenize("BPE", with_pairs(BPE), "merges-pairs", ["abc cab", "aéa bcb"], True, None)
        rows = [[1, 3, 4, 11, 2], [], [8, 14, 16]]
        for skip in (True, False):
            self.detokenize("WordPiece", WORD_PIECE, "plain", rows, skip)
        self.detokenize("BPE", BPE, "merges-strings", [[6, 0], [7, 3]], True)

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
        self._text_case("tokenize", f"{name}, special {special}, limit {limit}", attrs, kind, inputs, outputs)

    def detokenize(self, name: str, document: dict[str, Any], kind: str, rows: list[list[int]], skip: bool) -> None:
        texts = reference.detokenize(document, rows, skip_special_tokens=skip)
        attrs = {"tokenizer_format": kind, "skip_special_tokens": skip}
        outputs = [text_of("".join(texts)), integers("int64", starts([text.encode() for text in texts]))]
        flat = [i for row in rows for i in row]
        inputs = [text_of(json.dumps(document)), integers("int32", flat), integers("int64", starts(rows))]
        self._text_case("detokenize", f"{name}, skip {skip}", attrs, kind, inputs, outputs)

    def _text_case(self, op: str, name: str, attrs: Any, kind: str, inputs: Any, outputs: Any) -> None:
        case = {"op": op, "name": name, "attrs": attrs, "given": [], "needs": {"tokenizer_formats": kind}}
        sizes = [tensor["shape"][0] for tensor in outputs]
        self.cases.append({**case, "inputs": inputs, "outputs": outputs, "result": {"sizes": sizes}})


def stored(array: Any) -> dict[str, Any] | None:
    if array is None:
        return None
    array = np.asarray(array)
    dtype = "float" if array.dtype.kind == "f" else str(array.dtype)
    # 12 decimals: more than any tolerance looks at, and the same on every machine's libm.
    values = [number(value) if dtype == "float" else value for value in array.ravel().tolist()]
    return {"dtype": dtype, "shape": list(array.shape), "values": values}


def number(value: float) -> float | str:
    """JSON has no infinity; float() reads the text."""
    return round(value, 12) if math.isfinite(value) else str(value)


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
    maker.attention()
    maker.tensor_ops()
    maker.tokenizers()
    maker.cases.append(
        {"op": "null", "name": "nothing", "attrs": {}, "given": [], "needs": {}, "inputs": [], "outputs": []}
    )
    document = {"made_by": "tests/make_vectors.py", "tolerance": reference.TOLERANCE, "cases": maker.cases}
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: re.sub(r"\s*\n\s*", " ", found.group()), text) + "\n"


if __name__ == "__main__":
    VECTORS.write_text(make(), encoding="utf-8")
