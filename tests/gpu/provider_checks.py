"""What one GPU backend computes, in a process of its own: `python provider_checks.py BACKEND`. Prints one JSON line.

{"probe": the verdict of workers/probe.py, "ran": {check: {kernel: how many cases}},
"wrong": {check: {kernel: {case: what is wrong}}}}. Checks: random (shapes, strides, and starts at any element),
repeated (the same bits again, of kernels that say so), replayed (as a CUDA graph, on other inputs than at its capture,
likewise).
It imports no library but the backend's and no pydantic, so it runs in any interpreter that has msgpack.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import random_experts
import vision_calls

from layerzero.ipc.vocabulary.numerics import MAGNITUDES, difference, gather, nearest, scatter, tolerance, unpack
from layerzero.ipc.vocabulary.ops import ATTENTION_OPS, GATED, OPS
from layerzero.ipc.vocabulary.quantized_shapes import SCALED_DTYPES
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers import boot
from layerzero.workers.certify.cases import Case, cases
from layerzero.workers.certify.claims import Claims, dtypes
from layerzero.workers.certify.memory import FILL, GpuBench, placed
from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.problems import PROBLEMS
from layerzero.workers.certify.values import Values
from layerzero.workers.probe import probe
from layerzero.workers.provider import Block, Bound, Call, Loaded

RANDOM_PROBLEMS = 12  # per kernel; each in every dtype and up to six layouts
EXTENTS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 48, 64, 65, 127, 128, 130)
ROOM_BYTES = 64 << 20  # the caches of append_kv may have four dimensions of 65
FEWER = EXTENTS[:13]  # where there are more dimensions: an arena is not large
SIGNS = (1, 0, 1, -1)  # of the scale of attention, with the causal rule and without
HEAD_DIMS = (8, 16, 40, 64, 72, 96, 128, 192, 256)
INDICES = {  # the dtypes of tensors that have their own
    "embedding": {"ids": "int64"},
    "cross_entropy": {"target": "int64"},
    "attention_varlen": {"cu_seqlens_q": "int32", "cu_seqlens_k": "int32"},
    **{op: {"block_tables": "int32", "seq_lens": "int32"} for op in ("paged_attention", "mla_decode")},
    "attention_varlen_forward": {"cu_seqlens_q": "int32", "cu_seqlens_k": "int32", "alibi_slopes": "float32"},
    "paged_attention_forward": {
        **dict.fromkeys(("block_tables", "seq_lens", "cu_seqlens_q"), "int32"),
        "alibi_slopes": "float32",
    },
    **{op: {"slots": "int64"} for op in ("append_kv", "gather_kv")},
    "copy_kv_blocks": {"sources": "int64", "targets": "int64"},
    **{name: {"scale": "float32"} for name in ("quantize", "dequantize")},
    "scaled_linear": {"weight_scale": "float32", "x_scale": "float32"},
    "grouped_linear": {"offsets": "int32"},
    "moe_route": {"correction_bias": "float32"},
    "moe_permute": {"ids": "int64"},
    "moe_combine": {"order": "int32", "weights": "float32"},
    "moe_mlp": {"ids": "int64", "weights": "float32"},
    "attention_backward": {"lse": "float32"},
    "merge_attention": dict.fromkeys(OPS["merge_attention"].singles, "float32"),
    "where": {"condition": "bool"},
}
INDICES |= {
    op: {name: "float32" if name in OPS[op].singles else "int64" for name in OPS[op].singles | OPS[op].indices}
    for op in ("penalize_logits", "filter_logits", "sample", "speculative_verify", "tree_accept")
}
Verdict = tuple[str, str]  # a case, and what is wrong with it; "" when nothing is


class Skewed(GpuBench):
    """Blocks start at any element, as views of a user's tensor do."""

    def place(self, spec: TensorSpec) -> slice:
        place = super().place(TensorSpec.contiguous("uint8", (spec.span_bytes + 256,)))
        start = place.start + spec.itemsize * random.Random(spec.span_bytes).randrange(1, 16)
        return slice(start, start + spec.span_bytes)


