"""A function or a class by reference: what a worker imports, and why some cannot be."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions.frames import Code


def reference(function: Callable[..., Any]) -> Code:
    """Raises InvalidArgument for what no other process can import: the reason and what to do."""
    name = getattr(function, "__qualname__", repr(function))
    if isinstance(function, type):
        return _class_reference(function)
    if not inspect.isfunction(function):
        raise InvalidArgument(f"lz.isolated: {function!r:.80} is no function; decorate a function of a module")
    if function.__name__ == "<lambda>":
        raise InvalidArgument(
            f"lz.isolated: a lambda has no name to import it by; define it with def ({_where(function)})"
        )
    if function.__closure__ is not None or "<locals>" in name:
        text = f"lz.isolated: {name} is defined inside of a function, where no other process can import it"
        raise InvalidArgument(f"{text}; move it to the top of its module, and pass as arguments what it uses")
    if "." in name:
        raise InvalidArgument(f"lz.isolated: {name} is a method; decorate a function at the top of a module")
    return _reference(function, name)


def _class_reference(cls: type) -> Code:
    name = cls.__qualname__
    if "<locals>" in name:
        text = f"lz.isolated: {name} is a class of a function, where no other process can import it"
        raise InvalidArgument(f"{text}; move it to the top of its module, and pass to its constructor what it uses")
    if "." in name:
        raise InvalidArgument(f"lz.isolated: {name} is a class inside of a class; move it to the top of its module")
    return _reference(cls, name)


def _reference(function: Any, name: str) -> Code:
    module = sys.modules.get(function.__module__)
    path = getattr(module, "__file__", None)
    if path is None or not path.endswith(".py"):
        text = f"lz.isolated: {name} is of no .py file ({function.__module__}), as in a notebook or a shell"
        raise InvalidArgument(f"{text}; put it into a module and import that")
    file = Path(path).resolve()
    is_main = function.__module__ == "__main__"
    spec = getattr(module, "__spec__", None)
    if is_main and spec is not None and spec.parent:
        text = f"lz.isolated: {name} is of a package's module that was started with python -m"
        raise InvalidArgument(f"{text}; move it to a module that this one imports")
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as exc:
        raise InvalidArgument(f"lz.isolated: {file} cannot be read: {exc.strerror}") from exc
    return Code(function.__module__, name, str(file), digest, root_of(function.__module__, file, is_main), is_main)


def root_of(module: str, file: Path, is_main: bool) -> str:
    """The folder from which the module is imported."""
    if is_main:
        return str(file.parent)
    depth = module.count(".") + (file.name == "__init__.py")
    return str(file.parents[depth]) if depth < len(file.parents) else os.sep


def _where(function: Any) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"
