"""`lz explain` and `lz run`: a call written as words, random inputs for it, and what came of it."""

from __future__ import annotations

import collections
import inspect
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

import layerzero as lz
from layerzero.client.arrays.recognition import CPU
from layerzero.client.cli.output import err, note, out, print_json
from layerzero.client.connection import start
from layerzero.client.connection.report import SelectionReport
from layerzero.client.facade import api
from layerzero.client.facade.api import function_of
from layerzero.client.gpu.arrays import named_device
from layerzero.client.gpu.own_arrays import GpuArray
from layerzero.client.tools.inputs import random_inputs, tensor_names
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.names import unknown_name
from layerzero.ipc.vocabulary.numerics import unpack
from layerzero.ipc.vocabulary.ops import PUBLIC_OPS
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, TensorSpec

ALIASES = {"f16": "float16", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "f32": "float32"}
ALIASES |= {"fp32": "float32", "f64": "float64", "fp64": "float64", "i32": "int32", "i64": "int64", "u8": "uint8"}
SHOWN = 8  # elements of a result
COLD_US = 100_000.0  # no warm dispatch takes that long
CALL_OPTIONS = frozenset({"out", "backend", "timeout_s"})
TEXT_OPS = frozenset({"tokenize", "detokenize"})


# --- from words to a call


def find_op(name: str) -> Callable[..., Any]:
    """The public function of an op. Raises InvalidArgument with the nearest name."""
    if name in PUBLIC_OPS:
        return function_of(name)
    raise InvalidArgument(unknown_name("op", name, PUBLIC_OPS))


def parse_spec(text: str) -> TensorSpec | None:
    """`2x3:float16`, `:int64` for a scalar, `none` for an argument left out. Raises InvalidArgument."""
    if text == "none":
        return None
    shape, _, dtype = text.partition(":")
    dtype = ALIASES.get(dtype, dtype)
    extents = shape.split("x") if shape else []
    if dtype not in ITEMSIZE or not all(extent.isdecimal() for extent in extents):
        form = f"argument {text!r} is not SHAPE:DTYPE, such as 1x8x128x64:float16, or none"
        raise InvalidArgument(form if dtype in ITEMSIZE else f"{form}: {unknown_name('dtype', dtype, ITEMSIZE)}")
    contiguous = TensorSpec.contiguous(dtype, tuple(int(extent) for extent in extents))
    return TensorSpec.from_wire(contiguous.to_wire())  # for its checks