def check(provider: str, descriptor: Path) -> dict[str, Any]:
    verdict = probe(provider, descriptor)
    ran: dict[str, dict[str, int]] = {}
    wrong: dict[str, dict[str, dict[str, str]]] = {}
    if verdict["kernels"]:
        loaded = boot.import_provider(provider).load()
        for name, verdicts in (("random", on_random), ("repeated", on_repetition), ("replayed", on_replay)):
            ran[name], wrong[name] = {}, {}
            for op, kernels in json.loads(descriptor.read_text(encoding="utf-8"))["ops"].items():
                for kernel in kernels:
                    found = list(verdicts(loaded, op, kernel))
                    ran[name][kernel["kernel_id"]] = len(found)
                    wrong[name][kernel["kernel_id"]] = {case: problem for case, problem in found if problem}
    return {"probe": verdict, "ran": ran, "wrong": wrong}


def on_random(loaded: Loaded, op: str, kernel: Claims) -> Iterator[Verdict]:
    """Calls that no list of cases has."""
    bench = Skewed(loaded, ROOM_BYTES)
    problems = list(random_problems(op, kernel))
    for dtype in dtypes(op, kernel):
        for case in cases(op, kernel, problems, dtype):
            try:
                bound, outputs = bind(bench, loaded, op, kernel, case)
                bench.run(bound)
                yield f"{dtype}, {case.name}", judged(bench, op, outputs, case)
            except Exception as exc:
                yield f"{dtype}, {case.name}", f"raised {type(exc).__name__}: {exc}"[:500]


def on_repetition(loaded: Loaded, op: str, kernel: Claims) -> Iterator[Verdict]:
    bench = GpuBench(loaded, ROOM_BYTES)
    for case, _ in pairs(op, kernel) if kernel["deterministic"] else ():
        bound, outputs = bind(bench, loaded, op, kernel, case)
        runs = []
        for _ in range(3):
            bench.run(bound)
            runs.append([bytes(bench.content(block)) for block in outputs])
        yield case.name, "" if runs[0] == runs[1] == runs[2] else "the same call gave other bits"


def on_replay(loaded: Loaded, op: str, kernel: Claims) -> Iterator[Verdict]:
    for case, other in pairs(op, kernel) if kernel.get("is_cuda_graph_safe") else ():
        bench = GpuBench(loaded, ROOM_BYTES)
        assert loaded.on_stream is not None
        try:
            bound, _ = bind(bench, loaded, op, kernel, case)
            bench.run(bound)
            fresh, _ = bind(bench, loaded, op, kernel, case)  # has not run itself
            bench.driver.begin_capture(bench.stream)
            with loaded.on_stream(bench.stream):
                fresh()
            graph = bench.driver.end_capture(bench.stream)
            outputs = placed(bench, op, other)[1]  # the same specs, so the same places
            bench.driver.launch_graph(graph, bench.stream)
            bench.driver.synchronize_stream(bench.stream)
            yield case.name, judged(bench, op, outputs, other)
        except Exception as exc:
            yield case.name, f"raised {type(exc).__name__}: {exc}"[:500]


