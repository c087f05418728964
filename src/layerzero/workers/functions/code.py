"""Users' modules in a worker: loaded from files whose hash the caller names, and nothing else of the caller's.

Functions of different programs may have helper modules of one name: what was imported from below a root is set aside
while functions of another root run, and imported anew once a function's file has changed.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions import values
from layerzero.ipc.functions.frames import Code
from layerzero.workers.functions import installed

MAIN = "__lz_main__"  # what the caller's __main__ is called here, so that its `if __name__ == "__main__"` is not run
MAX_FILE_BYTES = 64 << 20


class _Checked(importlib.machinery.SourceFileLoader):
    """Runs the very bytes that were hashed, and reads or writes no bytecode."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_data(self, path: str) -> bytes:
        return self._source if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.path)


class _Unwritten(importlib.machinery.SourceFileLoader):
    """Leaves no bytecode beside what it loads."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """As SourceLoader: nothing."""


_find_unwritten = importlib.machinery.FileFinder.path_hook(
    (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
    (_Unwritten, importlib.machinery.SOURCE_SUFFIXES),
    (importlib.machinery.SourcelessFileLoader, importlib.machinery.BYTECODE_SUFFIXES),
)


def _find(path: str) -> Any:
    """As a hook of sys.path_hooks: bytecode is written into the environment alone, whose next start it shortens."""
    if path.startswith(sys.prefix + os.sep):
        raise ImportError(path)
    return _find_unwritten(path)


@dataclass
class _Root:
    """What was imported from below a root: functions' modules with the hashes of their files, and all others."""

    loaded: dict[str, tuple[Code, ModuleType]] = field(default_factory=dict)
    modules: dict[str, ModuleType] = field(default_factory=dict)


