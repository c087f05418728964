"""Which release a version is, with which Python and which requirements: asked of the resolver, which has all of the
user's indexes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from layerzero.envs.build import interpreters
from layerzero.envs.build.installers import Uv
from layerzero.envs.build.lock import lock as write_lock
from layerzero.envs.build.lock import read_lock
from layerzero.envs.manifest import EnvManifest, VariantName
from layerzero.envs.matrix.bisect import above
from layerzero.envs.matrix.resolver import Refused, resolve, the_uv
from layerzero.envs.versions import declaration
from layerzero.envs.versions.declaration import Declared, Wanted
from layerzero.ipc.errors import ConfigError, EnvError
from layerzero.ipc.names import unknown_name

OLDEST = 10  # the minor of the oldest Python that worker code runs on


def declare(
    wanted: Wanted,
    found: Mapping[str, EnvManifest],
    store: Path,
    *,
    variant: VariantName = "cpu",
    beside: Sequence[str] = (),
    python: str | None = None,
    tool: Uv | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> EnvManifest:
    """Choose the newest release that satisfies `wanted`, lock it, and write its manifest. `found`: all manifests, of
    which one is its template. `beside`: requirements in the place of the template's of the same names, or further ones.
    `python`: "3.11", None for the first that has a release and a lock: the template's own, then the others that are
    here. `tool`: uv with flags of its own. `say` takes what is done, and says of which version. Raises ConfigError, and
    EnvError with what the resolver says."""
    base = template(wanted, found)
    own = base.variant_for(variant)
    if own not in base.variants:
        raise ConfigError(f"{base.name} has no variant {variant!r}; allowed: {', '.join(base.variants)}")
    main = main_requirement(base, own)
    refusals: list[EnvError] = []
    for minor in _pythons(base, python):
        try:
            say(f"looking for a release for Python {minor}")
            release = newest(main, wanted, minor, tool)
            asked = requirements(base.variants[own].requirements, main, release, beside)
            declared = Declared(base.name, Version(release).public, minor, own, asked)
            say(f"resolving {declared.name}: {', '.join(asked)}")
            return _locked(declared, base, store, tool)
        except EnvError as exc:
            refusals.append(exc)
    first, here = refusals[0], ", ".join(interpreters.available())
    text = f"{first.message}\nPythons that are here: {here}; uv python install 3.X brings another"
    raise EnvError(text, **first.facts)


def template(wanted: Wanted, found: Mapping[str, EnvManifest]) -> EnvManifest:
    """Its backend. Raises ConfigError for one that is not here, or cannot have versions."""
    base = found.get(wanted.backend)
    if base is None or base.version_of is not None:
        names = sorted(name for name, one in found.items() if one.version_of is None)
        raise ConfigError(unknown_name("environment", wanted.backend, names))
    if base.interpreter == "host" or base.provider == "functions":
        raise ConfigError(f"{base.name} has no library of its own environment, so no versions of it")
    if base.source is not None:
        raise ConfigError(
            f"{base.name} comes from outside and was allowed by the hash of its files: a version of it is a backend of "
            "its own, with a manifest in a folder for --manifests"
        )
    if base.hub is not None:
        raise ConfigError(f"{base.name} has kernels of the hub: its version is hub.revision in {base.path}")
    return base


def main_requirement(base: EnvManifest, variant: VariantName) -> Requirement:
    """The one whose version counts: that of the backend's name, else the first."""
    asked = [Requirement(text) for text in base.variants[variant].requirements]
    name = canonicalize_name(base.name)
    return next((one for one in asked if canonicalize_name(one.name) == name), asked[0])


def newest(main: Requirement, wanted: Wanted, minor: str, tool: Uv | None = None) -> str:
    """The newest release of that series that has a wheel for this Python here, with its local label ("2.4.1+cpu").
    Raises EnvError."""
    where = f"{main.name} {wanted.version}"
    python = interpreters.find(minor, f"{wanted.backend}@{wanted.version}")
    text = f"{main.name}>={wanted.version},<{above(wanted.version)}"
    answer = resolve(tool or the_uv(), [text], python, with_dependencies=False)
    if isinstance(answer, Refused):
        raise EnvError(
            f"no release of {where} has a wheel for Python {minor}: {answer.summary}",
            env=f"{wanted.backend}@{wanted.version}",
            cause=answer.message,
            repair=f"another version, or another Python: lz env add {wanted.backend}@{wanted.version} --python 3.X",
        )
    return answer.versions[canonicalize_name(main.name)]


def requirements(template: Sequence[str], main: Requirement, release: str, beside: Sequence[str]) -> tuple[str, ...]:
    """The template's with this release of the main one, and with `beside` in the place of those of the same names."""
    others = {canonicalize_name(Requirement(text).name): text for text in beside}
    asked = []
    for text in template:
        one = Requirement(text)
        if canonicalize_name(one.name) == canonicalize_name(main.name):
            one.specifier = _of_release(one.specifier, release)
        asked.append(others.pop(canonicalize_name(one.name), str(one)))
    return (*asked, *others.values())


def _of_release(before: SpecifierSet, release: str) -> SpecifierSet:
    """==RELEASE. The template's local label stays, where it asks for one (torch==2.13.0+cpu), and so does its refusal
    of another build (!=2.13.0+cpu)."""
    public = Version(release).public
    labels = {one.operator: Version(one.version).local for one in before if not one.version.endswith(".*")}
    wanted = labels.get("==")
    refused = labels.get("!=")
    text = f"=={public}+{wanted}" if wanted else f"=={public}"
    return SpecifierSet(f"{text},!={public}+{refused}" if refused else text)


def _pythons(base: EnvManifest, chosen: str | None) -> list[str]:
    """Those to try, in order: of the others that are here the nearest first."""
    if chosen is not None:
        return [chosen]
    first = list(base.pythons)
    here = [minor for minor in interpreters.available() if _minor(minor) >= OLDEST and minor not in first]
    return [*first, *sorted(here, key=lambda minor: (abs(_minor(minor) - _minor(first[0])), _minor(minor)))]


def _minor(text: str) -> int:
    return int(text.partition(".")[2])


def _locked(declared: Declared, base: EnvManifest, store: Path, tool: Uv | None) -> EnvManifest:
    """Write it and its lock; what was not there before goes again where that does not resolve."""
    path = declaration.folder(store) / f"{declared.name}.toml"
    was_there = path.is_file()
    manifest = declaration.write(declared, base, store)
    try:
        write_lock(manifest, declared.variant, installer=tool)
        read_lock(manifest, declared.variant)
    except EnvError:
        if not was_there:
            declaration.remove(declared.name, store)
        raise
    return manifest
