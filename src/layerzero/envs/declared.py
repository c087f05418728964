"""What `lz.env` asks for. A module of its own: a program declares environments each time, and seldom builds them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from packaging.requirements import InvalidRequirement, Requirement

from layerzero.ipc.errors import ConfigError, InvalidArgument

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]{0,254}")
PYTHON = re.compile(r"3\.[1-9][0-9]")
DIGITS = 8
MAX_LOCK_BYTES = 8 << 20
_ANY = "3.10"  # of no meaning where an interpreter or an image is named


@dataclass(frozen=True)
class Declared:
    """What is asked for. `python`: "3.11"; empty where `interpreter`, an absolute path, is the one to use. `lock`: the
    absolute path of the lock file that it holds to, empty for none; `lock_text`: what that has, None where it is not
    there. `image`: of the containers that its workers join from; empty where the broker starts them."""

    name: str
    requires: tuple[str, ...]
    python: str
    interpreter: str = ""
    lock: str = ""
    lock_text: str | None = field(default=None, repr=False)
    image: str = ""

    @classmethod
    def of(
        cls,
        name: str,
        requires: Sequence[str],
        python: str,
        interpreter: str | os.PathLike[str] | None = None,
        lock: str | os.PathLike[str] | None = None,
        image: str | None = None,
    ) -> Declared:
        """Raises InvalidArgument, and ConfigError for a lock that cannot be read."""
        if image is not None:
            if requires or interpreter is not None or lock is not None:
                text = "has its Python and its packages; leave requires, from_interpreter and lock out"
                raise InvalidArgument(f"lz.env: an image {text}")
            if not isinstance(image, str) or not IMAGE.fullmatch(image):
                raise InvalidArgument(f"lz.env: image is {image!r:.80}; allowed: a name such as 'registry/old-numpy:1'")
            return replace(cls.of(name, (), _ANY), python="", image=image)
        if lock is not None:
            if interpreter is not None:
                text = "nothing is installed into an interpreter of yours; `requires` is what it must have"
                raise InvalidArgument(f"lz.env: lock and from_interpreter are both named: {text}")
            return cls.of(name, requires, python).with_lock(_path(lock))
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

    def with_lock(self, path: str) -> Declared:
        """The same, with what that file has now. Raises ConfigError."""
        try:
            with open(path, "rb") as file:
                content = file.read(MAX_LOCK_BYTES + 1)
            if len(content) > MAX_LOCK_BYTES:
                raise ConfigError(f"{path}: larger than {MAX_LOCK_BYTES:,} bytes, the most that a lock may have")
            text: str | None = content.decode()
        except FileNotFoundError:
            text = None
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"lz.env: lock {path} cannot be read: {exc}") from exc
        return replace(self, lock=path, lock_text=text)

    @cached_property
    def backend(self) -> str:
        """The name of its backend: of the manifest, too."""
        asked: list[object] = [self.requires, self.python, *([self.interpreter] if self.interpreter else [])]
        if self.image:
            asked.append({"image": self.image})
        if self.lock:  # the same on every machine that has the file, wherever it lies
            asked.append({"lock": hashlib.sha256((self.lock_text or "").encode()).hexdigest()})
        return f"{self.name}.{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:DIGITS]}"


def _path(lock: str | os.PathLike[str]) -> str:
    text = os.fspath(lock) if isinstance(lock, (str, os.PathLike)) else lock
    if not isinstance(text, str) or not text or not text.isprintable():
        raise InvalidArgument(f"lz.env: lock is {lock!r:.80}; allowed: the path of a file that lz env lock writes")
    return os.path.abspath(os.path.expanduser(text))


def _absolute(interpreter: str | os.PathLike[str]) -> str:
    """The path of it, or of the folder that it is in, as it is named: links of a venv are what makes it one."""
    text = os.fspath(interpreter) if isinstance(interpreter, (str, os.PathLike)) else interpreter
    if not isinstance(text, str) or not text or not text.isprintable():
        shown = f"lz.env: from_interpreter is {interpreter!r:.80}"
        raise InvalidArgument(f"{shown}; allowed: the path of a Python, or of the folder of a venv")
    return os.path.abspath(os.path.expanduser(text))
