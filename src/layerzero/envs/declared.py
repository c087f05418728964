"""What `lz.env` asks for. A module of its own: a program declares environments each time, and seldom builds them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from packaging.requirements import InvalidRequirement, Requirement

from layerzero.ipc.errors import InvalidArgument

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
PYTHON = re.compile(r"3\.[1-9][0-9]")
DIGITS = 8
_ANY = "3.10"  # of no meaning where an interpreter is named


@dataclass(frozen=True)
class Declared:
    """What is asked for. `python`: "3.11"; empty where `interpreter`, an absolute path, is the one to use."""

    name: str
    requires: tuple[str, ...]
    python: str
    interpreter: str = ""

    @classmethod
    def of(
        cls, name: str, requires: Sequence[str], python: str, interpreter: str | os.PathLike[str] | None = None
    ) -> Declared:
        """Raises InvalidArgument."""
        if interpreter is not None:
            return replace(cls.of(name, requires, _ANY), python="", interpreter=_absolute(interpreter))
        if not NAME.fullmatch(name):
            raise InvalidArgument(f"lz.env: name is {name!r:.80}; allowed: {NAME.pattern}")
        if isinstance(requires, str):
            raise InvalidArgument(f"lz.env: requires is one text; pass a list: requires=[{requires!r:.200}]")
        if not isinstance(python, str) or not PYTHON.fullmatch(python):
            text = f"lz.env: python is {python!r:.80}; allowed: a version such as '3.11', from 3.10 on"
            raise InvalidArgument(f"{text}; an interpreter of yours is from_interpreter={python!r:.200}")
        for text in requires:
            try:
                if Requirement(text).url is not None:
                    raise InvalidArgument(f"lz.env: {text!r:.200} names a URL; locks name versions: pass NAME==VERSION")
            except (InvalidRequirement, TypeError) as exc:
                raise InvalidArgument(f"lz.env: {text!r:.200} is no requirement such as 'numpy<2'") from exc
        return cls(name, tuple(sorted(set(requires))), python)

    @cached_property
    def backend(self) -> str:
        """The name of its backend: of the manifest, too."""
        content = json.dumps([self.requires, self.python, *([self.interpreter] if self.interpreter else [])])
        return f"{self.name}.{hashlib.sha256(content.encode()).hexdigest()[:DIGITS]}"


def _absolute(interpreter: str | os.PathLike[str]) -> str:
    """The path of it, or of the folder that it is in, as it is named: links of a venv are what makes it one."""
    text = os.fspath(interpreter) if isinstance(interpreter, (str, os.PathLike)) else interpreter
    if not isinstance(text, str) or not text or not text.isprintable():
        shown = f"lz.env: from_interpreter is {interpreter!r:.80}"
        raise InvalidArgument(f"{shown}; allowed: the path of a Python, or of the folder of a venv")
    return os.path.abspath(os.path.expanduser(text))
