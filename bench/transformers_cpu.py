"""Transformers' models on the CPU with attention by LayerZero, always and where it was timed to be faster, beside SDPA:
prefill and generate, batch 8.

    python bench/transformers_cpu.py [--quick]

Needs torch and Transformers (pip install 'layerzero-broker[transformers]'). Random weights, float32, one thread in the
program and one in each worker. All run in turn in each round, in one order and then
in the other; "over SDPA" is the median of the ratios of rounds.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import common
import torch
import transformers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import layerzero.transformers  # noqa: F401  # makes the name "layerzero" known

BATCH, NEW, AIM = 8, 16, 1.05
SIZES = {"tiny": (128, 2, 4), "small": (384, 6, 6)}  # hidden size, layers, heads
MODES = {  # by SDPA twice: how far two of the same are from each other is what a difference must exceed
    "SDPA": "sdpa",
    "SDPA again": "sdpa",
    "LayerZero": "layerzero",
    "LayerZero, if faster": "layerzero_if_faster",
}
LENGTHS = (32, 128)
WARM = 12
ROUNDS = {"tiny": 25, "small": 9}


def models(size: str) -> dict[str, Any]:
    hidden, layers, heads = SIZES[size]
    torch.manual_seed(0)
    common_options = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 8000,
        "max_position_embeddings": 1024,
    }
    return {
        "BERT": BertModel(BertConfig(**common_options)).eval(),
        "Llama": LlamaForCausalLM(LlamaConfig(**common_options, num_key_value_heads=heads // 2)).eval(),
    }


def ids(tokens: int) -> torch.Tensor:
    return torch.randint(3, 8000, (BATCH, tokens), generator=torch.Generator().manual_seed(tokens))


class Found(NamedTuple):
    """Of one mode: median milliseconds of SDPA and of it, the median of their ratio in each round, and the largest
    difference of its result from SDPA's."""

    sdpa_ms: float
    ms: float
    ratio: float
    error: float


def measure(model: Any, call: Callable[[], torch.Tensor], rounds: int) -> dict[str, Found]:
    """Of each mode but SDPA."""
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    results = {}
    for number in range(rounds + 1):
        for mode in sorted(MODES, reverse=number % 2 == 1):
            model.set_attn_implementation(MODES[mode])
            for _ in range(WARM if number == 0 else 1):  # a lane, an import, what is faster
                results[mode] = call()
            start = time.perf_counter()
            call()
            if number:
                times[mode].append((time.perf_counter() - start) * 1e3)
    base, sdpa = results.pop("SDPA").float(), times.pop("SDPA")
    return {
        mode: Found(
            statistics.median(sdpa),
            statistics.median(times[mode]),
            statistics.median(ours / theirs for ours, theirs in zip(times[mode], sdpa, strict=True)),
            float((found.float() - base).abs().max() / base.abs().max()),
        )
        for mode, found in results.items()
    }


def main() -> None:
    args = common.parser(__doc__, "three rounds").parse_args()
    load = os.getloadavg()[0]
    rows = []
    torch.set_num_threads(1)
    with common.own_broker(OMP_NUM_THREADS="1"), torch.no_grad():
        for size in SIZES:
            rounds = 3 if args.quick else ROUNDS[size]
            for name, model in models(size).items():
                for tokens in LENGTHS:
                    given = ids(tokens)
                    options = {"use_cache": False} if name == "Llama" else {}
                    found = measure(model, lambda m=model, x=given, o=options: m(x, **o)[0], rounds)  # type: ignore[misc]
                    rows += rows_of(f"{size} {name}, {tokens} tokens", found)
                if name == "Llama":
                    given = ids(64)
                    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
                    call = lambda m=model, x=given, o=settings: m.generate(x, **o)  # noqa: E731
                    rows += rows_of(f"{size} {name}, {NEW} tokens after 64", measure(model, call, rounds))
    common.finish(
        "transformers_cpu",
        "Transformers' models on the CPU, attention by LayerZero beside SDPA",
        {"here": {"torch": torch.__version__, "transformers": transformers.__version__}},
        ("what, batch 8", "attention by", "SDPA ms", "ms", "over SDPA", "results differ by"),
        rows,
        (
            f"1 thread here, 1 in each worker; {ROUNDS['tiny']} rounds of tiny models, {ROUNDS['small']} of small.",
            f"Load average of the machine at the start: {load:.1f}; of a busy one the ratios alone say something.",
        ),
        is_quick=args.quick,
    )


def rows_of(what: str, found: dict[str, Found]) -> list[tuple[str, ...]]:
    return [
        (
            what,
            mode,
            f"{one.sdpa_ms:.1f}",
            f"{one.ms:.1f}",
            f"{one.ratio:.2f}" if MODES[mode] == "sdpa" else common.at_most(one.ratio, AIM),
            f"{one.error:.0e}",
        )
        for mode, one in found.items()
    ]


if __name__ == "__main__":
    main()
