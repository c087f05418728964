"""Functions for tests/process/test_function_interpreters.py: in an interpreter that the test has made."""

from __future__ import annotations

import os
import sys
from typing import Any

import layerzero as lz

MINE = lz.env("mine", from_interpreter=os.environ.get("LZ_TEST_INTERPRETER", "/nowhere"), requires=["heavy>=2"])


@lz.isolated(MINE)
def found() -> dict[str, Any]:
    import heavy  # type: ignore[import-not-found]
    import own_code  # type: ignore[import-not-found]
    import zmq

    return {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "heavy": heavy.VERSION,
        "edited": own_code.VERSION,
        "zmq": os.path.realpath(zmq.__file__),
        "pid": os.getpid(),
        "conda": os.environ.get("CONDA_PREFIX"),
    }


@lz.isolated(MINE)
def total(array: Any) -> float:
    return float(array.sum())