def pairs(op: str, kernel: Claims) -> Iterator[tuple[Case, Case]]:
    """For each dtype a call that the kernel takes, and the same one on other numbers."""
    full = [p for p in PROBLEMS[op](kernel) if all(v is None or v.flat for v in p.inputs)]
    for dtype in dtypes(op, kernel):
        problem = next((p for p in full if any(True for _ in cases(op, kernel, [p], dtype))), None)
        assert problem is not None, f"{kernel['kernel_id']} takes no problem in {dtype}"
        inputs = [
            values if values is None or kind else Values(values.shape, [-v / 2 for v in values.flat])
            for values, kind in zip(problem.inputs, problem.kinds, strict=False)
        ]
        if op == "speculative_verify":  # whose probabilities are none below zero
            target, *drafts = problem.inputs
            assert target is not None
            inputs = [Values(target.shape, target.flat[::-1]), *drafts]
        if op == "batch_norm":  # whose variances are none below zero
            inputs[2] = problem.inputs[2]
        other = Problem(op, f"{problem.name}, other numbers", problem.attrs, tuple(inputs), problem.kinds)
        if op == "attention_backward":  # whose result and log-sum-exp follow from the rest
            grad, q, k, v, _, _, mask = inputs
            inputs = [grad, q, k, v, *forward(problem.attrs, [q, k, v, mask, None, None]), mask]
            other = Problem(op, other.name, problem.attrs, tuple(inputs), problem.kinds)
        both = (cases(op, kernel, [one], dtype) for one in (problem, other))
        yield next(zip(*both, strict=False))


def forward(attrs: dict[str, Any], inputs: Sequence[Values | None]) -> tuple[Values, ...]:
    """What attention_forward gives."""
    return Problem("attention_forward", "", attrs, tuple(inputs), ("",) * len(inputs)).solutions("float")


