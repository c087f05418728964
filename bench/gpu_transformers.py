"""Transformers' Llama with attention, or attention and norms, by LayerZero: what isolation costs a real program.

    python bench/gpu_transformers.py [--quick] [--only CASE ...]  (needs a GPU, torch and transformers)

Eight layers of the size of Llama 3 8B (hidden 4,096, 32 heads on 8, bfloat16, random weights), unchanged but for
`layerzero.transformers` or `layerzero.torch.accelerate`. Each mode runs in turns with torch alone (Transformers' SDPA):
times, the largest difference of the logits, tokens, who served. What a mode changes for the whole process is taken out
for torch's turns.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import common
import gpu_common
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import layerzero as lz
import layerzero.torch as lztorch
import layerzero.transformers as lzt
from layerzero.torch.acceleration import seam
from layerzero.transformers import running

PROMPT, NEW = 512, 64
TURNS, WARM = 24, 2  # of each way; the first are not counted
TURNS_OF_GENERATE = 8
WARM_CALLS_S = 25.0  # so long calls may take to become what they will be
QUIET_RUNS = 12  # without another route: then they are
COMPILED_RUNS = 5
TORCH = "torch"
# A kernel of each of three environments, by name: what is measured is not what the broker would choose.
THREE = ("cudnn.attention", "triton.rms_norm", "torch-cuda.silu")
LAYERS = {"attention": (), "attention and norms": ("RMSNorm",), "three environments": ("RMSNorm", "SiLU")}
# The model as it is, by layerzero.torch.accelerate: with these ops, or with all that it takes over.
IF_FASTER = "accelerate, if faster"
ACCELERATED: dict[str, tuple[str, ...] | None] = {
    "accelerate, attention": ("attention",),
    "accelerate": None,
    IF_FASTER: None,
}
ACCELERATED_AIM = 1.05
MODES = (TORCH, *LAYERS, *ACCELERATED)


class Case(NamedTuple):
    """What is run, and the aims of its modes, as parts of torch's time."""

    name: str
    run: Callable[[Any], Any]
    aims: dict[str, float]
    kind: str = "logits"
    is_compiled: bool = False


@torch.no_grad()
def prefill(model: Any, tokens: int) -> Any:
    return model(_ids(tokens), use_cache=False).logits


def generate(model: Any, **options: Any) -> Any:
    return model.generate(
        _ids(PROMPT), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
    )


def training(model: Any) -> Any:
    """A step of 1,024 tokens: forward, backward, optimizer (plain SGD, of rate 0, so that each step is the same)."""
    model.zero_grad(set_to_none=True)
    ids = _ids(1024)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    with torch.no_grad():
        weights = [weight for weight in model.parameters() if weight.grad is not None]
        torch._foreach_add_(weights, [weight.grad for weight in weights], alpha=-0.0)
    return torch.stack([loss.detach().float(), *(weight.grad.float().norm() for weight in weights)])


CASES = {
    "prefill1024": Case(
        "prefill 1,024",
        lambda model: prefill(model, 1024),
        {"attention": 1.00, "attention and norms": 0.80, "three environments": 0.80},
    ),
    "prefill4096": Case(
        "prefill 4,096",
        lambda model: prefill(model, 4096),
        {"attention": 0.98, "attention and norms": 0.88, "three environments": 0.88},
    ),
    "dynamic": Case(
        f"generate {NEW} after {PROMPT}, dynamic cache",
        generate,
        {"attention": 1.02, "attention and norms": 0.85, "three environments": 0.85},
        "tokens",
    ),
    "static": Case(
        f"generate {NEW} after {PROMPT}, static cache, compiled",
        lambda model: generate(model, cache_implementation="static"),
        {"attention": 1.02, "attention and norms": 1.02, "three environments": 1.02},
        "tokens",
        is_compiled=True,
    ),
    "training": Case("training step of 1,024", training, dict.fromkeys(LAYERS, 1.05), "losses and norms of gradients"),
}


def plain_model() -> Any:
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
    with torch.device("cuda"):
        plain = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    plain.set_attn_implementation("sdpa")
    return plain


@contextlib.contextmanager
def changed(plain: Any, mode: str) -> Iterator[Any]:
    """The same weights, with what the mode changes."""
    own = copy.deepcopy(plain, {id(weight): weight for weight in plain.parameters()})
    if mode in ACCELERATED:
        with lztorch.accelerate(own, ACCELERATED[mode], if_faster=mode == IF_FASTER):
            yield own
        return
    own.set_attn_implementation("layerzero")
    own = lzt.kernelize(own, LAYERS[mode]) if LAYERS[mode] else own
    with lz.prefer(*THREE) if mode == "three environments" else contextlib.nullcontext():
        yield own


@contextlib.contextmanager
def torch_alone(model: Any) -> Iterator[None]:
    """Without the overrides of torch's ops that this model needs: other models' calls would pay for them."""
    acceleration = getattr(type(model), "layerzero", None)
    if acceleration is None:
        yield
        return
    pace, takeover = acceleration._pace, acceleration.takeover
    seam.leave(takeover)
    try:
        yield
    finally:
        seam.need(takeover, acceleration.ops if pace is None else pace.awake)


