"""Node classes of a ComfyUI pack that runs in an environment of its own: what `nodes` gives has ComfyUI's interface."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import layerzero as lz

FIELDS = ("RETURN_TYPES", "RETURN_NAMES", "FUNCTION", "CATEGORY", "OUTPUT_NODE", "INPUT_IS_LIST", "OUTPUT_IS_LIST")


def _pack(folder: str) -> Any:
    """The pack's module: imported where this runs, which is its environment."""
    name = f"pack_{Path(folder).name}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, f"{folder}/__init__.py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def described(folder: str) -> dict[str, dict[str, Any]]:
    found = _pack(folder)
    return {
        name: {field: getattr(cls, field) for field in FIELDS if hasattr(cls, field)} | {"inputs": cls.INPUT_TYPES()}
        for name, cls in found.NODE_CLASS_MAPPINGS.items()
    }


def run(folder: str, name: str, inputs: dict[str, Any]) -> Any:
    cls = _pack(folder).NODE_CLASS_MAPPINGS[name]
    return getattr(cls(), cls.FUNCTION)(**inputs)


def environment(folder: Path) -> Any:
    return lz.env.from_requirements(folder / "requirements.txt", f"pack-{folder.name.replace('_', '-')}", python="3.11")


def nodes(folder: Path, timeout_s: float = 60.0) -> dict[str, type]:
    """NODE_CLASS_MAPPINGS of a pack. Raises as a call of an isolated function does."""
    where = environment(folder)
    ask, call = lz.isolated(where, timeout_s=timeout_s)(described), lz.isolated(where, timeout_s=timeout_s)(run)
    return {name: _node(call, str(folder), name, told) for name, told in ask(str(folder)).items()}


def _node(call: Any, folder: str, name: str, told: dict[str, Any]) -> type:
    def function(self: Any, **inputs: Any) -> Any:
        return call(folder, name, inputs)

    fields = {field: told[field] for field in FIELDS if field in told}
    inputs = classmethod(lambda _: told["inputs"])
    return type(name, (), {**fields, "INPUT_TYPES": inputs, told["FUNCTION"]: function})
