"""Ranks of groups, each a process that makes calls as it is told to, and how tests tell it. Standard input has what to
do, a line of JSON each; standard output what came of it."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.process.harness import Site, open_files

import layerzero as lz

ROUNDS = 4  # random arrays for each op
DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint16", "uint64", "bool")
ULPS = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-14}  # of the sum of absolute values
_groups: dict[str, lz.Group] = {}
_held: list[mmap.mmap] = []


class Rank:
    """The process of one."""

    def __init__(self, site: Site) -> None:
        self.process = site.python("from tests.process.group_ranks import serve; serve()", stdin=subprocess.PIPE)

    def ask(self, what: str, *args: Any, **kwargs: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, args, kwargs]) + "\n")
        self.process.stdin.flush()

    def told(self) -> Any:
        """What came of it: a value, or {"error": ..., "message": ..., "facts": ...}."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the rank ended with {self.process.wait()}"
        return json.loads(line)

    def has_files(self) -> bool:
        """Whether the process has not closed its files yet, as it does towards its end."""
        assert self.process.stdout is not None
        end = select.poll()
        end.register(self.process.stdout, 0)
        return not end.poll(0)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.close()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait()


def all_of(ranks: list[Rank], what: str, *args: Any, **kwargs: Any) -> list[Any]:
    for rank in ranks:
        rank.ask(what, *args, **kwargs)
    return [rank.told() for rank in ranks]


def each_of(ranks: list[Rank], calls: str, *each: tuple[Any, ...], name: str = "tp") -> list[Any]:
    """Each rank another function of the module `calls`, with its arguments."""
    for rank, (function, *args) in zip(ranks, each, strict=True):
        rank.ask("on", f"{calls}:{function}", *args, name=name)
    return [rank.told() for rank in ranks]


def errors(told: list[Any]) -> list[str]:
    return [one["error"] for one in told]


def form(ranks: list[Rank], name: str = "tp", **options: Any) -> list[Any]:
    for number, rank in enumerate(ranks):
        rank.ask("form", name, number, len(ranks), **options)
    return [rank.told() for rank in ranks]


# --- in a rank


def serve() -> None:
    lz.connect()
    for line in sys.stdin:
        what, args, kwargs = json.loads(line)
        try:
            value = DOES[what](*args, **kwargs)
        except (lz.LayerZeroError, KeyboardInterrupt, ValueError) as exc:
            value = {"error": getattr(exc, "code", type(exc).__name__), "message": str(exc)}
            value["facts"] = getattr(exc, "facts", {})
        print(json.dumps(value), flush=True)


def _form(name: str, rank: int, size: int, **options: Any) -> int:
    _groups[name] = lz.group(name, rank, size, **options)
    return _groups[name].generation


def _call(method: str, shape: list[int], dtype: str = "float32", name: str = "tp", **options: Any) -> list[Any]:
    """Of an array that is full of this rank's number; the result, as a list."""
    group = _groups[name]
    if options.get("out") is not None:
        options["out"] = np.empty(options["out"], dtype)
    result = getattr(group, method)(np.full(shape, group.rank + 1, dtype), **options)
    return result.ravel()[:8].tolist()  # type: ignore[no-any-return]


def _report(name: str = "tp") -> dict[str, Any]:
    report = _groups[name].last_report()
    return {"path": report.path, "call": report.call, "copied": report.copied_bytes, "text": str(report)}


def _check(seed: int, name: str = "tp") -> str:
    """Every op on random arrays beside NumPy's float64; a hash of the results that all ranks have alike."""
    group, digest = _groups[name], hashlib.sha256()
    for number in range(ROUNDS):
        for dtype in DTYPES:
            _check_one(group, np.random.default_rng([seed, number, DTYPES.index(dtype)]), dtype, digest)
    return digest.hexdigest()


def _check_one(group: lz.Group, random: np.random.Generator, dtype: str, digest: Any) -> None:
    shape = [int(random.choice([0, 1, 7, 256, 1025])), *([int(random.choice([1, 3, 17]))] * int(random.integers(2)))]
    whole = [group.size * shape[0], *shape[1:]]
    xs = [_random(random, whole, dtype) for _ in range(group.size)]
    op = str(random.choice(["sum", "prod", "min", "max", "mean"]))
    if dtype == "bool" or op == "mean":
        op = "max" if dtype not in ULPS else op
    x = _laid(random, xs[group.rank])
    out = x if x.flags.c_contiguous and x.flags.aligned and random.random() < 0.3 else None
    reduced = group.all_reduce(x, op, out=out)
    assert out is None or reduced is x
    _assert_close(reduced, _reference(xs, op), xs, op, dtype)
    digest.update(reduced.tobytes())
    x = xs[group.rank]
    part = slice(group.rank * shape[0], (group.rank + 1) * shape[0])
    _assert_close(group.reduce_scatter(x, op), _reference(xs, op)[part], [one[part] for one in xs], op, dtype)
    np.testing.assert_array_equal(group.all_gather(x), np.concatenate(xs))
    np.testing.assert_array_equal(group.all_to_all(x), np.concatenate([one[part] for one in xs]))
    root = int(random.integers(group.size))
    sent = group.broadcast(x, root)
    assert sent.dtype == x.dtype
    np.testing.assert_array_equal(sent, xs[root])


