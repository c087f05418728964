"""`python -m layerzero.workers.probe PROVIDER DESCRIPTOR [PARENT_PID]`: does this environment import and compute right?

Run in a throw-away process by envs/probe.py; ends with its parent when that is given. Prints one JSON line:
{"ok", "versions", "kernels": {id: {"ok", "max_error", "tolerance", "elapsed_us", "detail"}}, "error": null | {"kind",
"message", "missing", "traceback"}}.
Kinds: import (something is missing), abi, version, load (the provider raised anything else), numeric, kernel (a kernel
raised), descriptor. Cases with known results are in vectors.json, made by tests/make_vectors.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import statistics
import struct
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerzero.ipc import memory
from layerzero.ipc.tensors import TensorSpec
from layerzero.workers import boot
from layerzero.workers.provider import Bind, Block, Call, Loaded

VECTORS = Path(__file__).with_name("vectors.json")
ARENA_BYTES = 1 << 20  # more than any case takes
TIMED_RUNS = 5
FILL = 0xA5  # outputs hold this before a run, so that what a kernel leaves out does not look right
_CODES = {"bool": "?", "uint8": "B", "int32": "i", "int64": "q", "float16": "e", "float32": "f", "float64": "d"}

# (kind, pattern over "ExceptionType: message"); the first that matches counts, its group is what is missing.
_CAUSES = (
    ("abi", r"undefined symbol: ([\w@.]+)"),
    (
        "abi",
        r"compiled using NumPy 1|numpy\.dtype size changed|numpy\.core\.(?:multiarray|umath) failed"
        r"|_ARRAY_API not found",
    ),
    ("abi", r"ABI version|version `(\S+)' not found"),
    ("version", r"only compatible with|needs to be compatible with|but PyTorch .{0,40} is found|requires torch"),
    ("version", r"Descriptors cannot (?:be )?created? directly|Protobuf Gencode/Runtime|incompatible .{0,20}version"),
    ("import", r"(\S+?): cannot open shared object file"),
    ("import", r"No module named '([^']+)'"),
    ("import", r"cannot import name '([^']+)'"),
)


@dataclass(frozen=True)
class KernelVerdict:
    """`max_error` and `tolerance` are those of the dtype that came closest to failing; 0 for exact ops."""

    ok: bool
    max_error: float
    tolerance: float
    elapsed_us: float
    detail: str | None


def main(argv: Sequence[str]) -> int:
    provider, descriptor, *parent = argv
    if parent:
        boot.die_with_parent(int(parent[0]))
    answer = os.fdopen(os.dup(1), "w")
    boot.point_stdout_at_stderr()
    print(json.dumps(probe(provider, Path(descriptor))), file=answer, flush=True)
    return 0


def probe(provider: str, descriptor: Path) -> dict[str, Any]:
    """Load the provider and run every kernel of the descriptor. The result is described at the top."""
    verdict: dict[str, Any] = {"ok": False, "versions": {}, "kernels": {}, "error": None}
    try:
        loaded = boot.import_provider(provider).load()
    except Exception as exc:
        return {**verdict, "error": classify(exc)}
    verdict["versions"] = dict(loaded.versions)
    try:
        claims = json.loads(descriptor.read_text(encoding="utf-8"))["ops"]
        kernels = [(op, kernel) for op, listed in claims.items() for kernel in listed]
        absent = [kernel["kernel_id"] for _, kernel in kernels if kernel["kernel_id"] not in loaded.kernels]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        return {**verdict, "error": _error("descriptor", f"{descriptor}: {exc!r}", exc)}
    if absent:
        message = f"the descriptor lists {', '.join(absent)}; the provider has {', '.join(sorted(loaded.kernels))}"
        return {**verdict, "error": _error("descriptor", message, missing=absent[0])}
    vectors = json.loads(VECTORS.read_text(encoding="utf-8"))
    bench = _Bench()
    for op, kernel in kernels:
        try:
            checked = _check(bench, loaded, op, kernel, vectors)
        except Exception as exc:
            error = classify(exc)
            kind = "kernel" if error["kind"] == "load" else error["kind"]
            verdict["error"] = verdict["error"] or {
                **error,
                "kind": kind,
                "message": f"{kernel['kernel_id']}: {error['message']}",
            }
            checked = KernelVerdict(False, 0.0, 0.0, 0.0, f"raised {error['message']}")
        verdict["kernels"][kernel["kernel_id"]] = asdict(checked)
        if not checked.ok and verdict["error"] is None:
            verdict["error"] = _error("numeric", f"{kernel['kernel_id']}: {checked.detail}")
    return {**verdict, "ok": verdict["error"] is None}


def classify(exc: BaseException) -> dict[str, Any]:
    """The error of a provider that did not load: what kind, and which module, library or symbol is missing."""
    chain: list[BaseException] = []
    link: BaseException | None = exc
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for one in chain:
        text = f"{type(one).__name__}: {one}"
        for kind, pattern in _CAUSES:
            if found := re.search(pattern, text):
                return _error(kind, text, exc, missing=found.group(1) if found.re.groups else None)
    kind = "import" if isinstance(exc, ImportError) else "load"
    return _error(kind, f"{type(exc).__name__}: {exc}", exc)


def _error(kind: str, message: str, exc: BaseException | None = None, missing: str | None = None) -> dict[str, Any]:
    text = "".join(traceback.format_exception(exc)) if exc is not None else ""
    return {"kind": kind, "message": message[:2000], "missing": missing, "traceback": text[-4000:]}


class _Bench:
    """Memory as in a worker: one memfd, seen through a read-only map by inputs and a writable one by outputs."""

    def __init__(self) -> None:
        fd = memory.create_memfd("lz-probe", ARENA_BYTES)
        self._read = memoryview(memory.map_fd(fd, ARENA_BYTES, writable=False))
        self._write = memoryview(memory.map_fd(fd, ARENA_BYTES, writable=True))
        os.close(fd)
        self._end = 0

    def clear(self) -> None:
        self._end = 0

    def input(self, spec: TensorSpec, data: bytes) -> Block:
        place = self._place(spec)
        self._write[place] = data
        return Block(self._read[place], spec)

    def output(self, spec: TensorSpec) -> Block:
        place = self._place(spec)
        self._write[place] = bytes([FILL]) * spec.span_bytes
        return Block(self._write[place], spec)

    def _place(self, spec: TensorSpec) -> slice:
        start = -(-self._end // memory.ALIGNMENT) * memory.ALIGNMENT
        self._end = start + spec.span_bytes
        if self._end > ARENA_BYTES:
            raise ValueError(f"a case needs more than {ARENA_BYTES} bytes")
        return slice(start, self._end)


def _check(
    bench: _Bench, loaded: Loaded, op: str, kernel: Mapping[str, Any], vectors: Mapping[str, Any]
) -> KernelVerdict:
    """Run one kernel on every case of its op that its descriptor admits, in each of its dtypes."""
    cases = [case for case in vectors["cases"] if case["op"] == op and is_admitted(case, kernel)]
    claimed = kernel.get("dtypes")
    dtypes = [dtype for dtype in claimed if dtype in vectors["tolerance"]] if claimed else ["float32"]
    if not cases or not dtypes:
        return KernelVerdict(False, 0.0, 0.0, 0.0, f"no case of {VECTORS.name} fits the descriptor")
    worst = KernelVerdict(True, 0.0, 0.0, 0.0, None)
    elapsed_us = 0.0
    for dtype in dtypes:
        tolerance = float(vectors["tolerance"][dtype]) if claimed else 0.0
        for case in cases:
            max_error, us = _run(bench, loaded.kernels[kernel["kernel_id"]], kernel["kernel_id"], case, dtype)
            elapsed_us = elapsed_us or us
            if not max_error <= tolerance:
                detail = f"{case['name']} in {dtype}: error {max_error:.3g}, allowed {tolerance:g}"
                return KernelVerdict(False, _finite(max_error), tolerance, elapsed_us, detail)
            if max_error * (worst.tolerance or 1.0) >= worst.max_error * (tolerance or 1.0):
                worst = KernelVerdict(True, max_error, tolerance, 0.0, None)
    return KernelVerdict(True, worst.max_error, worst.tolerance, elapsed_us, None)


def is_admitted(case: Mapping[str, Any], kernel: Mapping[str, Any]) -> bool:
    """Whether a descriptor claims this case: all the case needs, and no required argument that it lacks."""
    for name, needed in case["needs"].items():
        claimed = kernel.get(name)
        if not (needed in claimed if isinstance(claimed, (list, tuple)) else claimed == needed):
            if name == "optional_args" and needed in kernel.get("required_args", ()):
                continue
            return False
    for name, allowed in (kernel.get("attrs") or {}).items():
        if name in case["attrs"] and case["attrs"][name] not in allowed:
            return False
    return all(name in case["given"] for name in kernel.get("required_args", ()))


def _run(bench: _Bench, bind: Bind, kernel_id: str, case: Mapping[str, Any], dtype: str) -> tuple[float, float]:
    """(error, median microseconds) of one case in one dtype."""
    bench.clear()
    inputs = [None if tensor is None else bench.input(*encode(tensor, dtype)) for tensor in case["inputs"]]
    expected = case["outputs"]
    outputs = [
        bench.output(TensorSpec.contiguous(_dtype(tensor, dtype), tuple(tensor["shape"]))) for tensor in expected
    ]
    specs = tuple(None if block is None else block.spec for block in inputs)
    call = Call(case["op"], kernel_id, specs, tuple(block.spec for block in outputs), attrs_of(case))
    bound = bind(call, inputs, outputs)
    result = bound()
    if type(result) is not type(case.get("result")) or result != case.get("result"):
        raise ValueError(f"{case['name']}: the kernel returned {result!r:.200}, expected {case.get('result')!r}")
    error = max(
        (_difference(decode(block), tensor) for block, tensor in zip(outputs, expected, strict=True)), default=0.0
    )
    runs_us = []
    for _ in range(TIMED_RUNS):
        start = time.perf_counter_ns()
        bound()
        runs_us.append((time.perf_counter_ns() - start) / 1000)
    return error, round(statistics.median(runs_us), 3)


def attrs_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """A case's attributes; the digest of its tokenizer is computed here, not stored."""
    if "tokenizer_format" not in case["attrs"]:
        return dict(case["attrs"])
    return {**case["attrs"], "tokenizer_digest": hashlib.sha256(case["inputs"][0]["text"].encode()).hexdigest()}


