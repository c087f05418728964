"""What a client runs, by which policy may mean it: its program's name, without a folder and without arguments."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MAX_BYTES = 4096  # of a command line: names stand at its beginning
MAX_NAME = 100
_TAKES_A_WORD = ("-W", "-X", "--check-hash-based-pycs")  # options of Python with a value behind them


def program_of(pid: int) -> str:
    """Of a Python program its script or module; "" where it is not to be seen."""
    with suppress(OSError), Path(f"/proc/{pid}/cmdline").open("rb") as file:
        words = file.read(MAX_BYTES).decode(errors="replace").rstrip("\0").split("\0")
        name = Path(words[0]).name
        return _plain(_script(words[1:]) or name if name.startswith("python") else name)
    return ""


def _script(words: list[str]) -> str:
    """What an interpreter was told to run, "" for what was typed in or given by -c."""
    rest = iter(words)
    for word in rest:
        if word == "-m":
            return next(rest, "")
        if word in _TAKES_A_WORD:
            next(rest, "")
        elif word == "-" or (word.startswith("-c") and not word.startswith("--")):
            return ""
        elif not word.startswith("-"):
            return Path(word).name
    return ""


def _plain(name: str) -> str:
    return "".join(one for one in name[:MAX_NAME] if one.isprintable())
