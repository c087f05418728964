"""workers/probe.py: what it accepts, what it finds wrong, and how it names the cause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from layerzero.workers.probe import classify

ROOT = Path(__file__).parents[3]

# A provider of one kernel, "toy.silu", in plain Python. BODY runs where the kernel has `values` and sets `results`.
TOY = """
import math
from array import array
from layerzero.ipc.vocabulary.numerics import gather, scatter
from layerzero.workers.provider import Loaded

def load():
    {load}
    return Loaded(versions={{"toy": "1"}}, kernels={{"toy.silu": bind}})

def bind(call, inputs, outputs):
    def bound():
        values = array("f", gather(inputs[0].memory, inputs[0].spec)).tolist()
        results = [x / (1 + math.exp(-x)) for x in values]
        {body}
        scatter(array("f", results).tobytes(), outputs[0].spec, outputs[0].memory)
    return bound
"""
# The classes of a kernel of silu that needs contiguous inputs.
CLASSES = {f"plain/{size}/dense" for size in ("small", "aligned", "ragged", "long")}


def toy(
    folder: Path, *, load: str = "pass", body: str = "pass", kernel: str = "toy.silu", is_dense: bool = True
) -> dict[str, Any]:
    """Probe a toy provider in a process of its own, and return the verdict."""
    (folder / "toy.py").write_text(TOY.format(load=load, body=body))
    claims = {"kernel_id": kernel, "priority": 1, "source": "test", "dtypes": ["float32"], "deterministic": True}
    claims["requires_contiguous"] = is_dense
    descriptor = {"schema_version": "1.0", "backend": "toy", "backend_version": "1", "platform": "cpu"}
    (folder / "toy.json").write_text(json.dumps({**descriptor, "ops": {"silu": [claims]}}))
    return run(str(folder / "toy.py"), folder / "toy.json")


def run(provider: str, descriptor: Path) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "layerzero.workers.probe", provider, str(descriptor)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.count("\n") == 1, "one line, whatever the library prints"
    verdict: dict[str, Any] = json.loads(ran.stdout)
    assert verdict["ok"] == (verdict["error"] is None)
    return verdict


def test_right_kernel_is_certified_for_every_class(tmp_path: Path) -> None:
    """The verdict has the versions, the certificates, and how near the kernel came to the limit."""
    verdict = toy(tmp_path, load="print('hello from the library')")
    assert (verdict["error"], verdict["versions"], verdict["failures"]) == (None, {"toy": "1"}, [])
    assert {dtype: set(classes) for dtype, classes in verdict["certified"]["toy.silu"].items()} == {"float32": CLASSES}
    kernel = verdict["kernels"]["toy.silu"]
    assert (kernel["certified"], kernel["failed"]) == (len(CLASSES), 0)
    assert 0 < kernel["max_error"] <= kernel["tolerance"] == 1e-5
    assert kernel["elapsed_us"] > 0


TWICE_TOO_FAR = "results[-1] += 2e-5 * max(1, *map(abs, results))"


@pytest.mark.parametrize(
    "wrong", [TWICE_TOO_FAR, "results[-1] += 1e-3", "results[-1] = math.nan", "raise OverflowError('too big')"]
)
def test_kernel_that_is_wrong_for_one_class_keeps_the_others(tmp_path: Path, wrong: str) -> None:
    """Half a backend is worth more than none, as long as the wrong half never serves."""
    verdict = toy(tmp_path, body=f"if len(values) > 256: {wrong}")
    assert (verdict["ok"], verdict["error"]) == (True, None)
    assert set(verdict["certified"]["toy.silu"]["float32"]) == CLASSES - {"plain/long/dense"}
    [failure] = verdict["failures"]
    subject = (failure["kernel_id"], failure["dtype"], failure["shape_class"])
    assert subject == ("toy.silu", "float32", "plain/long/dense")
    assert failure["case"] == "[2, 3, 96]"
    assert failure["tolerance"] == 1e-5
    expected = "raised OverflowError: too big" if "raise" in wrong else "allowed 1e-05"
    assert expected in failure["detail"]


@pytest.mark.parametrize("length", [33, 3 * 43])
def test_one_wrong_case_spoils_its_class(tmp_path: Path, length: int) -> None:
    """A class is certified by all of its cases: those that pass, before or after, must not make up for one that
    failed."""
    verdict = toy(tmp_path, body=f"if len(values) == {length}: results[0] = 9.0")
    assert set(verdict["certified"]["toy.silu"]["float32"]) == CLASSES - {"plain/ragged/dense"}


def test_kernel_that_writes_between_the_elements_of_its_output_is_not_certified_for_strides(tmp_path: Path) -> None:
    """That memory is the caller's: the columns beside those that were asked for."""
    spill = "if len(values) > 1 and outputs[0].spec.strides[-1] == 2: outputs[0].memory[4] ^= 1"
    right, wrong = (toy(tmp_path, body=body, is_dense=False) for body in ("pass", spill))
    assert right["failures"] == []
    assert wrong["failures"]
    assert all("wrote between the elements" in failure["detail"] for failure in wrong["failures"])
    assert not any(name.endswith("/strided") for name in wrong["certified"]["toy.silu"]["float32"])


