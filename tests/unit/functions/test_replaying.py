"""Replaying a capsule of a function that somebody else may have written: what runs is shown before, and named."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from layerzero.client.capsules import form, store
from layerzero.client.capsules.of_function import FunctionCall, Part, Target
from layerzero.client.cli.app import app
from layerzero.functions import replaying
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions import values
from layerzero.ipc.transport.plain import pack_tree

ENV = "one.fn"
GIVEN = ([values.LIST, "touch /hacked"], [values.DICT, "by", 2])
TOLD = [([*GIVEN], b"", [])]


def call_of(file: Path | str, qualname: str = "getoutput", module: str = "sp") -> FunctionCall:
    """As a capsule has it that somebody made up: its label says something else."""
    source = Path(file).read_bytes() if file else b""
    where = (str(file), hashlib.sha256(source).hexdigest(), str(Path(file).parent)) if file else ("", "", "")
    shown = ([values.LIST, 1], [values.DICT])
    target = Target(ENV, module, qualname, *where, is_main=False)
    return FunctionCall("innocent", (target,), (Part("call", "", 0, shown, (0, 1)),))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text("import os\nfrom subprocess import getoutput as run\n\ndef double(x, by):\n    return x * by\n")
    return file


def test_what_a_capsule_of_others_calls_is_shown_and_called_when_its_file_is_named(own: Path) -> None:
    function = call_of(own, "double", "mine")
    with pytest.raises(InvalidArgument) as error:
        replaying.code_to_call(function, ENV, None, TOLD, is_trusted=False)
    said = error.value.message
    assert "--file FILE" in said.splitlines()[0]
    for text in ("mine.double('touch /hacked', by=2)", str(own), ENV):
        assert text in said
    assert "innocent" not in said
    assert replaying.code_to_call(function, ENV, own, TOLD, is_trusted=False).file == str(own)
    assert replaying.code_to_call(function, ENV, None, TOLD, is_trusted=True).file == str(own)


@pytest.mark.parametrize("qualname", ["os.system", "run"])
def test_a_file_that_is_named_is_no_way_to_what_it_imports(own: Path, qualname: str) -> None:
    with pytest.raises(InvalidArgument, match="does not define what it calls"):
        replaying.code_to_call(call_of(own, qualname, "mine"), ENV, own, TOLD, is_trusted=False)


def test_a_package_of_the_environment_has_no_hash_and_asks_for_trust(own: Path) -> None:
    function = call_of("", "load", "torch")
    for file in (None, own):
        with pytest.raises(InvalidArgument, match=r"say --trust: .*torch.load\('touch /hacked', by=2\)"):
            replaying.code_to_call(function, ENV, file, TOLD, is_trusted=False)
    assert replaying.code_to_call(function, ENV, None, TOLD, is_trusted=True).is_installed


def test_the_standard_library_is_never_called(tmp_path: Path) -> None:
    """Of this interpreter and of others, also by a link and by --file."""
    function = call_of(subprocess.__file__)
    link = tmp_path / "link.py"
    link.symlink_to(subprocess.__file__)
    other = tmp_path / "lib" / "python3.99" / "subprocess.py"
    other.parent.mkdir(parents=True)
    other.write_bytes(Path(subprocess.__file__).read_bytes())
    for file in (None, link, other):
        with pytest.raises(InvalidArgument, match="standard library"):
            replaying.code_of(function, ENV, file)
    package = other.parent / "site-packages" / "mine.py"
    package.parent.mkdir()
    package.write_text("def double(x, by): ...\n")
    assert replaying.code_of(call_of(package, "double"), ENV, None).file == str(package)


def test_a_capsule_is_ones_own_in_ones_own_folder_alone(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "capsules", tmp_path / "downloads"
    for one in (folder, elsewhere, folder / "a", elsewhere / "b"):
        one.mkdir(mode=0o700)
    (folder / "c").symlink_to(elsewhere / "b")
    assert store.is_own(folder, folder / "a")
    assert not store.is_own(folder, elsewhere / "b")
    assert not store.is_own(folder, folder / "c")
    os.chmod(folder, 0o770)
    assert not store.is_own(folder, folder / "a")


def call_json(node: Sequence[Any], nbytes: int = 64) -> dict[str, Any]:
    """A capsule of a function that takes an array; 16 bytes were lent beside those in its frame."""
    spec = ["float32", [4], [1]]
    array = [values.ARRAY, "numpy", *spec, *node]
    target = {"env": "one.fn", "module": "m", "qualname": "f", "file": "", "sha256": "", "root": "", "is_main": False}
    part = {"kind": "call", "name": "", "stays": 0, "given": [[values.LIST, array], [values.DICT]]}
    function = {"label": "m.f", "targets": [target], "parts": [{**part, "memory": [0, 1, 2], "outs": []}]}
    failure = {"backend": "one.fn", "kernel_id": "one.fn", "outcome": "BACKEND", "detail": ""}
    return {
        **{"schema": 2, "op": "function", "arguments": [], "params": {}, "output": None, "served_by": "", "facts": {}},
        "segments": [{"nbytes": size, "offset": 0, "sha256": ""} for size in (8, nbytes, 16)],
        "failures": [{**failure, "exit_signal": 11, "exit_code": None}],
        "function": {**function, "problem": ""},
        "made_s": 0.0,
        "left_out": "shapes",
    }


def written(folder: Path, call: Mapping[str, Any]) -> Path:
    (folder / form.CALL).write_text(json.dumps(call))
    return folder


@pytest.mark.parametrize("node", [(-1, 0), (-1, 48), (0, 0)])
def test_arrays_in_their_memory_are_read(tmp_path: Path, node: Sequence[int]) -> None:
    capsule = form.read(written(tmp_path, call_json(node)))
    assert replaying.function_memory(capsule, [], 0)[0][0][0][1][5:] == list(node)


@pytest.mark.parametrize("node", [(-2, 0), (1, 0), (1 << 70, 0), (-1, -8), (-1, 52), (0, 4), (-1, 1 << 70)])
def test_arrays_outside_of_their_memory_are_damage(tmp_path: Path, node: Sequence[int]) -> None:
    """In what is shown, and in what was kept."""
    with pytest.raises(InvalidArgument, match=r"damaged.*(lies outside of its memory|the call lent 1)"):
        form.read(written(tmp_path, call_json(node)))
    capsule = form.read(written(tmp_path, call_json((-1, 0))))
    if abs(node[0]) < 1 << 63 and abs(node[1]) < 1 << 63:
        trees = pack_tree([[values.LIST, [values.ARRAY, "numpy", "float32", [4], [1], *node]], [values.DICT]])
        with pytest.raises(InvalidArgument, match=r"damaged.*(lies outside of its memory|the call lent 1)"):
            replaying.function_memory(capsule, [trees, bytes(64), bytes(16)], 0)


@pytest.mark.parametrize("tree", [[3, 4], [[values.LIST]], 7, {"a": 1}])
def test_what_was_kept_and_is_no_arguments_is_damage(tmp_path: Path, tree: Any) -> None:
    capsule = form.read(written(tmp_path, call_json((-1, 0))))
    with pytest.raises(InvalidArgument, match="damaged"):
        replaying.function_memory(capsule, [pack_tree(tree), bytes(64), bytes(16)], 0)


def test_arguments_that_no_machine_has_room_for_are_refused(tmp_path: Path) -> None:
    capsule = form.read(written(tmp_path, call_json((-1, 0), nbytes=1 << 60)))
    with pytest.raises(InvalidArgument, match="replay it on a machine with more memory"):
        replaying.function_memory(capsule, [], 0)


def test_a_device_belongs_to_an_op(tmp_path: Path) -> None:
    folder = str(written(tmp_path, call_json((-1, 0))))
    result = CliRunner().invoke(app, ["replay", folder, "--device", "cuda"])
    assert "leave --device out" in result.output
