"""Manifests of environments, as anyone may drop them into a folder: TOML that is a manifest, or a ConfigError."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import tomllib
from tests.fuzz import scratch, values

from layerzero.envs import manifest
from layerzero.ipc.errors import ConfigError

TYPED = (ConfigError,)
_FOLDER = scratch.folder()
_SAMPLES = Path(__file__).parents[1] / "samples" / "manifests"


def run(data: bytes) -> None:
    path = _FOLDER / "some.toml"
    path.write_bytes(data)
    made = manifest.load(path)
    for variant in made.variants:
        assert made.requirements(variant)
        made.lock_path(variant)
    for name, value in made.env.items():  # as a worker is given them
        os.fsencode(name + value).index(name.encode())
        assert "\0" not in name + value
    assert made.descriptor_path.is_absolute()
    assert not made.provider.endswith(".py") or made.provider_target.startswith(str(_FOLDER.resolve()))


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    try:
        return values.mutated_text(tomllib.loads(data.decode()), rng, _document)
    except (ValueError, TypeError, RecursionError):
        return None


def _document(value: Any) -> str:
    made = value if isinstance(value, dict) else {"value": value}
    return "\n".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in made.items())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps("" if value is None else value)


def seeds() -> dict[str, bytes]:
    builtin = {
        name: (manifest.BUILTIN / f"{name}.toml").read_bytes() for name in ("null", "zentorch", "tokenizers-0.13")
    }
    return {"tiny": (_SAMPLES / "tiny.toml").read_bytes(), **builtin}
