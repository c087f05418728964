"""Kernels of one backend lifted, and launched where its library is not. Two processes, by the first argument:

    lift PROVIDER DESCRIPTOR FOLDER      lifts a call of every kind and writes a specimen of each to FOLDER
    certified PROVIDER DESCRIPTOR FOLDER the same, of every class that a deterministic kernel is certified in
    launch FILE...                       launches specimens by the driver alone
    prove FILE...                        tries them as the broker has it done

All print a JSON object for each kind, in a line of its own. They import no library but the backend's.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.gpu.lifting_calls import Kind, certified, kinds

from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.lifting.form import Kernel
from layerzero.ipc.lifting.gpu_digest import GpuDigest
from layerzero.ipc.lifting.launch import LoadedCall
from layerzero.ipc.lifting.proof import prove_bytes
from layerzero.ipc.lifting.results import is_like
from layerzero.ipc.lifting.specimen import Specimen
from layerzero.ipc.lifting.trial import UNWRITTEN, named, pattern, write
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.workers import boot
from layerzero.workers.certify.claims import Claims
from layerzero.workers.gpu.lifting import modules
from layerzero.workers.gpu.lifting.lifter import Lifter, Request
from layerzero.workers.gpu.lifting.refusal import CannotLift

SEEDS = (1, 2)
PATTERNS = (0x00, 0xA5)  # of scratch and of parameters that nobody wrote
ROUNDS = 50


def lift(provider: str, descriptor: Path, folder: Path, calls: Callable[..., Iterator[Kind]]) -> None:
    watched = modules.watch()
    loaded = boot.import_provider(provider).load()
    say(kind="", cupti=watched.problem or "seen", versions=dict(loaded.versions))
    assert loaded.on_stream is not None
    driver = cuda.load()
    context = Context(driver, driver.gpus()[0].uuid)
    lifter = Lifter(loaded.on_stream, watched, loaded.versions)
    for op, kernels in json.loads(descriptor.read_text(encoding="utf-8"))["ops"].items():
        for kernel in kernels:
            for kind in calls(op, kernel):
                bind, repeats = loaded.kernels[kind.call.kernel_id], kernel.get("deterministic", False)
                request = Request.of(kind.call, bind, kind.alignments, SEEDS, repeats)
                start_s = time.perf_counter()
                said: dict[str, Any] = {"kind": kind.name}
                try:
                    specimen = lifter.lift(request, context, lambda free: free())
                    said |= described(specimen)
                    path = folder / re.sub(r"[^\w.+-]+", "_", kind.name)
                    path.write_bytes(specimen.pack())
                    said["file"] = str(path)
                except CannotLift as exc:
                    said |= {"reason": exc.reason.value, "detail": exc.detail}
                except Exception as exc:
                    said |= {"reason": "RAISED", "detail": f"{type(exc).__name__}: {exc}"[:500]}
                    traceback.print_exc()
                said["lift_ms"] = round((time.perf_counter() - start_s) * 1e3, 1)
                say(**said)


def graph_safe(op: str, kernel: Claims) -> Iterator[Kind]:
    return kinds(op, kernel) if kernel.get("is_cuda_graph_safe") else iter(())


def deterministic(op: str, kernel: Claims) -> Iterator[Kind]:
    return certified(op, kernel) if kernel.get("deterministic") else iter(())


def described(specimen: Specimen) -> dict[str, Any]:
    lifted = specimen.lifted
    launches = [step for step in lifted.steps if isinstance(step, Kernel)]
    return {
        "steps": len(lifted.steps),
        "kernels": len(launches),
        "names": [step.name[:60] for step in launches],
        "scratch": list(lifted.scratch),
        "code_bytes": sum(map(len, specimen.codes.values())),
        "patches": sum(len(step.patches) for step in launches),
        "padding": sum(span.nbytes for step in launches for span in step.padding),
    }


def prove(files: list[str]) -> None:
    driver = cuda.load()
    context = Context(driver, driver.gpus()[0].uuid)
    for file in files:
        verdict = prove_bytes(context, Path(file).read_bytes())
        said = "proved" if verdict.reason is None else f"{verdict.reason.value}: {verdict.detail}"
        say(file=file, verdict=said)


def launch(files: list[str]) -> None:
    driver = cuda.load()
    context = Context(driver, driver.gpus()[0].uuid)
    assert "torch" not in sys.modules
    with context:
        stream, digests = driver.create_stream(), GpuDigest(driver)
        for file in files:
            specimen = Specimen.unpack(Path(file).read_bytes())
            with ExitStack() as stack:
                say(file=file, **launched(driver, specimen, stream, digests, stack))


def launched(
    driver: cuda.Driver, specimen: Specimen, stream: int, digests: GpuDigest, stack: ExitStack
) -> dict[str, Any]:
    """What is wrong, with `verdict` "equal" when nothing is."""
    lifted = specimen.lifted
    start_s = time.perf_counter()
    loaded = {name: driver.load_module(code) for name, code in specimen.codes.items()}
    call = LoadedCall(driver, lifted, loaded)
    load_ms = round((time.perf_counter() - start_s) * 1e3, 1)

    def room(nbytes: int, alignment: int) -> int:
        base = driver.allocate(nbytes + (1 << 20))  # what runs over an end by a little hits nobody else
        stack.callback(driver.free, base)
        return base + 3 * 4096 + (alignment if alignment < 256 else 0)

    inputs = [
        0 if spec is None else room(spec.span_bytes, alignment)
        for spec, alignment in zip(lifted.inputs, lifted.alignments, strict=False)
    ]
    aliases = lifted.aliases()
    outputs = [
        inputs[aliases[n]] if n in aliases else room(spec.span_bytes, lifted.alignments[len(inputs) + n])
        for n, spec in enumerate(lifted.outputs)
    ]
    scratch = [room(nbytes, 256) for nbytes in lifted.scratch]
    specs = named(lifted.op, lifted.inputs)
    wrong = []
    for seed, wanted in specimen.trials.items():
        for filling in PATTERNS:
            for name, address in zip(OPS[lifted.op].inputs, inputs, strict=True):
                spec = specs[name]
                if spec is not None and spec.span_bytes:
                    write(driver, address, spec.span_bytes, pattern(lifted.op, name, specs, seed, lifted.attrs), stream)
            for n, (spec, address) in enumerate(zip(lifted.outputs, outputs, strict=True)):
                if n not in aliases:
                    write(driver, address, spec.span_bytes, UNWRITTEN, stream)
            for address, nbytes in zip(scratch, lifted.scratch, strict=True):
                write(driver, address, nbytes, bytes([filling]), stream)
            for again in range(2):
                call.launch(inputs, outputs, scratch, stream, padding=filling)
                driver.synchronize_stream(stream)
                for n, (spec, address) in enumerate(zip(lifted.outputs, outputs, strict=True)):
                    if not is_like(driver, address, spec, seed, wanted[n], stream, digests):
                        wrong.append(f"output {n} of seed {seed}, filled with {filling:#04x}, launch {again + 1}")
    start_s = time.perf_counter()
    for _ in range(ROUNDS):
        call.launch(inputs, outputs, scratch, stream)
    host_us = (time.perf_counter() - start_s) / ROUNDS * 1e6
    driver.synchronize_stream(stream)
    stream_us = (time.perf_counter() - start_s) / ROUNDS * 1e6
    for module in loaded.values():
        driver.unload_module(module)
    verdict = "equal" if not wrong else f"differs: {'; '.join(wrong[:3])}"
    return {"verdict": verdict, "load_ms": load_ms, "host_us": round(host_us, 1), "stream_us": round(stream_us, 1)}


def say(**said: Any) -> None:
    print(json.dumps(said), file=_answer, flush=True)


if __name__ == "__main__":
    _answer = os.fdopen(os.dup(1), "w")
    boot.point_stdout_at_stderr()  # libraries print there
    what, *rest = sys.argv[1:]
    if what in ("lift", "certified"):
        lift(rest[0], Path(rest[1]), Path(rest[2]), graph_safe if what == "lift" else deterministic)
    else:
        {"launch": launch, "prove": prove}[what](rest)
    _answer.flush()
    os._exit(0)
