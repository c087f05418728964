"""Programs that torch.export has saved."""

from __future__ import annotations

from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.providers.models.file import ModelFile
from layerzero.workers.providers.models.torchscript import plain, torch_of_this


class Exported:
    """A program of torch.export, run as it was captured."""

    def __init__(self, path: str, sha256: str) -> None:
        """Raises InvalidArgument, and what torch.export.load raises."""
        torch = torch_of_this()
        if not hasattr(torch, "export"):
            raise InvalidArgument(f"torch {torch.__version__} has no torch.export; exported programs need 2.1 or newer")
        with ModelFile(path, sha256) as file, open(file.path, "rb") as again:
            self._program = torch.export.load(again)
        self._module = self._program.module()

    def describe(self) -> list[list[list[Any]]]:
        """As Onnx.describe."""
        signature = self._program.graph_signature
        nodes = {node.name: node.meta.get("val") for node in self._program.graph.nodes}
        for node in self._program.graph.nodes:
            if node.op == "output":
                nodes |= {str(one): one.meta.get("val") for one in node.all_input_nodes}
        inputs = [_described(str(name), nodes.get(str(name))) for name in signature.user_inputs]
        return [inputs, [_described(str(name), nodes.get(str(name))) for name in signature.user_outputs]]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with torch_of_this().no_grad():
            return plain(self._module(*args, **kwargs))


def _described(name: str, value: Any) -> list[Any]:
    if not hasattr(value, "shape"):
        return [name, None, None, False]
    dims = [int(dim) if str(dim).isdigit() else str(dim) for dim in value.shape]
    return [name, str(value.dtype).removeprefix("torch."), dims, False]
