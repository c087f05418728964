"""The commands of `lz` together: their order, and errors as readable blocks."""

from __future__ import annotations

import errno
import subprocess
import traceback
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from layerzero.client.cli.options import JSON

if TYPE_CHECKING:
    from layerzero.ipc.errors import LayerZeroError

_FIRST = ("up", "down", "status", "doctor", "env", "run", "explain", "ops", "types", "tune", "logs")


class Group(TyperGroup):
    """Prints a LayerZeroError as one readable block, and a file that cannot be read or written likewise."""

    def list_commands(self, ctx: Any) -> list[str]:
        """What a newcomer needs first; the rest as it was added."""
        return [*_FIRST, *(name for name in super().list_commands(ctx) if name not in _FIRST)]

    def invoke(self, ctx: Any) -> Any:
        from layerzero.ipc.errors import LayerZeroError

        try:
            return super().invoke(ctx)
        except (LayerZeroError, OSError) as exc:
            error = _of_a_file(exc) if isinstance(exc, OSError) else exc
            if error is None or ctx.params["traceback"]:
                raise
            from layerzero.client.cli.output import show_error

            raise typer.Exit(show_error(error, as_json=ctx.meta.get(JSON, False))) from exc


def _of_a_file(exc: OSError) -> LayerZeroError | None:
    """What to do about a file, a full disk or a program; None of what is about neither."""
    from layerzero.ipc.errors import EnvError, InvalidArgument, LayerZeroError

    if exc.errno == errno.ENOSPC:  # of which a write says no file
        return LayerZeroError(f"make room on the disk: {exc}")
    if exc.errno is None or exc.filename is None:
        return None
    *_, (frame, _) = traceback.walk_tb(exc.__traceback__)
    if frame.f_globals.get("__name__") == subprocess.__name__:
        return EnvError(f"install {exc.filename}, which is to be run: {exc.strerror}")
    return InvalidArgument(f"name another file or folder than {exc.filename}: {exc.strerror}")
