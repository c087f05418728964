"""What files of a project ask for: requirements files, pyproject.toml, the inline metadata of scripts (PEP 723)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.ipc.errors import ConfigError

SCRIPT = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")  # PEP 723's own expression
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Asked:
    """`name`: what an environment of it is called, unless somebody says so."""

    name: str
    requires: tuple[str, ...]


def of_file(path: Path, *, extras: Sequence[str], python: str) -> Asked:
    """By the kind of the file. `extras` are of a pyproject.toml; `python`, as "3.11", must be one that a script is for.
    Raises ConfigError."""
    if path.is_dir() or path.suffix == ".toml":
        return of_pyproject(path, extras)
    return of_script(path, python) if path.suffix == ".py" else of_requirements(path)


def of_requirements(path: str | os.PathLike[str]) -> Asked:
    """Its requirements, one a line. Raises ConfigError for options (-r, -e, --hash ...): the lock has hashes of its
    own."""
    file, requires = Path(path), []
    for number, line in enumerate(_read(file).splitlines(), start=1):
        text = re.sub(r"(^|\s)#.*$", "", line).strip()
        if text.startswith("-") or text.endswith("\\") or " --" in text:
            raise ConfigError(f"{file}:{number}: {text!r:.80} is an option; allowed: requirements, one a line")
        if text:
            requires.append(text)
    return Asked(_name(file.stem), tuple(requires))


def of_pyproject(path: str | os.PathLike[str], extras: Sequence[str] = ()) -> Asked:
    """The `dependencies` of a project, and those of its optional `extras`. Raises ConfigError."""
    file = Path(path)
    file = file / "pyproject.toml" if file.is_dir() else file
    project = _toml(_read(file), str(file)).get("project")
    if not isinstance(project, dict):
        raise ConfigError(f"{file}: has no table [project]; name the requirements with lz.env(requires=...)")
    requires = list(_texts(project.get("dependencies", []), f"{file}: project.dependencies"))
    optional = project.get("optional-dependencies", {})
    for extra in extras:
        if extra not in optional:
            raise ConfigError(f"{file}: project.optional-dependencies has no {extra!r}; it has: {', '.join(optional)}")
        requires += _texts(optional[extra], f"{file}: project.optional-dependencies.{extra}")
    return Asked(_name(str(project.get("name", file.absolute().parent.name))), tuple(requires))


def of_script(path: str | os.PathLike[str], python: str) -> Asked:
    """The `dependencies` of its inline metadata. `requires-python` is compared with `python`, as "3.11". Raises
    ConfigError."""
    file = Path(path)
    blocks = [match.group("content") for match in SCRIPT.finditer(_read(file))]
    if len(blocks) != 1:
        raise ConfigError(f"{file}: has {len(blocks)} blocks '# /// script'; allowed: one (PEP 723)")
    text = "".join(line[2:] if line.startswith("# ") else line[1:] for line in blocks[0].splitlines(keepends=True))
    data = _toml(text, str(file))
    wanted = data.get("requires-python")
    if wanted is not None:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        try:
            is_fit = SpecifierSet(wanted).contains(f"{python}.99")
        except (InvalidSpecifier, TypeError) as exc:
            raise ConfigError(f"{file}: requires-python is {wanted!r:.80}; allowed: such as '>=3.11'") from exc
        if not is_fit:
            raise ConfigError(f"{file}: requires-python is {wanted}, and Python {python} would be used; pass python=")
    return Asked(_name(file.stem), tuple(_texts(data.get("dependencies", []), f"{file}: dependencies")))


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{file}: larger than {MAX_FILE_BYTES:,} bytes, the most that such a file may have")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file}: cannot be read: {exc}") from exc


def _toml(text: str, where: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{where}: cannot be read as TOML: {exc}") from exc


def _texts(value: object, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{where}: must be a list of texts")
    return value


def _name(text: str) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-_")[:40] or "script"