def _ids(tokens: int) -> Any:
    return torch.randint(0, 32000, (1, tokens), generator=torch.Generator().manual_seed(tokens)).cuda()


def timed(run: Callable[[], Any], runs: int) -> tuple[list[float], Any]:
    """ms of each run, and the last result."""
    times, result = [], None
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times, result


def warm_up(mode: str, model: Any, case: Case) -> None:
    """Until its calls go the way they will go, or time is up. Of compiled calls nobody tells: these get as many runs as
    they need to be recorded."""
    if case.is_compiled:
        timed(lambda: case.run(model), COMPILED_RUNS)
        return
    end_s, quiet, before = time.monotonic() + WARM_CALLS_S, 0, None
    while quiet < QUIET_RUNS and time.monotonic() < end_s:
        case.run(model)
        torch.cuda.synchronize()
        status, timed_by = lz.status()["selection"]["compiled"], ()
        if mode == IF_FASTER:
            timed_by = lztorch.report(model).comparisons
        is_quiet = not status["running"] and (timed_by or mode != IF_FASTER)
        quiet, before = quiet + 1 if is_quiet and (status, timed_by) == before else 0, (status, timed_by)


def served(mode: str, model: Any, case: Case) -> Counter[str]:
    """Which kernels compute a run that is not compiled, and how they get there, each with its calls."""
    if mode in ACCELERATED:
        before = taken_over(model)
        case.run(model)
        return taken_over(model) - before
    found: Counter[str] = Counter()
    own = running.call

    def counted(name: str, *args: Any, **options: Any) -> Any:
        result = own(name, *args, **options)
        report = gpu_common.served()
        found[f"{report.kernel_id} {report.path}"] += 1
        return result

    running.call = counted
    try:
        case.run(model)
    finally:
        running.call = own
    return found


def taken_over(model: Any) -> Counter[str]:
    """Until now, and what was left to torch, by its reason."""
    found: Counter[str] = Counter()
    for line in lztorch.report(model).lines:
        path = "; ".join((f"{line.kernel} {'/'.join(line.paths)}", *line.notes)) if line.is_taken else line.why
        found[f"{line.op}: {path}"] += line.calls
    return found


def measure(plain: Any, mode: str, case: Case, turns: int) -> tuple[str, ...]:
    """A row of the table."""
    times: dict[str, list[float]] = {TORCH: [], mode: []}
    with changed(plain, mode) as model:
        timed(lambda: case.run(plain), COMPILED_RUNS)
        warm_up(mode, model, case)
        for _ in range(turns + WARM):
            with torch_alone(model):
                found, wanted = timed(lambda: case.run(plain), 1)
            times[TORCH] += found
            found, result = timed(lambda: case.run(model), 1)
            times[mode] += found
        if not case.is_compiled:
            print(f"{case.name}, {mode}: {dict(served(mode, model, case))}", flush=True)
    ms = {name: statistics.median(found[WARM:]) for name, found in times.items()}
    ratios = [ours / alone for ours, alone in zip(times[mode][WARM:], times[TORCH][WARM:], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    aim = case.aims.get(mode, ACCELERATED_AIM)
    told = f"{common.at_most(ratio, aim)}, half of them {low:.2f} to {high:.2f}"
    return case.name, mode, f"{ms[TORCH]:.2f}", f"{ms[mode]:.2f}", told, alike(result, wanted, case.kind)


def alike(ours: Any, wanted: Any, kind: str) -> str:
    if kind == "tokens":
        return f"{(ours == wanted).float().mean().item():.0%} of the tokens are the same"
    difference = (ours.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    return f"{kind} differ by {difference.item():.1e}"


def main() -> None:
    parser = common.parser(__doc__, "few turns")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these cases alone")
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=MODES[1:], help="these modes alone")
    arguments = parser.parse_args()
    rows = []
    with common.own_broker():
        plain = plain_model()
        for case in (CASES[name] for name in arguments.only):
            turns = TURNS_OF_GENERATE if case.kind == "tokens" else TURNS
            for mode in arguments.modes:
                start_s = time.monotonic()
                rows.append(measure(plain, mode, case, 4 if arguments.quick else turns))
                gc.collect()
                print(*rows[-1], sep=" | ", flush=True)
                print(f"{time.monotonic() - start_s:.0f} s; {lz.last_report()}", flush=True)
        handed = lzt.report()
        versions = gpu_common.versions()
    print(handed)
    common.finish(
        "gpu_transformers",
        "Transformers' Llama, attention and norms by LayerZero, beside torch alone",
        {**versions, "program": {"transformers": transformers.__version__}},
        ("what", "by lz", "torch alone, ms", "ms", "ratio, median of the turns'", "results"),
        rows,
        is_quick=arguments.quick,
    )


if __name__ == "__main__":
    main()
