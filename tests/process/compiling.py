"""A backend whose kernel really compiles: the toy's silu, for each length of rows, a module in its environment's cache.
Its notes say who compiled what."""

from __future__ import annotations

from tests.process.harness import BACKENDS

SLOW, BROKEN, QUICK = 500, 501, 502  # lengths of rows: compiled when the gate opens, never, at once

_JIT = """

import importlib.util
import py_compile
import sys
from pathlib import Path


def load():
    import numpy

    cache, notes = Path(os.environ["LZ_JIT_CACHE"]), Path(os.environ["LZ_JIT_NOTES"])

    def compiled(row):
        target = cache / f"silu_{row}.pyc"
        if not target.exists():
            with (notes / "compiled").open("a") as file:
                file.write(f"{row} {' '.join(sys.orig_argv)}\\n")
            if row == SLOW:
                with (notes / "gate").open() as gate:  # a FIFO: goes on when somebody has opened it for writing
                    gate.read()
            if row == BROKEN:
                raise RuntimeError("nvcc: error: no image for this row")
            cache.mkdir(parents=True, exist_ok=True)
            source = cache / f"silu_{row}.py"
            source.write_text("import numpy as np\\ndef silu(x):\\n    return x / (1 + np.exp(-x))\\n")
            py_compile.compile(str(source), cfile=str(target), doraise=True)
        spec = importlib.util.spec_from_file_location(f"silu_{row}", target)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.silu

    def silu(call, inputs, outputs):
        shape = call.inputs[0].shape
        run, read, write = compiled(shape[-1] if shape else 1), _reader(inputs[0]), _writer(outputs[0])

        def bound():
            with numpy.errstate(over="ignore"):
                write(run(read()))

        return bound

    return Loaded({"numpy": numpy.__version__}, {"jit.silu": silu, "jit.null": _null})
"""


def provider() -> str:
    """Its source."""
    values = f"\nSLOW, BROKEN = {SLOW}, {BROKEN}\n"
    return (BACKENDS / "toy.py").read_text() + values + _JIT
