"""docs/settings.md, made from the declarations. `python -m layerzero.broker.configuration.settings_page` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import platformdirs
from pydantic.fields import FieldInfo

from layerzero.broker.configuration.settings import APP, Settings
from layerzero.ipc.vocabulary import policy
from layerzero.ipc.vocabulary.variables import OTHERS, PATHS, PREFIX

HEAD = """# Settings

Everything that can be set by a variable. Made from the declarations in `broker/configuration/settings.py`,
`ipc/vocabulary/policy.py` and `ipc/vocabulary/variables.py`: `python -m layerzero.broker.configuration.settings_page`
prints this page anew, and a test compares the two.

A variable `LAYERZERO_...` that is not listed here has no effect, and `lz` and `lz.connect()` warn of it.

## The broker

For each, the command line (where it has an option) goes before the variable, the variable before `config.toml` in the
user's configuration folder (`~/.config/layerzero`; a setting has its name in small letters there: `timeout_s = 20`),
and that before the default. **A broker reads them when it starts**, from the environment of who starts it: `lz up`, or
the first program that connects where none runs. A broker that runs keeps what it has read until `lz down`;
`lz.connect()` and `lz` warn when `LAYERZERO_POLICY` or `LAYERZERO_MANIFEST_DIRS` name something else than it follows.

Who else reads one: clients read `LAYERZERO_RUNTIME_DIR` and `LAYERZERO_SECRET_FILE` (where the broker is), `lz env` and
`lz matrix` read `LAYERZERO_STORE`, `LAYERZERO_MANIFEST_DIRS`, `LAYERZERO_VARIANT`, `LAYERZERO_OVERLAY` and
`LAYERZERO_WHEELHOUSE`, `lz keys` reads `LAYERZERO_KEYS`, and workers that join read the first two.

| variable | default | values | meaning |
| --- | --- | --- | --- |"""

POLICY = """
## Policy

One for each key of [policy](policy.md), which says what they mean and how a value is written. Clients read them for
their own calls, and a broker for all calls when it starts; those of the broker as a whole are its alone.

| variable | read by |
| --- | --- |"""

OTHER = """
## Others

| variable | default | meaning | read by |
| --- | --- | --- | --- |"""


def page() -> str:
    """The whole page."""
    lines = [HEAD, *map(_setting, Settings.model_fields.items()), POLICY]
    for key in policy.KEYS:
        if key not in policy.WITHOUT_VARIABLE:
            who = "broker" if key in policy.BROKER_WIDE else "client, broker"
            lines.append(f"| `{PREFIX}{key.upper()}` | {who} |")
    lines.append(OTHER)
    for one in OTHERS:
        default = f"`{one.default}`" if one.default.isalnum() else one.default or "none"
        lines.append(f"| `{PREFIX}{one.name}` | {default} | {one.meaning} | {one.reader} |")
    return "\n".join(lines) + "\n"


def _setting(item: tuple[str, FieldInfo]) -> str:
    name, field = item
    return f"| `{PREFIX}{name.upper()}` | {_default(field)} | {_values(name, field)} | {field.description} |"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "`$XDG_RUNTIME_DIR/layerzero`, or `/tmp/layerzero-UID`"
    value = field.default
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Path):
        for folder, text in (
            (platformdirs.user_cache_path(APP), "cache"),
            (platformdirs.user_config_path(APP), "config"),
        ):
            if value.is_relative_to(folder):
                return f"`{Path('~') / f'.{text}' / APP / value.relative_to(folder)}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _values(name: str, field: FieldInfo) -> str:
    if name in PATHS or name in ("runtime_dir", "overlay"):
        return "paths" if name.endswith("dirs") else "path"
    if field.annotation is bool:
        return "true, false"
    if choices := get_args(field.annotation):
        return ", ".join(map(str, choices))
    if field.annotation is str:
        return "text"
    unit = "seconds" if name.endswith("_s") else "number"
    return " ".join([unit, *_bounds(field)])


def _bounds(field: FieldInfo) -> Iterator[str]:
    """Of a number; pydantic keeps `gt=0, le=9` as objects with those attributes."""
    words: Mapping[str, str] = {"gt": "above", "ge": "from", "le": "to"}
    parts: list[Any] = [*field.metadata, *(more for one in field.metadata for more in getattr(one, "metadata", ()))]
    for attribute, word in words.items():
        for part in parts:
            if (bound := getattr(part, attribute, None)) is not None:
                yield f"{word} {bound:,}"


if __name__ == "__main__":
    print(page(), end="")
