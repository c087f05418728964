"""One run of libFuzzer over one target, in a process of its own, which it ends. Started by `python -m tests.fuzz`.

usage: python -m tests.fuzz.engine TARGET [libFuzzer's arguments]
"""

from __future__ import annotations

import random
import sys
from importlib import import_module

import atheris

with atheris.instrument_imports(include=["layerzero"], enable_loader_override=False):
    target = import_module(f"tests.fuzz.{sys.argv[1]}")

from tests.fuzz.budget import Checked  # what is not under test is not instrumented


def _mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Of what the target calls a value, a value is changed half of the time; the rest is libFuzzer's."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        changed = target.mutate(data, rng)
        if changed is not None and len(changed) <= max_size:
            return bytes(changed)
    return bytes(atheris.Mutate(data, max_size))


def main() -> None:
    more = {"custom_mutator": _mutate} if hasattr(target, "mutate") else {}
    atheris.Setup([sys.argv[0], *sys.argv[2:]], Checked(target), **more)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