def _dtype(tensor: Mapping[str, Any], dtype: str) -> str:
    return dtype if tensor["dtype"] == "float" else str(tensor["dtype"])


def encode(tensor: Mapping[str, Any], dtype: str) -> tuple[TensorSpec, bytes]:
    """A stored tensor as bytes; values of dtype "float" take `dtype`, in which they are exact."""
    name = _dtype(tensor, dtype)
    if "text" in tensor:
        data = tensor["text"].encode()
        return TensorSpec.contiguous("uint8", (len(data),)), data
    values = tensor["values"]
    if tensor["dtype"] == "float":
        values = [float(value) for value in values]  # "-inf" is stored as text
    if name == "bfloat16":
        data = b"".join(struct.pack("<f", value)[2:] for value in values)
    else:
        data = struct.pack(f"<{len(values)}{_CODES[name]}", *values)
    return TensorSpec.contiguous(name, tuple(tensor["shape"])), data


def decode(block: Block) -> list[float]:
    """The values in a contiguous block."""
    data, dtype = bytes(block.memory), block.spec.dtype
    if dtype == "bfloat16":
        return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
    return list(struct.unpack(f"<{block.spec.numel}{_CODES[dtype]}", data))


def _difference(values: Sequence[float], tensor: Mapping[str, Any]) -> float:
    """Largest difference as a share of max(1, largest expected value); any difference of integers is infinite."""
    expected = list(tensor["text"].encode()) if "text" in tensor else tensor["values"]
    if tensor["dtype"] != "float":
        return 0.0 if list(values) == list(expected) else math.inf
    scale = max([1.0, *(abs(value) for value in expected)])
    differences = [abs(value - want) / scale for value, want in zip(values, expected, strict=True)]
    return math.inf if any(math.isnan(d) for d in differences) else max(differences, default=0.0)


def _finite(value: float) -> float:
    """JSON has no infinity."""
    return value if math.isfinite(value) else sys.float_info.max


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