class Modules:
    """The modules of all functions that were called here."""

    def __init__(self) -> None:
        self._path = list(sys.path)
        self._roots: dict[str, _Root] = {}
        self._root = ""
        self.on_change: Callable[[], object] = lambda: None  # a file has changed: functions may be others from now on
        self._last: tuple[Code | None, Any] = (None, None)
        if _find not in sys.path_hooks:
            sys.path_hooks.insert(0, _find)
            sys.path_importer_cache.clear()

    def function(self, code: Code) -> Any:
        """The function of a reference; its module is imported where that is needed. Raises InvalidArgument; what the
        module raises when it is imported is raised as it is."""
        if code is self._last[0]:
            return self._last[1]
        target = self.named_by(code)
        if not callable(target):
            where = "this environment" if code.is_installed else code.file
            raise InvalidArgument(f"{where} has no function {code.label:.200}; name one of the top of a module")
        self._last = (code, target)
        return target

    def named_by(self, code: Code) -> Any:
        """What a reference names: a function, a class, a module, a value. Raises as `function`, and
        AttributeError where there is no such name."""
        if code.is_installed:
            self.enter(code)
            return installed.find(code)
        module = self._module(code)
        first, *others = code.qualname.split(".")
        if any(part.startswith("_") for part in others):
            raise InvalidArgument(f"{code.label:.200} cannot be named: names of a class are public ones")
        target: Any = getattr(module, first, None)
        for part in others:
            target = getattr(target, part)
        return target

    def enter(self, code: Code) -> None:
        """Let what is below the root of a reference be imported, as when its module was."""
        if code.root != self._root:
            self._last = (None, None)
            self._enter(code.root)

    def named(self, module: str, qualname: str) -> Any:
        """A class of an argument. Raises InvalidArgument."""
        try:
            found: Any = sys.modules.get(self._own_name(module)) or importlib.import_module(module)
        except Exception as exc:
            raise InvalidArgument(f"{module} cannot be imported in this environment: {exc!s:.300}") from exc
        for part in qualname.split("."):
            found = getattr(found, part, None)
        return found

    def _own_name(self, module: str) -> str:
        return MAIN if module == "__main__" else module

    def _module(self, code: Code) -> ModuleType:
        self._enter(code.root)
        root = self._roots[code.root]
        name = self._own_name(code.module)
        known = root.loaded.get(name)
        if known is not None and known[0].sha256 == code.sha256 and known[0].file == code.file:
            return known[1]
        source = _read(code)
        if known is not None:  # the file has changed: so may have its helpers
            self._drop_modules()
            root.loaded.clear()
            self.on_change()
        taken = sys.modules.get(name)
        where = getattr(taken, "__file__", None)
        if taken is not None and not (where and _same(where, code.file)):
            raise InvalidArgument(
                f"the name {name} is taken in this environment by {where or 'a built-in module'}; rename {code.file}"
            )
        parent = name.rpartition(".")[0]
        if parent:
            importlib.import_module(parent)
        module = self._load(name, code.file, source)
        root.loaded[name] = (code, module)
        return module

    def _load(self, name: str, path: str, source: bytes) -> ModuleType:
        loader = _Checked(name, path, source)
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        before = sys.modules.get(name)
        sys.modules[name] = module
        shown = sys.stdout, sys.stderr
        try:
            loader.exec_module(module)
        except BaseException:
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before
            raise
        finally:
            sys.stdout, sys.stderr = shown  # a script may have its own in its process; here they are everybody's
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
        return module

    def _enter(self, root: str) -> None:
        if root == self._root:
            return
        if self._root:
            self._roots[self._root].modules = self._drop_modules()
        self._root = root
        sys.path[:] = [
            *self._path,
            *([root] if root else []),
        ]  # last: a user's file never goes before what the environment has
        importlib.invalidate_caches()
        sys.modules.update(self._roots.setdefault(root, _Root()).modules)

    def _drop_modules(self) -> dict[str, ModuleType]:
        """Take the modules from below the present root out of sys.modules."""
        found = {name: module for name, module in list(sys.modules.items()) if self._is_users(module)}
        for name in found:
            del sys.modules[name]
        importlib.invalidate_caches()
        return found

    def _is_users(self, module: ModuleType) -> bool:
        where = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ()) or ()), None)
        if not isinstance(where, str) or not where.startswith(self._root + os.sep):
            return False
        ours = [sys.prefix, *(path for path in self._path if path)]
        return not any(where.startswith(path + os.sep) for path in ours if path != self._root)


def _read(code: Code) -> bytes:
    """The file's bytes, which have the hash."""
    try:
        if os.stat(code.file).st_size > MAX_FILE_BYTES:
            raise InvalidArgument(
                f"{code.file} is larger than {MAX_FILE_BYTES:,} bytes, the most that a module may have"
            )
        with open(code.file, "rb") as file:
            demand_own(code.file, os.fstat(file.fileno()).st_uid)
            demand_own(code.root, os.stat(code.root).st_uid)
            source = file.read()
    except OSError as exc:
        text = f"{code.file} cannot be read by the worker: {exc.strerror}; functions are imported from their files"
        raise InvalidArgument(text) from exc
    found = hashlib.sha256(source).hexdigest()
    if found != code.sha256:
        text = f"{code.file} has changed since your program imported it; start the program again"
        raise InvalidArgument(text, expected=code.sha256, found=found)
    return source


def demand_own(path: str, uid: int) -> None:
    """Others who may call a broker must not have their code run as its user."""
    if uid not in (0, os.geteuid()):
        text = f"{path} belongs to user {uid}, and the worker is user {os.geteuid()}"
        raise InvalidArgument(f"{text}; functions are taken from its own files and root's alone")


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def renamed(tree: Any) -> Any:
    """Classes of the caller's __main__ by the name that they have there."""
    if type(tree) is list and tree:
        if tree[0] in (values.ENUM, values.DATACLASS) and tree[1] == MAIN:
            tree[1] = "__main__"
        if tree[0] != values.ARRAY:
            for item in tree:
                renamed(item)
    return tree
