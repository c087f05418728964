"""functions/model_file.py, ports.py: what a file is by its contents, and what a worker may say of a model."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from layerzero.functions.model_file import ModelFile
from layerzero.functions.ports import ports
from layerzero.ipc.errors import InvalidArgument, ProtocolError


def archive(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name in names:
            made.writestr(name, "x")
    return path


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("net/constants.pkl", "net/data.pkl", "net/code/__torch__.py"), "torchscript"),
        (("serialized_exported_program.json", "serialized_state_dict.pt"), "exported"),
        (("net/archive_format", "net/models/model.json"), "exported"),
    ],
)
def test_archives_of_torch_are_known_by_what_they_hold(tmp_path: Path, names: tuple[str, ...], kind: str) -> None:
    """Whatever they are called."""
    assert ModelFile.of(archive(tmp_path / "net.bin", *names)).kind == kind


def test_what_torch_save_writes_is_refused_with_the_reason(tmp_path: Path) -> None:
    old = tmp_path / "old.onnx"
    old.write_bytes(b"\x80\x02}q\x00.")
    for path in (archive(tmp_path / "new.pt", "new/data.pkl", "new/data/0"), old):
        with pytest.raises(InvalidArgument, match=r"is a pickle, as torch.save writes them"):
            ModelFile.of(path)


@pytest.mark.parametrize("data", [b"", b"hello", (1 << 40).to_bytes(8, "little") + b"{}", b"PK\x03\x04 no archive"])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    with pytest.raises(InvalidArgument, match="allowed: an ONNX model, a TorchScript archive"):
        ModelFile.of(path)


def test_a_header_of_safetensors_is_known(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    assert ModelFile.of(path).kind == "safetensors"


GOOD = ["x", "float32", [2, "rows", None], False]


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [],
        [[GOOD]],
        [[GOOD], [["x", "float33", [2], False]]],
        [[GOOD], [["x", "float32", [-1], False]]],
        [[GOOD], [["x", "float32", [True], False]]],
        [[GOOD], [["x", "float32", [[]], False]]],
        [[GOOD], [["x", "float32", [1] * 100, False]]],
        [[GOOD], [["x", "float32", [1], 0]]],
        [[["x"] * 5000] * 5000, []],
    ],
)
def test_what_is_no_description_of_a_model_is_refused(tree: Any) -> None:
    assert str(ports([[GOOD], []])[0][0]) == "x: float32[2, rows, ?]"
    with pytest.raises(ProtocolError):
        ports(tree)
