"""Backends of ours beside each other as LayerZero runs them: one broker, a worker and an environment for each."""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from operator import mul
from pathlib import Path
from typing import Any

import layerzero as lz
from layerzero.client.facade import default_session
from layerzero.envs.build.build import resolve
from layerzero.envs.build.progress import Progress
from layerzero.envs.build.several import ensure_all
from layerzero.envs.matrix.engine import Isolated
from layerzero.envs.matrix.subjects import Subject
from layerzero.ipc.errors import LayerZeroError

SIZE = 64
PATIENCE_S = 300.0  # the first call waits for the worker, and for its probe when there is no verdict yet
_TEXT = "kernels cannot share memory"
_IDS = [1, 2, 3, 0]
_WORDS = {"[UNK]": 0, "kernels": 1, "cannot": 2, "share": 3}
_MODEL = {"type": "WordLevel", "vocab": _WORDS, "unk_token": "[UNK]"}
_TOKENIZER = json.dumps({"version": "1.0", "model": _MODEL, "pre_tokenizer": {"type": "Whitespace"}}).encode()


def through_workers(
    subjects: Sequence[Subject], *, store: Path, folders: Sequence[Path], progress: Progress
) -> dict[str, Isolated]:
    """Build what is missing, then let every backend compute while the workers of all the others run. Uses a broker of
    its own, which ends with this call."""
    manifests = {one.name: resolve(one.backend, folders) for one in subjects}
    descriptors = {name: json.loads(one.descriptor_path.read_text(encoding="utf-8")) for name, one in manifests.items()}
    built = ensure_all({m.name: m for m in manifests.values()}.values(), store=store, progress=progress)
    found: dict[str, Isolated] = {}
    ready = []
    for one in subjects:
        env = built[manifests[one.name].name]
        if isinstance(env, LayerZeroError):
            found[one.name] = Isolated(False, "worker", env.message)
        else:
            ready.append(one)
    with tempfile.TemporaryDirectory(prefix="lz-matrix-") as folder:
        default_session.connect(runtime_dir=Path(folder))
        try:
            for _ in range(2):  # after the first round all workers run
                for one in ready:
                    if one.name not in found or found[one.name].ok:
                        found[one.name] = _call(one.backend, descriptors[one.name])
        finally:
            default_session.disconnect()
    return found


def _call(backend: str, descriptor: Mapping[str, Any]) -> Isolated:
    """One op of the backend, by its worker; the result is compared exactly and the inputs must be untouched."""
    for op in ("matmul", "linear", "tokenize"):
        if op in descriptor["ops"]:
            try:
                wrong = _tokenize(backend) if op == "tokenize" else _multiply(backend, op)
            except LayerZeroError as exc:
                return Isolated(False, "worker", f"{op}: {exc.message}")
            return Isolated(not wrong, "worker", wrong or f"{op} is right, its inputs untouched")
    names = ", ".join(descriptor["ops"])
    return Isolated(
        False, "worker", f"none of its ops ({names}) is one that this check knows: matmul, linear, tokenize"
    )


def _multiply(backend: str, op: str) -> str:
    left, right = (_matrix(factor) for factor in (3, 5))
    before = left.tobytes(), right.tobytes()
    out = getattr(lz, op)(left, right, backend=backend, timeout_s=PATIENCE_S)
    rows: list[list[float]] = right.tolist()
    columns = rows if op == "linear" else [list(column) for column in zip(*rows, strict=True)]
    product = [[sum(map(mul, row, column)) for column in columns] for row in left.tolist()]
    if out.tolist() != product:
        return f"{op} is wrong: the first row starts with {out.tolist()[0][:3]}, not {product[0][:3]}"
    return "" if (left.tobytes(), right.tobytes()) == before else f"{op} wrote to its inputs"


def _matrix(factor: int) -> Any:
    """Small integers, so that products are exact in float32."""
    values = array("f", ((row * factor + column) % 7 for row in range(SIZE) for column in range(SIZE)))
    return memoryview(values).cast("B").cast("f", [SIZE, SIZE])


def _tokenize(backend: str) -> str:
    ids = lz.tokenize(_TEXT, _TOKENIZER, backend=backend, timeout_s=PATIENCE_S)
    return "" if list(ids) == _IDS else f"tokenize is wrong: {list(ids)}, not {_IDS}"
