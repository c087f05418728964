"""What a function raised, as its caller is told of it."""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from pathlib import Path

from layerzero.ipc.errors import MAX_TEXT, kind_of, text_of

_OURS = str(Path(__file__).parents[2]) + os.sep


def error_of(exc: BaseException, file: str, *, is_import: bool = False) -> list[str]:
    """Type, message and traceback. `file`: of the function; what is above it in the traceback is ours."""
    tb = exc.__traceback__
    while tb is not None and _is_above(tb.tb_frame.f_code.co_filename, file):
        tb = tb.tb_next
    text = "".join(traceback.format_exception(type(exc), exc, tb))
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]}\n...\n{text[-MAX_TEXT // 2 :]}"
    message = text_of(exc)
    if is_import and isinstance(exc, ImportError):
        message += "; its module is imported in this environment: import there only what that has, or in functions"
    return [kind_of(exc), (message + _of_its_folder(exc))[:MAX_TEXT], text]


def _of_its_folder(exc: BaseException) -> str:
    """Where the relative path begins that is not there."""
    name, tb = exc.filename if isinstance(exc, FileNotFoundError) else None, exc.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    is_program = tb is not None and tb.tb_frame.f_globals.get("__name__") == "subprocess"
    if isinstance(name, str) and name and not Path(name).is_absolute() and not is_program:
        with contextlib.suppress(OSError):  # the folder may be gone
            return f"; relative paths begin at {Path.cwd()} in a worker: pass the function an absolute one"
    return ""


def _is_above(frame: str, file: str) -> bool:
    """Whether a frame's file is ours, above the function's. What a module of the environment has is of many files."""
    return frame != file if file else frame.startswith((_OURS, "<frozen importlib")) or frame == importlib.__file__
