"""Runs inside the minilm-reference environment: all-MiniLM-L6-v2 with transformers and torch, in one process.

Arguments: the model's folder, a JSON file with a list of texts, a folder for the results: vectors.npy, float32
(texts, hidden); ids.npy, int64 (texts, tokens), -1 where a text is shorter. Started by test_minilm.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer


def main() -> None:
    model_folder, texts_file, results = map(Path, sys.argv[1:])
    texts = json.loads(texts_file.read_text())
    max_tokens = json.loads((model_folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModel.from_pretrained(model_folder, dtype=torch.float32).eval()
    batch = tokenizer(texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt")
    is_token = batch["attention_mask"]
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = is_token.unsqueeze(-1).to(hidden.dtype)
    means = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    vectors = torch.nn.functional.normalize(means, dim=1)
    np.save(results / "vectors.npy", vectors.numpy(), allow_pickle=False)
    np.save(results / "ids.npy", batch["input_ids"].masked_fill(is_token == 0, -1).numpy(), allow_pickle=False)


if __name__ == "__main__":
    main()