def parse_params(function: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """`name=value` words as keyword arguments; values are JSON, or text when they are not. Raises InvalidArgument."""
    op, known = function.__name__, scalar_names(function)
    params: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise InvalidArgument(f"--param {word!r} is not name=value, such as is_causal=true")
        if name not in known:
            raise InvalidArgument(f"{op}: {unknown_name('parameter', name, known)}")
        try:
            params[name] = json.loads(text)
        except ValueError:
            params[name] = text
    for name in known:
        if name not in params and inspect.signature(function).parameters[name].default is inspect.Parameter.empty:
            raise InvalidArgument(f"{op} needs {name}; add --param {name}=VALUE")
    return params


def scalar_names(function: Callable[..., Any]) -> list[str]:
    """The parameters of an op that are plain values."""
    parameters = inspect.signature(function).parameters
    left = {*CALL_OPTIONS, *tensor_names(function), *(("text", "ids") if function.__name__ in TEXT_OPS else ())}
    return [name for name in parameters if name not in left]


def parse_arrays(function: Callable[..., Any], words: Sequence[str]) -> dict[str, TensorSpec | None]:
    """The tensor arguments by name. Raises InvalidArgument when there are too few or too many."""
    names, parameters = tensor_names(function), inspect.signature(function).parameters
    needed = sum(parameters[name].default is inspect.Parameter.empty for name in names)
    if not needed <= len(words) <= len(names):
        count = str(needed) if needed == len(names) else f"{needed} to {len(names)}"
        noun = "array" if count == "1" else "arrays"
        wanted = f"{count} {noun} as SHAPE:DTYPE ({', '.join(names)})" if names else "no arrays"
        raise InvalidArgument(f"{function.__name__} takes {wanted}, got {len(words)}")
    return {name: parse_spec(word) for name, word in zip(names, words, strict=False)}


def parse_texts(function: Callable[..., Any], words: Sequence[str], tokenizer: Path | None) -> dict[str, Any]:
    """The arguments of tokenize and detokenize."""
    op = function.__name__
    if tokenizer is None or not words:
        what = "a text" if op == "tokenize" else "token ids"
        raise InvalidArgument(f"{op} needs {what} and --tokenizer PATH, the path of a tokenizer.json")
    if op == "tokenize":
        return {"text": words[0] if len(words) == 1 else list(words), "tokenizer": str(tokenizer)}
    if not all(word.isdecimal() for word in words):
        raise InvalidArgument(f"detokenize takes token ids, such as 101 7592 102; got {' '.join(words)!r}")
    return {"ids": [int(word) for word in words], "tokenizer": str(tokenizer)}


# --- explain


class Options(NamedTuple):
    """What `lz explain` and `lz run` share. `device`: as lz.explain takes it; None for the CPU."""

    backend: str | None = None
    device: str | None = None
    tokenizer: Path | None = None
    shows_all: bool = False
    as_json: bool = False


def explain(op: str, words: Sequence[str], params: Sequence[str], options: Options) -> None:
    """Print which kernel would serve the call, and why not the others; with `shows_all` of every kernel."""
    function = find_op(op)
    scalars = parse_params(function, params)
    arguments = parse_texts(function, words, options.tokenizer) if op in TEXT_OPS else parse_arrays(function, words)
    named_device(op, (), options.device)
    with Connected():
        report = lz.explain(
            op, **arguments, **scalars, backend=options.backend, device=options.device, verbose=options.shows_all
        )
    if options.as_json:
        print_json(report.to_dict())
    else:
        out().print(report)


class Connected:
    """lz.connect() with a note when that started a broker, and lz.disconnect()."""

    def __enter__(self) -> None:
        if start.secret_key() is None and start.broker_pid(start.endpoints()) is None:
            note("no broker runs: one is started for this command only; lz up starts one that stays")
        lz.connect()

    def __exit__(self, *exc: object) -> None:
        lz.disconnect()


# --- run


def run(
    op: str,
    words: Sequence[str],
    params: Sequence[str],
    options: Options,
    *,
    timeout_s: float | None = None,
    repeat: int = 1,
    seed: int = 0,
) -> None:
    """Run the call `repeat` times; print its result, times and report."""
    function = find_op(op)
    scalars = parse_params(function, params)
    device = named_device(op, (), options.device)
    if op in TEXT_OPS:
        arguments = parse_texts(function, words, options.tokenizer)
    else:
        arguments = random_inputs(op, parse_arrays(function, words), seed, device=device)
    reports: list[SelectionReport] = []

    def call() -> Any:
        given = {**arguments, **scalars, "backend": options.backend, "timeout_s": timeout_s}
        if device == CPU:
            value, report = function(**given), lz.last_report()
        else:
            value, report = api.run_apart(function, **given)
        reports.append(replace(report, is_verbose=options.shows_all))
        return value

    with Connected():
        with err().status(f"{op} ..."):  # for the first call only: its thread would disturb the times of the others
            result = call()
        for _ in range(repeat - 1):
            result = call()
        if isinstance(result, GpuArray):
            result = _on_host(result)
    if options.as_json:
        print_json({"result": summary(result), "times": times(reports), "report": reports[-1].to_dict()})
        return
    out().print(Text("\n".join(describe(result))), soft_wrap=True)
    out().print()
    out().print(reports[-1])
    if repeat > 1:
        out().print(Text("\n".join(describe_times(reports))), soft_wrap=True)
    elif (reports[0].elapsed_us or 0) - (reports[0].kernel_us or 0) > COLD_US:
        note("the first call waits until the worker has started; --repeat 10 shows what later ones cost")


def _on_host(array: GpuArray) -> Any:
    """Its numbers in NumPy: in their dtype, or in float32 where NumPy has none such."""
    import numpy as np

    dtype, data = array.spec.dtype, array.load()
    known = dtype if hasattr(np, dtype) or dtype == "bool" else "float32"
    values = np.frombuffer(data, known) if known == dtype else np.array(unpack(data, dtype), known)
    return values.reshape(array.spec.shape)


def summary(result: Any) -> Any:
    """A result in plain values: an array's shape, dtype, range and first elements; texts and ids as they are."""
    if isinstance(result, tuple):
        return {"ids": result[0], "offsets": result[1]}
    if not hasattr(result, "dtype"):
        return result
    numbers = result.astype("float64").ravel()
    finite = numbers[[math.isfinite(x) for x in numbers]] if numbers.size else numbers
    return {
        "shape": list(result.shape),
        "dtype": str(result.dtype),
        "min": float(finite.min()) if finite.size else None,
        "max": float(finite.max()) if finite.size else None,
        "mean": float(finite.mean()) if finite.size else None,
        "not_finite": int(numbers.size - finite.size),
        "first": [x if math.isfinite(x) else str(x) for x in numbers[:SHOWN].tolist()],
    }


def describe(result: Any) -> list[str]:
    """The result for a person."""
    s = summary(result)
    if not hasattr(result, "dtype"):
        return [f"result: {json.dumps(s, ensure_ascii=False)}"]
    if s["min"] is None:
        return [f"result: {s['dtype']}{s['shape']}" + (", nothing finite" if s["not_finite"] else "")]
    odd = f"{s['not_finite']} not finite" if s["not_finite"] else "all finite"
    first = "  ".join(x if isinstance(x, str) else f"{x:.4g}" for x in s["first"])
    more = " ..." if math.prod(s["shape"]) > SHOWN else ""
    return [
        f"result: {s['dtype']}{s['shape']}  min {s['min']:.4g}  mean {s['mean']:.4g}  max {s['max']:.4g}  {odd}",
        f"        {first}{more}",
    ]


def times(reports: Sequence[SelectionReport]) -> dict[str, Any]:
    """Microseconds of all runs, and who served how many."""
    return {
        "runs": len(reports),
        "elapsed_us": [round(r.elapsed_us, 1) for r in reports if r.elapsed_us is not None],
        "kernel_us": [round(r.kernel_us, 1) for r in reports if r.kernel_us],
        "served": dict(collections.Counter(r.kernel_id for r in reports)),
    }


def describe_times(reports: Sequence[SelectionReport]) -> list[str]:
    measured = times(reports)
    served = ", ".join(f"{kernel} {count}" for kernel, count in measured["served"].items())
    lines = [f"{len(reports)} runs, served by {served}"]
    for name, label in (("elapsed_us", "total"), ("kernel_us", "kernel")):
        values = measured[name]
        if values:
            lines.append(
                f"  {label:<6}  first {values[0]:,.0f} us  min {min(values):,.0f} us  "
                f"median {statistics.median(values):,.0f} us  max {max(values):,.0f} us"
            )
    return lines
