"""Who owns which file of an environment, by the RECORDs of what is installed."""

from __future__ import annotations

import base64
import csv
import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

_SUFFIXES = (".py", ".so")


@dataclass(frozen=True)
class Shared:
    """Files that two or more distributions own: with different contents, and with the same."""

    owners: tuple[str, ...]
    different: tuple[str, ...]
    same: tuple[str, ...]
    winner: str  # whose content the first of `different` has; empty for nobody's


def records(site: Path) -> dict[str, dict[str, str]]:
    """Canonical distribution name -> path in its RECORD -> its hash there."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(site.glob("*.dist-info/RECORD")):
        name = canonicalize_name(path.parent.name.partition("-")[0])
        rows = csv.reader(path.read_text(encoding="utf-8").splitlines())
        found[name] = {row[0]: row[1] for row in rows if len(row) >= 2 and row[1]}
    return found


def shared_files(site: Path) -> list[Shared]:
    """Every group of distributions that own files in common."""
    listed = records(site)
    owners: dict[str, list[str]] = defaultdict(list)
    for name, files in listed.items():
        for file in files:
            owners[file].append(name)
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for file, owning in owners.items():
        if len(owning) > 1:
            groups[tuple(owning)].append(file)
    result = []
    for names, paths in sorted(groups.items()):
        different = tuple(file for file in sorted(paths) if len({listed[name][file] for name in names}) > 1)
        same = tuple(sorted(set(paths) - set(different)))
        winner = ""
        if different and (site / different[0]).is_file():
            content = _hash(site / different[0])
            winner = next((name for name in names if listed[name][different[0]] == content), "")
        result.append(Shared(names, different, same, winner))
    return result


def modules(site: Path, distributions: tuple[str, ...]) -> tuple[str, ...]:
    """Top-level modules that the named distributions bring, but for private ones."""
    listed = records(site)
    found: dict[str, None] = {}
    for name in distributions:
        for file in listed.get(name, {}):
            parts = Path(file).parts
            is_package = len(parts) == 2 and parts[1] == "__init__.py"
            is_module = len(parts) == 1 and file.endswith(_SUFFIXES)
            module = parts[0].partition(".")[0]
            if (is_package or is_module) and module.isidentifier() and not module.startswith("_"):
                found[module] = None
    return tuple(found)


def _hash(path: Path) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"
