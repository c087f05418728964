"""lz.module: functions, classes and values of a module that an environment has, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerzero.functions.environment import FunctionEnv, env_of
from layerzero.functions.isolated import Isolated
from layerzero.functions.names import look_up
from layerzero.functions.objects import IsolatedClass
from layerzero.functions.options import Options, options_of
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Code
from layerzero.ipc.functions.surface import Surface


def module(
    name: str, env: FunctionEnv | Sequence[str], *, timeout_s: float | None = None, idempotent: bool = False
) -> Module:
    """A module of an environment: its functions are called there, without any source file of the program's.

    name: dotted, such as "cv2" or "scipy.signal"; of a package that the environment requires, not of the standard
    library. env: what lz.env gives, or a list of requirements. timeout_s, idempotent: as of lz.isolated, for all its
    functions and classes. Nothing is imported before one of its names is used. Raises InvalidArgument.
    """
    parts = name.split(".") if isinstance(name, str) else [""]
    if any(not part.isidentifier() or part.startswith("_") for part in parts):
        raise InvalidArgument(f"lz.module: {name!r:.80} is no public name of a module; allowed: such as 'scipy.signal'")
    options = options_of(Options, timeout_s=timeout_s, idempotent=idempotent)
    return Module(Code.installed(name, ""), env_of(env, parts[0]), options)


class Module:
    """A module of an environment. Its public names are asked of the environment when they are used first: functions and
    classes are those of lz.isolated, modules are ones like this, and values come here, each time anew."""

    __slots__ = ("_lz_code", "_lz_env", "_lz_known", "_lz_options")

    def __init__(self, code: Code, where: FunctionEnv, options: Options) -> None:
        self._lz_code, self._lz_env, self._lz_options = code, where, options
        self._lz_known: dict[str, Any] = {}  # functions, classes and modules; values may change

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError for what it does not have, InvalidArgument where the environment does not have it, and
        as a call does."""
        if name.startswith("_"):
            raise AttributeError(f"{self!r} shows no {name}: names with an underscore stay in its environment")
        if name in self._lz_known:
            return self._lz_known[name]
        where, options, code = self._lz_env, self._lz_options, _under(self._lz_code, name)
        match look_up(code, where, options):
            case [frames.VALUE, value]:
                return value
            case [frames.MODULE]:
                found: Any = Module(code, where, options)
            case [frames.FUNCTION, bool(is_stream), bool(is_coroutine)]:
                found = Isolated(None, where, options, code, is_stream=is_stream, is_coroutine=is_coroutine)
            case [frames.CLASS, Surface() as surface]:
                found = IsolatedClass(None, surface, where, options, code, "error")
        return self._lz_known.setdefault(name, found)

    def __reduce__(self) -> Any:
        return Module, (self._lz_code, self._lz_env, self._lz_options)

    def __repr__(self) -> str:
        return f"<lz.module {self._lz_code.label} in {self._lz_env.backend}>"


def _under(code: Code, name: str) -> Code:
    return Code.installed(code.module, f"{code.qualname}.{name}" if code.qualname else name)
