"""A model's file: what it is, by its contents, and its hash."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from layerzero.ipc.errors import InvalidArgument

ONNX, TORCHSCRIPT, EXPORTED, SAFETENSORS = "onnx", "torchscript", "exported", "safetensors"
ALLOWED = (
    "an ONNX model, a TorchScript archive (torch.jit.save), an exported program (torch.export.save), or safetensors "
    "with cls="
)
PICKLE = b"\x80"  # how pickles of protocol 2 and later begin
MAX_HEADER_BYTES = 100 << 20  # of safetensors, as its library has it


@dataclass(frozen=True)
class ModelFile:
    path: Path
    kind: str
    sha256: str

    @classmethod
    def of(cls, path: str | Path) -> ModelFile:
        """Raises InvalidArgument for one that cannot be read, and for one that is no model."""
        file = Path(path).resolve()
        try:
            with file.open("rb") as opened:
                head = opened.read(9)
                kind = _zipped(file) if head[:4] == b"PK\x03\x04" else _kind(file, head)
                opened.seek(0)
                return cls(file, kind, hashlib.file_digest(opened, "sha256").hexdigest())
        except (OSError, zipfile.BadZipFile) as exc:
            raise InvalidArgument(f"lz.load: {file} cannot be read: {exc}; allowed: {ALLOWED}") from exc


def _kind(file: Path, head: bytes) -> str:
    if head[:1] == PICKLE:
        raise InvalidArgument(_refused(file))
    header_bytes = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and header_bytes <= min(MAX_HEADER_BYTES, file.stat().st_size - 8):
        return SAFETENSORS
    if file.suffix == ".onnx" and head:
        return ONNX  # of a protobuf message nothing but its parts tells what it is
    raise InvalidArgument(f"lz.load: {file} is no model that is known; allowed: {ALLOWED}; ONNX models end in .onnx")


def _zipped(file: Path) -> str:
    """What torch has written."""
    with zipfile.ZipFile(file) as archive:
        names = {name.partition("/")[2] for name in archive.namelist()} | set(archive.namelist())
    if "constants.pkl" in names and any(name.startswith("code/") for name in names):
        return TORCHSCRIPT
    is_new = "archive_format" in names and any(name.startswith("models/") for name in names)
    if is_new or "serialized_exported_program.json" in names:
        return EXPORTED
    if "data.pkl" in names:
        raise InvalidArgument(_refused(file))
    raise InvalidArgument(f"lz.load: {file} is an archive, and no model that is known; allowed: {ALLOWED}")


def _refused(file: Path) -> str:
    text = f"lz.load: {file} is a pickle, as torch.save writes them: whoever made it could run code of theirs by it"
    return (
        f"{text}; save a model's weights as safetensors, or read it with torch.load(weights_only=True) and save "
        f"them so; allowed: {ALLOWED}"
    )