ACCUMULATES = "results = [r + old for r, old in zip(results, outputs[0].memory.cast('f').tolist())]"


@pytest.mark.parametrize(
    "body", ["results[0] += 1e-3", "results[0] = math.nan", "results[0] = math.inf", "return", ACCUMULATES]
)
def test_kernel_that_is_wrong_everywhere_disables_its_backend(tmp_path: Path, body: str) -> None:
    """However well it loads. Memory that a kernel does not write, or adds to, held something before: wrong, too."""
    verdict = toy(tmp_path, body=body)
    assert verdict["error"]["kind"] == "numeric"
    assert "toy.silu: [] in float32: error" in verdict["error"]["message"]
    assert verdict["certified"] == {"toy.silu": {}}
    assert {failure["shape_class"] for failure in verdict["failures"]} == CLASSES


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"body": "raise OverflowError('too big')"}, "kernel", "toy.silu: OverflowError: too big"),
        ({"body": "return 1"}, "kernel", "returned 1, expected None"),
        ({"body": "inputs[0].memory[0] = 1"}, "kernel", "read-only"),
        ({"load": "raise ValueError('no such device')"}, "load", "ValueError: no such device"),
        ({"load": "import lz_no_such_module"}, "import", "lz_no_such_module"),
        ({"load": "from math import no_such_name"}, "import", "no_such_name"),
        ({"kernel": "toy.other"}, "descriptor", "lists toy.other; the provider has toy.silu"),
    ],
)
def test_failures_are_told_apart(tmp_path: Path, change: dict[str, str], kind: str, text: str) -> None:
    """The kind decides what `lz env` proposes."""
    error = toy(tmp_path, **change)["error"]
    assert error["kind"] == kind
    assert text in error["message"]


def test_descriptor_that_is_no_descriptor_is_named(tmp_path: Path) -> None:
    """A third party may point at the wrong file."""
    (tmp_path / "wrong.json").write_text("[]")
    error = run("layerzero.workers.providers.null", tmp_path / "wrong.json")["error"]
    assert error["kind"] == "descriptor"
    assert "wrong.json" in error["message"]


def test_null_provider_passes_on_any_python() -> None:
    """It has no library, so nothing but our own code is probed."""
    verdict = run(
        "layerzero.workers.providers.null", ROOT / "src" / "layerzero" / "capabilities" / "descriptors" / "null.json"
    )
    assert verdict["error"] is None


NUMPY_2 = "A module that was compiled using NumPy 1.x cannot be run in NumPy 2.4.6 as it may crash."
SYMBOL = "/env/site-packages/x/_C.so: undefined symbol: _ZN3c106detail14torchCheckFailEPKc"
ZENTORCH = "zentorch 2.14 is only compatible with PyTorch 2.14.x, but PyTorch 2.13.0 is found"
PROTOBUF = "Descriptors cannot be created directly. Downgrade the protobuf package to 3.20.x or lower."


@pytest.mark.parametrize(
    ("exc", "kind", "missing"),
    [
        (ModuleNotFoundError("No module named 'numpy'"), "import", "numpy"),
        (ModuleNotFoundError("No module named 'google.protobuf'"), "import", "google.protobuf"),
        (
            ImportError("libcudart.so.12: cannot open shared object file: No such file or directory"),
            "import",
            "libcudart.so.12",
        ),
        (ImportError("cannot import name 'trapz' from 'numpy' (/env/numpy/__init__.py)"), "import", "trapz"),
        (ImportError("something else"), "import", None),
        (ImportError(SYMBOL), "abi", "_ZN3c106detail14torchCheckFailEPKc"),
        (OSError("/lib/libc.so.6: version `GLIBC_2.38' not found (required by _C.so)"), "abi", "GLIBC_2.38"),
        (ImportError(NUMPY_2), "abi", None),
        (ImportError("numpy.core.multiarray failed to import"), "abi", None),
        (ValueError("numpy.dtype size changed, may indicate binary incompatibility. Expected 96, got 88"), "abi", None),
        (AttributeError("_ARRAY_API not found"), "abi", None),
        (ImportError(ZENTORCH), "version", None),
        (TypeError(PROTOBUF), "version", None),
        (RuntimeError("no CPU with AVX512"), "load", None),
    ],
)
def test_cause_of_a_failed_import_is_named(exc: Exception, kind: str, missing: str | None) -> None:
    """The texts are those that real wheels raise."""
    found = classify(exc)
    assert (found["kind"], found["missing"]) == (kind, missing)
    assert str(exc) in found["message"]


def test_cause_below_the_raised_error_counts() -> None:
    """Libraries wrap the loader's error in one of their own, which says less."""
    try:
        try:
            raise ImportError(SYMBOL)
        except ImportError as exc:
            raise RuntimeError("could not load the C++ extension") from exc
    except RuntimeError as exc:
        found = classify(exc)
    assert (found["kind"], found["missing"]) == ("abi", "_ZN3c106detail14torchCheckFailEPKc")
