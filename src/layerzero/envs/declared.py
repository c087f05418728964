"""What `lz.env` asks for. A module of its own: a program declares environments each time, and seldom builds them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from packaging.requirements import InvalidRequirement, Requirement

from layerzero.ipc.errors import InvalidArgument

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
PYTHON = re.compile(r"3\.[1-9][0-9]")
DIGITS = 8


@dataclass(frozen=True)
class Declared:
    """What is asked for. `python`: "3.11"."""

    name: str
    requires: tuple[str, ...]
    python: str

    @classmethod
    def of(cls, name: str, requires: Sequence[str], python: str) -> Declared:
        """Raises InvalidArgument."""
        if not NAME.fullmatch(name):
            raise InvalidArgument(f"lz.env: name is {name!r:.80}; allowed: {NAME.pattern}")
        if isinstance(requires, str):
            raise InvalidArgument(f"lz.env: requires is one text; pass a list: requires=[{requires!r:.200}]")
        if not isinstance(python, str) or not PYTHON.fullmatch(python):
            text = f"lz.env: python is {python!r:.80}; allowed: a version such as '3.11', from 3.10 on"
            raise InvalidArgument(f"{text}; an interpreter of yours cannot be used yet")
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
        content = json.dumps([self.requires, self.python])
        return f"{self.name}.{hashlib.sha256(content.encode()).hexdigest()[:DIGITS]}"
