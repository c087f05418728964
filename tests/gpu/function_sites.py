"""An interpreter for functions of tests and benches on a GPU, for which nothing is built or downloaded, and what serves
them."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from unittest import mock

from tests.process.harness import Site

import layerzero as lz

if TYPE_CHECKING:
    import pytest


def interpreter(folder: Path) -> Path:
    """A venv that has what is installed here."""
    venv.create(folder, symlinks=True)
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / f"python{minor}" / "site-packages"
    here = [path for path in sys.path if path and Path(path).is_dir() and any(Path(path).glob("*.dist-info"))]
    (site / "here.pth").write_text("".join(f"{path}\n" for path in here))
    return folder / "bin" / "python"


@contextlib.contextmanager
def served(folders: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The functions of function_calls.py, and a broker that serves them, which this process is connected to."""
    path = interpreter(folders.mktemp("venv") / "v")
    site = Site(folders.mktemp("store"), restart_budget=1000, backoff_s=0.01, backoff_max_s=0.01)
    with mock.patch.dict(os.environ, {"LZ_TEST_INTERPRETER": str(path)}):
        sys.modules.pop("tests.gpu.function_calls", None)
        functions = importlib.import_module("tests.gpu.function_calls")
    try:
        with site.environment():
            functions.GPU.build(quiet=True)
            functions.PAIR.build(quiet=True)
            site.start().connect()
            functions.place()
            yield functions
            lz.disconnect()
    finally:
        site.stop()
