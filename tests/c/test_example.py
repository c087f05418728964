"""The program of docs/c-api.md, as a reader would build and run it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.c.conftest import LIBRARY, Built, libzmq, run
from tests.process.harness import Site

PAGE = Path(__file__).parents[2] / "docs" / "c-api.md"


def test_program_of_the_page_prints_what_the_page_says(built: Built, broker: Site, tmp_path: Path) -> None:
    """From its text, with the library that `make` builds; libzmq where the system's loader finds it."""
    text = PAGE.read_text(encoding="utf-8")
    [program] = re.findall(r"^```c\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    [printed] = re.findall(r"^It prints `(.*?) by`", text, re.MULTILINE)
    source = tmp_path / "example.c"
    source.write_text(program)
    zmq = Path(libzmq())
    if zmq.is_absolute():
        (tmp_path / "libzmq.so.5").symlink_to(zmq)
    folders = os.pathsep.join([str(tmp_path), str(zmq.parent)])
    done = run(built.program(source), LAYERZERO_RUNTIME_DIR=str(broker.folder), LD_LIBRARY_PATH=folders)
    numbers, _, kernel = done.stdout.decode().partition(" by ")
    assert numbers == printed
    assert kernel.strip() in {"alpha.silu", "beta.silu", "gamma.silu"}


def test_page_names_what_the_header_has() -> None:
    """No code or field on the page that there is not."""
    header = (LIBRARY / "layerzero.h").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:lz|LZ)_[A-Za-z_]+)", PAGE.read_text(encoding="utf-8")))
    assert sorted(name for name in named if not re.search(rf"\b{name}\b", header)) == []
