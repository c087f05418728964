"""What `lz env add` and `lz env remove` do: allow a backend from outside by the hash of its sources; take that back.

It is read and checked as data; nothing of it runs before it is built and probed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.capabilities import vetting
from layerzero.capabilities.descriptor import Capability
from layerzero.envs import manifest as manifests
from layerzero.envs.build.lock import read_lock
from layerzero.envs.manifest import EnvManifest, Problem, Source
from layerzero.envs.trust import allowed, third_party
from layerzero.envs.trust.allowed import Allowed
from layerzero.envs.trust.bundle import Bundle, read_folder, read_wheel
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.vocabulary.policy import KERNEL_SOURCES


@dataclass(frozen=True)
class Site:
    """Where backends from outside are recorded and copied to, what policy says of them, and whose names are taken."""

    backends: Path
    store: Path
    folders: Sequence[Path]
    allowed: Mapping[str, Allowed]
    problem: str  # why the policy allows nothing: it cannot be read

    def discover(self) -> tuple[dict[str, EnvManifest], list[Problem]]:
        """All manifests, and what is wrong with others."""
        found, problems = third_party.discover(
            self.folders, backends=self.backends, store=self.store, allowed=self.allowed
        )
        if self.problem and any(one.source is not None for one in found.values()):
            problems.append(Problem(KERNEL_SOURCES, allowed.record_path(self.backends), self.problem))
        return found, problems

    def usable(self) -> list[Path]:
        """The copies in the store of those that may be used."""
        return [one.path.parent for one in self.discover()[0].values() if one.source is not None and one.is_allowed]

    def wanted(self) -> tuple[list[Path], set[str]]:
        """For gc: the copies in the store of those that may be used, or may be after an `add`; and the names of those
        of which nothing can be said now."""
        found = self.discover()[0]
        outside = [(one.path.parent, one.source) for one in found.values() if one.source is not None]
        copies = [path for path, source in outside if not source.refusal or source.is_changed or self.problem]
        return copies, third_party.places(self.backends)[0].keys() - found.keys()


LoadSite = Callable[[Path, Sequence[Path]], Site]
"""The site of a store and of folders of manifests; raises ConfigError. Policy is the broker's, whose code the caller
has (client/cli/env.py)."""


def add(target: str, site: Site) -> list[dict[str, Any]]:
    """Check and record every backend of `target`: none of them, when one is wrong. Raises ConfigError, EnvError."""
    if site.problem:
        raise ConfigError(site.problem)
    found, keep = _find(target, site)
    taken = manifests.discover(site.folders)[0]
    checked = [(bundle, *_check(bundle, site, taken)) for bundle in found]
    return [_record(bundle, manifest, capability, site, keep) for bundle, manifest, capability in checked]


def told(row: Mapping[str, Any]) -> str:
    """An entry of what `add` returns, for people."""
    lines = [
        f"{row['name']} of {row['origin']}: allowed",
        f"  serves    {', '.join(row['ops'])}",
        f"  files     {', '.join(row['files'])}",
        f"  sources   {row['sha256']}",
        f"  recorded  {KERNEL_SOURCES}.{row['name']} in {row['recorded_in']}",
    ]
    if row["before"] not in ("", row["sha256"]):
        lines.insert(4, f"  before    {row['before']}")
    if row["overruled_by"]:
        lines.append(f"  but       {row['overruled_by']} has another value, and goes before this record")
    lines.append(f"next: lz env build {row['name']}; a broker that has started before it was installed needs lz down")
    return "\n".join(lines)


def remove(name: str, site: Site) -> None:
    """Take a backend from the record. Raises ConfigError when it is not there."""
    if "@" in name or not allowed.forget(site.backends, name):  # a version is none from outside
        known = sorted(allowed.read_record(site.backends))
        text = f"name what can be forgotten: {name!r:.80} is no version (lz env add) and no environment of functions "
        text += "that is declared; lz env list has those, by their whole names"
        raise ConfigError(
            f"{text}. Allowed from outside, by {allowed.record_path(site.backends)}: {', '.join(known) or 'none'}"
        )


def _find(target: str, site: Site) -> tuple[list[Bundle], bool]:
    """The backends that `target` means, and whether we keep their sources: what is installed stays where it is."""
    known = third_party.places(site.backends)[0]
    if target in known:
        return [known[target].read()], target in allowed.kept(site.backends)
    path = Path(target)
    if path.is_dir():
        names = sorted(file.stem for file in path.glob("*.toml") if file.name != "pyproject.toml")
        if not names:
            raise ConfigError(f"{path}: holds no manifest NAME.toml; name the folder that has it beside its provider")
        return [read_folder(path, name, str(path.absolute())) for name in names], True
    if path.is_file():
        return read_wheel(path), True
    raise ConfigError(
        f"{target!r:.200} is no folder, no wheel, and no installed package declares a backend of that name; "
        f"declared: {', '.join(sorted(known)) or 'none'}"
    )


def _check(bundle: Bundle, site: Site, taken: Mapping[str, EnvManifest]) -> tuple[EnvManifest, Capability]:
    """All that the broker and the builder would find later."""
    if bundle.name in taken:
        raise ConfigError(f"{bundle.origin}: name {bundle.name!r} is taken by {taken[bundle.name].path}")
    manifest = third_party.load(bundle, site.store, Source(bundle.origin, bundle.sha256))
    for variant in manifest.variants:
        read_lock(manifest, variant)
    text = manifest.descriptor_path.read_text(encoding="utf-8", errors="replace")
    return manifest, vetting.vet(text, f"{bundle.origin}: {manifest.descriptor}", bundle.name)


def _record(bundle: Bundle, manifest: EnvManifest, capability: Capability, site: Site, keep: bool) -> dict[str, Any]:
    record, said = str(allowed.record_path(site.backends)), site.allowed.get(bundle.name)
    is_overruled = said is not None and not said.origin.startswith(record) and said.value != bundle.sha256
    return {
        "name": bundle.name,
        "origin": bundle.origin,
        "sha256": bundle.sha256,
        "before": allowed.allow(site.backends, bundle, keep=keep),
        "ops": sorted(capability.ops),
        "variants": list(manifest.variants),
        "files": sorted(bundle.files),
        "recorded_in": record,
        "overruled_by": said.origin if said is not None and is_overruled else "",
    }
