"""Transformers' Llama with attention, or attention and norms, by LayerZero: what a call costs in a real program.

    python bench/gpu_transformers.py [--quick]  (needs a GPU, torch and transformers)

Eight layers of the size of Llama 3 8B (hidden 4,096, 32 heads on 8, bfloat16, random weights). All modes run in turn in
each round, and each is compared with torch alone in the same run: times, the largest difference of the logits, tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import common
import gpu_common
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama

import layerzero as lz

PREFILL = {1024: (1.00, 0.80), 4096: (0.98, 0.88)}  # tokens -> aims of attention, and of attention and norms
GENERATE = (1.02, 0.85)
PROMPT, NEW = 512, 64
ROUNDS, RUNS, WARM = 4, 6, 2
WARM_CALLS_S = 20.0  # so long calls may take to become what they will be
MODES = ("torch", "attention", "attention and norms")


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Any, None]:
    """Transformers' attention function, by lz.attention; query (B, Hq, Sq, D), key and value (B, Hk, Sk, D), which lie
    as (B, S, H, D) where they come from a linear layer; so does what it returns."""
    assert attention_mask is None, "nothing is padded here"
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    options = {"is_causal": query.shape[2] > 1, "scale": scaling, "enable_gqa": True}
    return lz.attention(q, k, v, layout="BSHD", **options), None


def rms_norm(self: Any, x: Any) -> Any:
    """LlamaRMSNorm.forward, by lz.rms_norm."""
    return lz.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)


class Program:
    """The model, and which of its parts are whose."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=8,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=32000,
            max_position_embeddings=8192,
        )
        AttentionInterface.register("layerzero_bench", attention)
        AttentionMaskInterface.register("layerzero_bench", sdpa_mask)
        self.model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
        self.own_norm = modeling_llama.LlamaRMSNorm.forward

    def use(self, mode: str) -> None:
        self.model.set_attn_implementation("sdpa" if mode == "torch" else "layerzero_bench")
        modeling_llama.LlamaRMSNorm.forward = rms_norm if mode == "attention and norms" else self.own_norm

    @torch.no_grad()
    def prefill(self, tokens: int) -> Any:
        return self.model(_ids(tokens), use_cache=False).logits

    @torch.no_grad()
    def generate(self) -> Any:
        return self.model.generate(
            _ids(PROMPT), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
        )


def _ids(tokens: int) -> Any:
    return torch.randint(0, 32000, (1, tokens), generator=torch.Generator().manual_seed(tokens)).cuda()


def timed(call: Callable[[], Any], runs: int) -> tuple[list[float], Any]:
    times, result = [], None
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times, result


def warm_up(program: Program, call: Callable[[], Any]) -> None:
    """Until each mode's calls go the way they will go: the last one of lz is lifted, or time is up."""
    for mode in MODES[1:]:
        program.use(mode)
        end_s = time.monotonic() + WARM_CALLS_S
        while time.monotonic() < end_s:
            call()
            torch.cuda.synchronize()
            if lz.last_report().path == "lifted":
                call()
                break


def measure(program: Program, call: Callable[[], Any], rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Median ms of each mode, and its last result."""
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    results = {}
    warm_up(program, call)
    for _ in range(rounds):
        for mode in MODES:
            program.use(mode)
            found, results[mode] = timed(call, RUNS)
            times[mode] += found[WARM:]
    return {mode: statistics.median(found) for mode, found in times.items()}, results


def main() -> None:
    arguments = common.parser(__doc__, "one round").parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    program, rows = Program(), []
    with common.own_broker():
        for tokens, aims in PREFILL.items():
            ms, logits = measure(program, lambda tokens=tokens: program.prefill(tokens), rounds)
            wanted = logits["torch"].float()
            for mode, aim in zip(MODES[1:], aims, strict=True):
                error = ((logits[mode].float() - wanted).abs().max() / wanted.abs().max()).item()
                rows.append(_row(f"prefill {tokens}", mode, ms, aim, f"logits differ by {error:.1e}"))
        ms, tokens_of = measure(program, program.generate, rounds)
        for mode, aim in zip(MODES[1:], GENERATE, strict=True):
            same = (tokens_of[mode] == tokens_of["torch"]).float().mean().item()
            rows.append(_row(f"generate {NEW} after {PROMPT}", mode, ms, aim, f"{same:.0%} of the tokens are the same"))
        print(lz.last_report())
        versions = gpu_common.versions()
    common.finish(
        "gpu_transformers",
        "Transformers' Llama, attention and norms by LayerZero, beside torch alone",
        {**versions, "program": {"transformers": transformers.__version__}},
        ("what", "by lz", "torch alone, ms", "ms", "ratio", "results"),
        rows,
        is_quick=arguments.quick,
    )


def _row(what: str, mode: str, ms: dict[str, float], aim: float, results: str) -> tuple[str, ...]:
    ratio = ms[mode] / ms["torch"]
    return what, mode, f"{ms['torch']:.2f}", f"{ms[mode]:.2f}", common.at_most(ratio, aim), results


if __name__ == "__main__":
    main()
