"""Users' modules in a worker, and who learns that they have changed."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions.frames import Code
from layerzero.workers.functions.code import Modules
from layerzero.workers.functions.lifted import LiftableCalls
from layerzero.workers.provider import Call


def test_what_was_lifted_ends_once_a_functions_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since others of that folder have its helpers anew from then on."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "path_hooks", list(sys.path_hooks))
    monkeypatch.setattr(sys, "path_importer_cache", {})
    changes: list[str] = []
    server: Any = SimpleNamespace(_modules=Modules(), _known=None)
    calls = LiftableCalls(server)
    calls.on_change(changes.append)

    def run(module: str, text: str) -> Any:
        file = tmp_path / f"{module}.py"
        file.write_text(text)
        sha = hashlib.sha256(file.read_bytes()).hexdigest()
        return server._modules.function(Code(module, "f", str(file), sha, str(tmp_path), False))()

    (tmp_path / "lz_helper.py").write_text("VALUE = 1\n")
    uses = "import lz_helper\ndef f(): return lz_helper.VALUE\n"
    assert (run("lz_one", uses), run("lz_two", "def f(): return 5\n")) == (1, 5)
    assert run("lz_two", "def f(): return 56\n") == 56
    assert changes == []  # nothing was lifted
    with pytest.raises(InvalidArgument, match="its call cannot be read: "):
        calls.bind(Call("function_on_gpu", "env.call", (), (), {"call": "00"}), (), ())
    assert run("lz_one", uses) == 1
    (tmp_path / "lz_helper.py").write_text("VALUE = 234\n")
    assert (run("lz_one", uses), changes) == (1, [])
    run("lz_two", "def f(): return 6\n")
    assert changes == ["MODULES_CHANGED"]
    assert (run("lz_one", uses), changes) == (234, ["MODULES_CHANGED"])