def random_problems(op: str, kernel: Claims) -> Iterator[Problem]:
    """Some shapes; rows of more than one dimension and masks are left to the probe's cases."""
    rng = random.Random(op)

    def numbers(*shape: int, scale: float = 1.0) -> Values:
        return Values(shape, [rng.randrange(-48, 49) / 16 * scale for _ in range(math.prod(shape))])

    def extent() -> int:
        return rng.choice(EXTENTS)

    step, high = kernel.get("head_dim_multiple", 1), kernel.get("max_head_dim") or 256
    dims = [dim for dim in HEAD_DIMS if dim % step == 0 and kernel.get("min_head_dim", 1) <= dim <= high]
    if kernel.get("needs_jit"):  # a minute for each
        dims = dims[:1]
    for number in range(RANDOM_PROBLEMS):
        attrs: dict[str, Any] = {}
        sign = SIGNS[number // 2 % len(SIGNS)]
        inputs: Sequence[Values | None]
        if op in ATTENTION_OPS:
            group, kv_heads, dim = rng.choice((1, 1, 2, 4)), rng.choice((1, 2)), rng.choice(dims)
            group = group if kernel.get("supports_gqa") else 1
            queries, keys = (rng.choice(EXTENTS if op == "attention" else FEWER) for _ in "qk")
            is_causal = bool(number % 2)
            alignment = rng.choice(kernel["causal_alignments"]) if is_causal and queries != keys else "top_left"
            attrs = {"is_causal": is_causal, "scale": sign * dim**-0.5, "causal_alignment": alignment, "layout": "BHSD"}
            q = numbers(1, group * kv_heads, queries, dim)
            inputs = [q, *(numbers(1, kv_heads, keys, dim) for _ in "kv"), None, None, None]
            if op == "attention_backward":
                inputs = [numbers(*q.shape), *inputs[:3], *forward(attrs, inputs), None]
        elif op == "merge_attention":
            shape, parts = (rng.choice((1, 3)), rng.choice(FEWER), extent()), rng.choice((2, 3, 4))
            pairs = ((numbers(*shape), numbers(*shape[:2], scale=8.0)) for _ in range(parts))
            inputs = [values for pair in pairs for values in pair]
            inputs += [None] * (len(OPS[op].inputs) - len(inputs))
        elif op == "attention_varlen":
            group, kv_heads, dim = rng.choice(((1, 2, rng.choice(dims)), (4, 1, dims[0]), (2, 2, dims[0])))
            counts = [[rng.choice((0, *FEWER)) for _ in range(2)] for _ in "qk"]
            is_causal = bool(number % 2)
            alignment = rng.choice(kernel["causal_alignments"]) if is_causal else "top_left"
            attrs = {"is_causal": is_causal, "scale": sign * dim**-0.5, "causal_alignment": alignment}
            q = numbers(sum(counts[0]), group * kv_heads, dim)
            ends = (Values((len(n) + 1,), list(itertools.accumulate(n, initial=0))) for n in counts)
            inputs = [q, *(numbers(sum(counts[1]), kv_heads, dim) for _ in "kv"), *ends]
        elif op == "paged_attention":
            group, kv_heads, dim = rng.choice((1, 2, 4)), rng.choice((1, 2)), rng.choice(dims)
            page = kernel.get("page_size_multiple", rng.choice((1, 8, 16)))
            lengths = [rng.randrange(2 * page + 1) for _ in range(rng.randrange(1, 3))]
            blocks = list(range(2 * len(lengths)))
            rng.shuffle(blocks)
            attrs = {"scale": sign * dim**-0.5}
            caches = (numbers(len(blocks), page, kv_heads, dim) for _ in "kv")
            where = (Values((len(lengths), 2), blocks), Values((len(lengths),), lengths))
            inputs = [numbers(len(lengths), group * kv_heads, dim), *caches, *where, None, None]
        elif op == "mla_decode":
            heads, latent, rope, page = (
                rng.choice((1, 5, 16)),
                rng.choice(dims),
                rng.choice((8, 16)),
                rng.choice((1, 8)),
            )
            lengths, attrs = [rng.randrange(4 * page + 1) for _ in range(3)], {"scale": sign * latent**-0.5}
            tables = Values((3, 4), rng.sample(range(12), 12))
            queries = [numbers(3, heads, wide) for wide in (latent, rope)]
            inputs = [*queries, *(numbers(12, page, wide) for wide in (latent, rope)), tables, Values((3,), lengths)]
        elif op in ("attention_varlen_forward", "paged_attention_forward"):
            group, kv_heads, dim = rng.choice((1, 2, 4)), rng.choice((1, 2)), rng.choice(dims[:3])
            queries, keys = ([rng.choice((0, *FEWER[:8])) for _ in range(2)] for _ in "qk")
            attrs = {"is_causal": bool(number % 2), "scale": sign * dim**-0.5}
            options: tuple[dict[str, Any], ...] = ({}, {"window_left": 3}, {"softcap": 2.0})
            attrs |= options[number % 3]
            q = numbers(sum(queries), group * kv_heads, dim)
            ends = [Values((3,), list(itertools.accumulate(n, initial=0))) for n in (queries, keys)]
            beside = [numbers(q.shape[1]) if number % 4 == 1 else None, None]
            if op == "attention_varlen_forward":
                attrs["causal_alignment"] = (
                    "bottom_right" if attrs["is_causal"] or "window_left" in attrs else "top_left"
                )
                inputs = [q, *(numbers(sum(keys), kv_heads, dim) for _ in "kv"), *ends, *beside]
            else:
                caches = (numbers(16, 8, kv_heads, dim) for _ in "kv")
                tables = Values((2, 8), rng.sample(range(16), 16))
                inputs = [q, *caches, tables, Values((2,), keys), ends[0], *beside, None, None]
        elif op == "append_kv":
            heads, dim, page, blocks, tokens = (rng.choice(FEWER) for _ in range(5))
            slots = rng.sample(range(-3, blocks * page), min(tokens, blocks * page))
            rows = (numbers(len(slots), heads, width) for width in (dim, extent()))
            key, value = rows
            caches = (numbers(blocks, page, heads, tensor.shape[2]) for tensor in (key, value))
            inputs = [key, value, *caches, Values((len(slots),), slots), None, None]
        elif op in ("gather_kv", "copy_kv_blocks"):
            heads, page, blocks = (rng.choice(FEWER[:10]) for _ in range(3))
            caches = (numbers(blocks, page, heads, rng.choice(FEWER)) for _ in "kv")
            moved = rng.sample(range(-2, blocks), blocks)
            places = [moved[: blocks // 2], moved[blocks // 2 :][: blocks // 2]]
            if op == "gather_kv":
                places = [[rng.randrange(-2, blocks * page) for _ in range(5)]]
            inputs = [*caches, *(Values((len(one),), one) for one in places)]
            inputs += [None] * (len(OPS[op].inputs) - len(inputs))
        elif op in ("rope", "rope_qk"):
            batch, sequence, heads, dim = rng.choice((1, 2)), rng.choice(FEWER), rng.choice((1, 3)), rng.choice(dims)
            pairs = rng.choice([part for part in (dim // 2, dim // 4) if 2 * part % step == 0])
            attrs = {"interleaved": rng.choice((kernel.get("attrs") or {}).get("interleaved", [False, True]))}
            cos = numbers(rng.choice((1, batch)), sequence, pairs)
            inputs = [numbers(batch, sequence, heads, dim), cos, numbers(*cos.shape)]
            if op == "rope_qk":
                inputs.insert(1, numbers(batch, sequence, rng.choice((1, 2)), dim))
        elif op == "dynamic_quantize":
            made = kernel["attrs"]["format"]
            kind = made[number % len(made)]
            block = {"mxfp4": 32, "nvfp4": 16}.get(kind)
            attrs = {"format": kind, "groups": 3 if block else rng.choice((0, 1, 3)), "symmetric": kind != "uint8"}
            inputs = [numbers(rng.choice(FEWER), 3 * (block or rng.choice(FEWER)))]
        elif op == "int_matmul":
            m, k, n = (extent() for _ in range(3))
            inputs = [numbers(m, k), numbers(k, n), None, None]
        elif op == "scaled_linear":
            m, k, n = (extent() for _ in range(3))
            attrs = {"dtype": kernel["attrs"]["dtype"][-1], "weight_format": ""}
            scales = [Values((rows, 1), [2.0 ** -rng.randrange(4, 9) for _ in range(rows)]) for rows in (n, m)]
            inputs = [numbers(m, k), numbers(n, k), *scales, None, None, None]
        elif op in ("quantize", "dequantize"):
            rows, groups, each = rng.choice(FEWER), rng.choice((1, 4)), rng.choice(FEWER[1:])
            made = kernel["attrs"]["dtype"]
            attrs = {"dtype": made[number % len(made)]}
            steps = [2.0 ** rng.randrange(-9, 3) for _ in range(rows * groups)]
            inputs = [numbers(rows, groups * each * 2), Values((rows, groups), steps), None]
        elif op == "matmul":
            m, k, n = extent(), extent(), extent()
            inputs = [numbers(2, m, k), numbers(2, k, n)]
        elif op == "addmm":
            m, k, n = extent(), extent(), extent()
            attrs = {"beta": (1.0, 0.5, 0.0)[number % 3], "alpha": (1.0, -2.0)[number % 2]}
            inputs = [numbers(rng.choice((1, m)), rng.choice((1, n))), numbers(m, k), numbers(k, n)]
        elif op == "gated_mlp":
            rows, k, hidden, n = (extent() for _ in range(4))
            known = kernel["attrs"]["activation"]
            attrs = {"activation": known[number % len(known)]}
            shapes = ((rows, k), (2 * hidden, k), (n, hidden))
            inputs = [numbers(*shape, scale=1 / 16) for shape in shapes]
        elif op in random_experts.OPS:
            inputs, attrs = random_experts.random_call(op, rng, numbers, number)
        elif op == "linear":
            k, n, known = extent(), extent(), kernel["attrs"]["activation"]
            attrs = {"activation": known[number % len(known)]}
            inputs = [numbers(extent(), k), numbers(n, k), numbers(n) if number // len(known) % 2 else None]
        elif op in ("group_norm", "instance_norm", "batch_norm"):
            groups = rng.choice((1, 2, 8))
            channels = groups * rng.choice((1, 3, 4))
            attrs = {"eps": 1e-5, **({"num_groups": groups} if op == "group_norm" else {})}
            params = [numbers(channels) if number % 2 else None for _ in "wb"]
            if op == "batch_norm":
                params = [numbers(channels), Values((channels,), [0.25 + n / 8 for n in range(channels)]), *params]
            inputs = [numbers(rng.choice((1, 3)), channels, extent()), *params]
        elif op in ("add", "mul", "where"):
            shape = (rng.choice((1, 3, 40)), extent() * rng.choice((1, 3, 8)))
            inputs = [numbers(*[rng.choice((1, n)) for n in shape]) for _ in range(2)]
            if op == "where":
                inputs = [Values(shape, [rng.random() < 0.5 for _ in range(math.prod(shape))]), *inputs]
        elif op == "clamp":
            attrs = {"min": rng.choice((None, -0.5)), "max": 0.75}
            inputs = [numbers(rng.choice((1, 3, 40)), extent())]
        elif op == "cat":
            attrs, rows = {"dim": 1}, rng.choice((1, 3, 40))
            inputs = [numbers(rows, extent()) for _ in range(rng.randint(1, 8))]
            inputs += [None] * (len(OPS[op].inputs) - len(inputs))
        elif op == "cast":
            attrs = {"dtype": rng.choice(("float16", "bfloat16", "float32", "int32"))}
            inputs = [numbers(rng.choice((1, 3, 40)), extent())]
        elif op in vision_calls.OPS:
            given, attrs = vision_calls.random_call(op, rng)
            inputs = [shape and numbers(*shape) for shape in given]
        elif op in INDICES and OPS[op].inputs[0] in ("logits", "target_probs", "draft_ids"):
            inputs = sampling_inputs(op, rng, rng.choice((1, 3, 8)), extent() * rng.choice((1, 3, 30)))
        elif op == "cross_entropy":
            classes = extent()
            attrs = {
                "ignore_index": 1,
                "reduction": ("none", "mean", "sum")[number % 3],
                "label_smoothing": rng.choice((0.0, 0.25)),
            }
            inputs = [numbers(9, classes), Values((9,), [rng.randrange(classes) for _ in range(9)]), None]
        elif op == "embedding":
            inputs = [Values((7,), [rng.randrange(5) for _ in range(7)]), numbers(5, extent())]
        else:
            shape = [rng.choice((1, 3, 40)), extent() * rng.choice((1, 3, 8))][-max(kernel.get("min_ndim", 0), 2) :]
            given = {"layer_norm": 2}.get(op, 1 if "_norm" in op else 0)
            attrs = {"dim": 1, "dtype": ""} if op.endswith("softmax") else {"ndim": 1, "eps": 1e-5} if given else {}
            if op in ("gelu", "geglu"):
                attrs = {"approximate": ("none", "tanh")[number % 2]}
            inputs = [numbers(*shape), *(numbers(shape[-1]) for _ in range(given))]
            if op in ("swiglu", *GATED):
                inputs = [*inputs, numbers(*shape)]
            if op.endswith("_backward") or op == "add_rms_norm":
                inputs = [numbers(*shape), *inputs]
        indices = INDICES.get(op, {})
        kinds = tuple(indices.get(name, "") for name in OPS[op].inputs)
        shapes = [list(values.shape) for values in inputs if values is not None]
        # Whose bounds these are; a weight of x's dtype
        families = ("float",) if op == "clamp" else ("int", "uint") if op == "scaled_linear" else ()
        made = Problem(op, f"random {number}: {shapes} {attrs}", attrs, tuple(inputs), kinds, families)
        yield scaled(made, kernel, number, rng) if "k_scale" in kernel.get("required_args", ()) else made


def scaled(problem: Problem, kernel: Claims, number: int, rng: random.Random) -> Problem:
    """With caches of 8 bits, and a scale for all heads or for each: powers of two, which nothing is rounded by."""
    dtypes = kernel["supports_kv_cache_dtypes"]
    dtype = dtypes[number % len(dtypes)]
    names = OPS[problem.op].inputs
    inputs, kinds = dict(zip(names, problem.inputs, strict=True)), dict(zip(names, problem.kinds, strict=True))
    for name in ("k", "v"):
        cache = inputs[f"{name}_cache"]
        assert cache is not None
        wide = [nearest(32 * x, dtype) if dtype in MAGNITUDES else round(32 * x) for x in cache.flat]
        steps = [2.0 ** -rng.randrange(4, 7) for _ in range(rng.choice((1, cache.shape[2])))]
        inputs |= {f"{name}_cache": Values(cache.shape, wide), f"{name}_scale": Values((len(steps),), steps)}
        kinds |= {f"{name}_cache": dtype, f"{name}_scale": "float32"}
    attrs, families = problem.attrs, SCALED_DTYPES
    if problem.op == "gather_kv":  # whose data are the caches
        attrs, families = {**attrs, "dtype": rng.choice(kernel["attrs"]["dtype"])}, (dtype,)
    title = f"{problem.name}, {dtype}"
    return Problem(problem.op, title, attrs, tuple(inputs.values()), tuple(kinds.values()), families)


def sampling_inputs(op: str, rng: random.Random, rows: int, size: int) -> list[Values | None]:
    """Settings of each row; of the ids of a tree, sixteenths, as numbers of integers are."""

    def of(shape: tuple[int, ...], low: int, high: int, step: float = 1) -> Values:
        return Values(shape, [rng.randrange(low, high) * step for _ in range(math.prod(shape))])

    if op == "tree_accept":
        above = [rng.randrange(-1, max(n % 40, 1)) if n % 40 else -1 for n in range(40 * rows)]
        drafts, wanted = (of((rows, 40), -1, 3, 1 / 16) for _ in range(2))
        return [drafts, Values((rows, 40), above), wanted]
    seeds = [of((rng.choice((1, rows)),), -(2**63), 2**63) for _ in range(2)]
    if op == "speculative_verify":
        target, draft = (of((rows, steps, size), 0, 16, 1 / 16) for steps in (4, 3))
        return [target, of((rows, 3), -1, size), rng.choice((draft, None)), *seeds]
    logits, settings = of((rows, size), -48, 48, 1 / 8), [of((rows,), 1, 16, 1 / 16) for _ in range(4)]
    if op == "penalize_logits":
        return [logits, of((rows, 30), -2, size), *settings[:3]]
    settings[1] = of((rows,), 0, 2 * size)
    kept = [rng.choice((one, None)) for one in settings]
    return [logits, *seeds, *kept] if op == "sample" else [logits, *kept]


def bind(bench: GpuBench, loaded: Loaded, op: str, kernel: Claims, case: Case) -> tuple[Bound, list[Block]]:
    inputs, outputs = placed(bench, op, case)
    kernel_id = kernel["kernel_id"]
    call = Call(op, kernel_id, case.inputs, case.outputs, case.attrs)
    return loaded.kernels[kernel_id](call, inputs, outputs), outputs


def judged(bench: GpuBench, op: str, outputs: Sequence[Block], case: Case) -> str:
    """What is wrong with the results; "" when nothing is."""
    for block, expected in zip(outputs, case.expected, strict=True):
        spec, memory = block.spec, bench.content(block)
        data = gather(memory, spec)
        untouched = bytearray([FILL]) * spec.span_bytes
        scatter(data, spec, memoryview(untouched))
        if untouched != memory:
            return "wrote between the elements of its output"
        error = difference(unpack(data, spec.dtype), expected, spec.dtype)
        first = case.inputs[0]
        allowed = tolerance(first.dtype if first and op in ATTENTION_OPS else spec.dtype, op, spec.dtype)
        if not error <= allowed:
            return f"error {error:.3g}, allowed {allowed:g}"
    return ""


if __name__ == "__main__":
    answer = os.fdopen(os.dup(1), "w")
    boot.point_stdout_at_stderr()  # libraries print there
    print(json.dumps(check(sys.argv[1], Path(sys.argv[2]))), file=answer)
