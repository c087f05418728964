"""Names of modules that an environment has, as callers name them: which may be named, and what they are."""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from types import ModuleType
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Code
from layerzero.ipc.functions.surface import is_coroutine, is_stream, surface_of

MAX_NAME = 500
OURS = "layerzero"


def find(code: Code) -> Any:
    """What the name leads to. Raises InvalidArgument for what may not be named and for a module that is not there,
    AttributeError, and what a module raises when it is imported."""
    for part in [*code.module.split("."), *(code.qualname.split(".") if code.qualname else [])]:
        if not part.isidentifier() or part.startswith("_"):
            raise InvalidArgument(f"{code.label:.200} cannot be named: {part!r:.80} is no public name")
    if len(code.label) > MAX_NAME:
        raise InvalidArgument(f"a name of {len(code.label)} characters; allowed: {MAX_NAME}")
    _demand_packages(code.module)
    found: Any = _imported(code.module)
    for part in code.qualname.split(".") if code.qualname else ():
        if not isinstance(found, (ModuleType, type)):
            raise InvalidArgument(f"{code.label:.200} cannot be named: what {part} is asked of is no module or class")
        found = _part(found, part)
    _demand_own(found, code)
    return found


def _demand_packages(module: str) -> None:
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == OURS:
        whose = "LayerZero's own" if top == OURS else "of the standard library"
        text = f"{module:.200} is {whose}; allowed: modules of the environment's packages"
        raise InvalidArgument(f"{text}; write a function for it, and decorate that")


def _imported(name: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not (name == exc.name or name.startswith(f"{exc.name}.")):
            raise  # what it imports is missing
        text = f"this environment has no module {name:.200}; add the package that has it to its requires"
        text += ", or install it into the interpreter that it is from"
        raise InvalidArgument(text) from None
    _demand_installed(module)
    return module


def _demand_installed(module: ModuleType) -> None:
    """Raises InvalidArgument for a module that lies elsewhere."""
    where = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ()) or ()), None)
    prefix = os.path.realpath(sys.prefix) + os.sep
    if not isinstance(where, str) or not os.path.realpath(where).startswith(prefix):
        raise InvalidArgument(f"{module.__name__:.200} is no module of this environment's packages: {where}")


def _part(owner: Any, part: str) -> Any:
    try:
        found = getattr(owner, part)
    except AttributeError:
        if not isinstance(owner, ModuleType) or not hasattr(owner, "__path__"):
            raise
        try:
            return _imported(f"{owner.__name__}.{part}")
        except InvalidArgument:
            pass  # there is no such module, either
        raise
    if isinstance(found, ModuleType):
        _demand_packages(found.__name__)
        _demand_installed(found)
    return found


def _demand_own(found: Any, code: Code) -> None:
    """Raises InvalidArgument for what a module has of the standard library: it is nobody's to be called from afar."""
    if isinstance(found, ModuleType) or not callable(found):
        return
    of = getattr(found, "__module__", None)
    name = getattr(found, "__name__", None)
    is_builtin = isinstance(name, str) and getattr(builtins, name, None) is found
    top = of.partition(".")[0] if isinstance(of, str) else ""
    if is_builtin or (top != "builtins" and (top in sys.stdlib_module_names or top == OURS)):
        text = f"{code.label:.200} is {of}.{name}, not the module's own"
        raise InvalidArgument(f"{text}; write a function for it, and decorate that")


def told_of(found: Any) -> list[Any]:
    """What a name is, and the value of one that is neither function, class nor module."""
    if isinstance(found, ModuleType):
        return [frames.MODULE]
    if isinstance(found, type):
        return [frames.CLASS, *surface_of(found).to_tree()]
    if callable(found):
        return [frames.FUNCTION, is_stream(found), is_coroutine(found)]
    return [frames.VALUE, found]
