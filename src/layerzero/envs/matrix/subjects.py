"""What the matrix has rows for: our backends, the others of subjects.toml, and requirements as a user types them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import tomllib
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from layerzero.envs.manifest import EnvManifest, discover
from layerzero.ipc.errors import ConfigError

FOLDER = Path(__file__).resolve().parent
PYTHON = "3.11"


@dataclass(frozen=True)
class Subject:
    """One row. `requirements` is what its users install. `needs` and `env` are what it takes beyond its metadata to
    make it work: further requirements, and settings of the process."""

    name: str
    requirements: tuple[str, ...]
    needs: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = PYTHON
    imports: tuple[str, ...] = ()  # empty: the top-level modules of the required distributions
    probe: Path | None = None  # a file of probes/; None: importing is all that is tried
    backend: str = ""  # the environment of ours that serves it

    @property
    def distributions(self) -> tuple[str, ...]:
        """Canonical names of what it requires directly."""
        return tuple(canonicalize_name(Requirement(text).name) for text in self.requirements)

    def with_need(self, requirement: str) -> Subject:
        """The same, and it is known to need this, too."""
        return self if requirement in self.needs else replace(self, needs=(*self.needs, requirement))

    @property
    def care(self) -> tuple[str, ...]:
        """`needs` and `env` as text, but for settings that only name a folder."""
        return (*self.needs, *(f"{name}={value}" for name, value in self.env.items() if "{" not in value))


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "subjects.toml").read_text(encoding="utf-8"))


def choose(words: Sequence[str] = (), folders: Sequence[Path] = ()) -> list[Subject]:
    """The subjects that the words name: rows of subjects.toml, environments, or requirements separated by spaces such
    as "onnxruntime==1.16.3 numpy<2". All rows of subjects.toml without words. Raises ConfigError."""
    manifests, _ = discover(folders)
    names = words or tuple(_data()["subjects"])
    return [_subject(name, manifests) for name in dict.fromkeys(names)]


def _subject(word: str, manifests: Mapping[str, EnvManifest]) -> Subject:
    row = _data()["subjects"].get(word)
    backend = row.get("backend", "") if row else word if word in manifests else ""
    if backend:
        return _of_manifest(word, manifests[backend])
    if row is None:
        return _known(word, _requirements(word, manifests))
    return _known(word, tuple(row["requirements"]), needs=tuple(row.get("needs", ())), env=row.get("env", {}))


def _of_manifest(name: str, manifest: EnvManifest) -> Subject:
    if "cpu" not in manifest.variants:
        raise ConfigError(
            f"{manifest.name} has no environment to share: "
            + ("it runs in the broker's own interpreter" if not manifest.variants else "it has no variant 'cpu'")
        )
    assert manifest.python is not None
    found = _known(name, manifest.variants["cpu"].requirements)
    return Subject(
        name=name,
        requirements=found.requirements,
        env=manifest.env,
        python=manifest.python,
        imports=found.imports,
        probe=found.probe,
        backend=manifest.name,
    )


def _known(
    name: str, requirements: tuple[str, ...], *, needs: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> Subject:
    """A subject with the imports and the probe of its first requirement's distribution, if that is a known one."""
    distribution = canonicalize_name(Requirement(requirements[0]).name)
    known = _data()["distributions"].get(distribution, {})
    probe = FOLDER / "probes" / f"{known.get('probe', distribution)}.py"
    return Subject(
        name=name,
        requirements=requirements,
        needs=needs,
        env=env or {},
        imports=tuple(known.get("imports", ())),
        probe=probe if known else None,
    )


def _requirements(word: str, manifests: Mapping[str, EnvManifest]) -> tuple[str, ...]:
    try:
        parsed = [Requirement(part) for part in word.split()]
    except InvalidRequirement as exc:
        known = sorted({*_data()["subjects"], *manifests})
        raise ConfigError(
            f"{word!r} is neither a subject nor requirements; allowed: {', '.join(known)}, or requirements separated "
            f'by spaces, such as "onnxruntime==1.16.3 numpy<2"'
        ) from exc
    if not parsed:
        raise ConfigError("a subject must not be empty")
    for requirement in parsed:
        if requirement.url is not None:
            raise ConfigError(f"{word!r}: {requirement.url} is a URL; only names with versions can be locked by hash")
    return tuple(map(str, parsed))