def _random(random: np.random.Generator, shape: list[int], dtype: str) -> Any:
    if dtype in ULPS:
        return random.uniform(-2, 2, shape).astype(dtype)
    return random.integers(0, 2 if dtype == "bool" else 4, shape).astype(dtype)


def _laid(random: np.random.Generator, x: Any) -> Any:
    """The same numbers, maybe strided, or at an odd address."""
    match int(random.integers(3)):
        case 0:
            return np.array(x, order="F")
        case 1:
            memory = np.empty(x.nbytes + 1, np.uint8)[1:]
            unaligned = memory.view(x.dtype).reshape(x.shape)
            unaligned[...] = x
            return unaligned
    return x.copy()


def _reference(xs: list[Any], op: str) -> Any:
    wide = [x.astype(np.float64 if x.dtype.kind == "f" else x.dtype) for x in xs]
    found = wide[0]
    for one in wide[1:]:
        match op:
            case "sum" | "mean":
                found = found + one
            case "prod":
                found = found * one
            case "min":
                found = np.minimum(found, one)
            case _:
                found = np.maximum(found, one)
    return found / len(xs) if op == "mean" else found


def _assert_close(found: Any, expected: Any, xs: list[Any], op: str, dtype: str) -> None:
    assert found.dtype == dtype
    assert found.shape == expected.shape
    if dtype not in ULPS or op in ("min", "max"):
        np.testing.assert_array_equal(found, expected.astype(dtype))
        return
    wide = [abs(x.astype(np.float64)) for x in xs]
    bound = np.prod(wide, axis=0) if op == "prod" else np.sum(wide, axis=0)
    least = float(np.finfo(dtype).smallest_subnormal)
    assert (abs(found - expected) <= ULPS[dtype] * bound + least).all()


def _hold(nbytes: int) -> None:
    """Memory that takes a while to give back when this process ends, in small pages."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
    _held.append(memory)


def _point(sends: bool, other: int, count: int, dtype: str = "int32", out: int | None = None, name: str = "tp") -> Any:
    group = _groups[name]
    x = np.arange(count, dtype=dtype)
    if sends:
        group.send(x, other)
        return None
    target = None if out is None else np.empty(out, dtype)
    found = group.recv(other, out=target)
    return bool((found == x).all())


def _die_in_round(number: int, name: str = "tp") -> None:
    """In the middle of a large call."""
    shared, rounds = _groups[name]._shared, iter(range(number))
    assert shared is not None
    exchanged = shared._exchanged

    def dying(until_s: float) -> Any:
        if next(rounds, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchanged(until_s)

    shared._exchanged = dying  # type: ignore[method-assign]
    _groups[name].all_reduce(np.ones(1 << 20, np.float32))


def _interrupted(name: str = "tp") -> None:
    """By Ctrl-C, while it waits for the others."""
    peers = _groups[name]._peers
    assert peers is not None
    take = peers.take

    def taking(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return take(*args)

    peers.take = taking  # type: ignore[method-assign]
    _groups[name].barrier()


def _files() -> dict[str, int]:
    """Descriptors of this process, by what they are."""
    gc.collect()
    found: dict[str, int] = {}
    for file, count in open_files().items():
        kind = file.partition(":[")[0]
        found[kind] = found.get(kind, 0) + count
    return found


def _reform(name: str = "tp", **options: Any) -> list[Any]:
    group = _groups[name].reform(**options)
    return [group.generation, sorted(group.completed.items())]


def _fork(name: str = "tp") -> int:
    """What a call in a forked child says, and whether the group lives on without it."""
    pid = os.fork()
    if pid == 0:
        try:
            _groups[name].barrier()
        except lz.InvalidArgument:
            del _groups[name]
            os._exit(7)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _on(function: str, *args: Any, name: str = "tp", **options: Any) -> Any:
    """What a function of a module of tests gives, "module:function", on the group."""
    module, _, found = function.partition(":")
    return getattr(importlib.import_module(module), found)(_groups[name], *args, **options)


DOES: dict[str, Callable[..., Any]] = {
    "form": _form,
    "call": _call,
    "meet": lambda name="tp": _groups[name].barrier(),
    "check": _check,
    "report": _report,
    "connect": lambda: bool(lz.connect()),
    "point": _point,
    "die_in_round": _die_in_round,
    "interrupted": _interrupted,
    "hold": _hold,
    "files": _files,
    "reform": _reform,
    "fork": _fork,
    "forget": lambda name="tp": bool(_groups.pop(name)) and gc.collect() < 0,
    "on": _on,
    "synchronize": lambda name="tp": _groups[name].synchronize(),
    "close": lambda name="tp": _groups.pop(name).close(),
    "explain": lambda nbytes, name="tp", **options: str(_groups[name].explain(nbytes, **options)),
    "tune": lambda sizes, name="tp": sorted(_groups[name].tune(sizes)),
}
