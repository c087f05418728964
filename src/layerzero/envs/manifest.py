"""Manifests: what a backend's environment contains. One TOML file per environment; the file's stem is its name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import tomllib
from packaging.requirements import InvalidRequirement, Requirement
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from layerzero.ipc import files
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.names import unknown_name

MAX_BYTES = 1 << 16  # of a manifest
MAX_DOTS = 200  # in a line of it
BUILTIN = Path(__file__).resolve().parent / "manifests"
VariantName = Literal["cpu", "cu12", "cu13", "rocm", "xpu", "hpu"]
# Of AMD's and Intel's GPUs and Gaudi. They take tensors in the CPU's memory, so they serve beside whichever of the
# others is chosen for the machine (LAYERZERO_VARIANT), and are chosen by the manifest alone.
OWN_VARIANTS: frozenset[VariantName] = frozenset({"rocm", "xpu", "hpu"})
# What the worker code itself needs; added to every venv, so that no manifest can forget it.
WORKER_REQUIREMENTS = ("pyzmq>=26", "msgpack>=1.0.8")
# Of a version beside another backend (envs/versions), BACKEND@VERSION.
NAME_PATTERN = r"^[a-z0-9][a-z0-9_.-]{0,63}(@[0-9][a-z0-9.]{0,31})?$"
Minor = Annotated[str, StringConstraints(pattern=r"^3\.[1-9][0-9]$")]
_NOT_IN_TEXT = ("name", "path", "source", "own_python")
# The builder sets these; a manifest that overrode them would cut the worker off from its own code.
RESERVED_VARIABLES = frozenset(
    {"PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "PYTHONNOUSERSITE", "LAYERZERO_HUB_KERNELS", "HF_HUB_OFFLINE"}
)
REPOSITORY_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}$"
COMMIT_PATTERN = r"^[0-9a-f]{40}$"
BUILD_PATTERN = r"^[a-z0-9][a-z0-9_.-]{0,99}$"


def _requirement(text: str) -> str:
    try:
        Requirement(text)
    except InvalidRequirement as exc:
        raise ValueError(f'must be a requirement such as "numpy>=2" ({str(exc).splitlines()[0]})') from exc
    return text


def _variable_value(value: str) -> str:
    if "\0" in value:
        raise ValueError("must be text without NUL, which no environment variable can hold")
    return value


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name in RESERVED_VARIABLES:
        raise ValueError(f"must be a variable name other than {', '.join(sorted(RESERVED_VARIABLES))}")
    return name


class Variant(BaseModel):
    """The direct requirements of one build; the lock has the whole closure, but for what `without` names: that which
    others require and this backend never imports."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requirements: tuple[Annotated[str, AfterValidator(_requirement)], ...]
    without: tuple[Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")], ...] = ()  # canonical names


class Hub(BaseModel):
    """Kernels of the HF Kernel Hub that come with an environment. `revision`: a commit, or a branch or tag that the
    lock pins; `build`: which folder of the repository's `build/` each variant takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repository: Annotated[str, Field(pattern=REPOSITORY_PATTERN)]
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,99}$")]
    build: dict[VariantName, Annotated[str, Field(pattern=BUILD_PATTERN)]]

    @property
    def is_pinned(self) -> bool:
        return re.fullmatch(COMMIT_PATTERN, self.revision) is not None

    def build_of(self, variant: VariantName, path: Path) -> str:
        """Raises ConfigError for a variant without one; `path`: of the manifest."""
        if variant not in self.build:
            raise ConfigError(
                f"{path}: hub.build: has no variant {variant!r}; allowed: {', '.join(self.build) or 'none'}"
            )
        return self.build[variant]


@dataclass(frozen=True)
class Source:
    """Where a backend from outside comes from (envs/trust/third_party.py), and why it may not be used: "" when it
    may."""

    origin: str
    sha256: str
    refusal: str = ""
    repair: str = ""
    is_changed: bool = False  # refused since it is no longer what was allowed

    def demand_allowed(self) -> None:
        """Raises ConfigError with the reason and the repair."""
        if self.refusal:
            raise ConfigError(f"{self.refusal}; repair: {self.repair}", repair=self.repair, sha256=self.sha256)


class EnvManifest(BaseModel):
    """One environment. `name` and `path` come from the file's location, `source` from who found it, `own_python` from
    with_python, all else from the text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    path: Path
    source: Source | None = None  # None: it comes with LayerZero, or from a folder that the user named
    summary: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    provider: str  # module of layerzero.workers.providers, or a .py path relative to the manifest
    descriptor: str  # capabilities/descriptors/NAME.json, or a .json path relative to the manifest
    version_of: str | None = None  # the backend beside which it is another version; then the name is BACKEND@VERSION
    interpreter: Literal["venv", "host", "existing", "image"] = "venv"
    image: str | None = None  # of the containers that its workers join from: nothing of it is here
    executable: str | None = None  # of an existing interpreter, or a folder that has bin/python
    own_python: Minor | None = None  # `python`, where with_python chose another
    python: Minor | None = None
    other_pythons: tuple[Minor, ...] = ()  # that it may be built with, too; each has a lock of its own
    platform: Annotated[str, Field(pattern=r"^manylinux_2_[0-9]{1,2}$")] = "manylinux_2_28"  # oldest glibc served
    env: dict[Annotated[str, AfterValidator(_variable)], Annotated[str, AfterValidator(_variable_value)]] = {}
    variants: dict[VariantName, Variant] = {}
    hub: Hub | None = None
    locked_by: str | None = None  # the lock file of the program that declared it (envs/locked.py)

    @field_validator("provider", "descriptor")
    @classmethod
    def _resolvable(cls, value: str, info: ValidationInfo) -> str:
        suffix = ".py" if info.field_name == "provider" else ".json"
        pattern = r"[a-z_][a-z0-9_]*" if suffix == ".py" else NAME_PATTERN
        if not value.endswith(suffix):
            if not re.fullmatch(pattern, value):
                raise ValueError(f"must match {pattern} or be a path that ends in {suffix}")
            return value
        folder = info.data["path"].parent.resolve()
        try:
            target = (folder / value).resolve()  # follows symlinks, so that none can lead outside
            is_file = target.is_file()
        except (OSError, RuntimeError) as exc:  # a name that is too long, symlinks in a circle
            raise ValueError(f"must be a path that the system can open: {exc}"[:300]) from exc
        if Path(value).is_absolute() or not target.is_relative_to(folder):
            raise ValueError(f"must be a relative path that stays under {folder}")
        if not is_file:
            raise ValueError(f"must name an existing file under {folder}")
        return value

    @model_validator(mode="after")
    def _buildable(self) -> EnvManifest:
        if self.interpreter == "venv" and not (self.python and self.variants):
            raise ValueError('interpreter "venv" needs `python` and at least one [variants.*] table')
        if self.interpreter == "host" and (self.python or self.variants or self.other_pythons):
            raise ValueError('interpreter "host" builds nothing: pythons and [variants.*] must be absent')
        if (self.interpreter == "image") != (self.image is not None):
            raise ValueError('interpreter "image" needs `image`, and no other one has it')
        if self.image is not None and (self.provider != "functions" or self.python or self.variants or self.hub):
            raise ValueError('interpreter "image" is for functions, and builds nothing: no python, variants or hub')
        is_existing = self.interpreter == "existing"
        is_named = self.executable is not None and Path(self.executable).is_absolute()
        if is_existing != is_named or (self.executable and not is_existing):
            raise ValueError('interpreter "existing" needs `executable`, an absolute path, and no other one has it')
        if is_existing and (self.python or self.other_pythons or set(self.variants) != {"cpu"}):
            raise ValueError('interpreter "existing" has the Python that it is, and [variants.cpu] alone')
        if is_existing and (self.provider != "functions" or self.hub is not None):
            raise ValueError('interpreter "existing" is for functions: provider = "functions", and no [hub]')
        is_lockable = self.provider == "functions" and self.interpreter == "venv"
        if self.locked_by is not None and not (is_lockable and Path(self.locked_by).is_absolute()):
            raise ValueError("`locked_by` is for environments of functions that are built, and an absolute path")
        if not OWN_VARIANTS.isdisjoint(self.variants) and len(self.variants) > 1:
            raise ValueError(f"[variants.*] of {', '.join(sorted(OWN_VARIANTS))} must be the only one of a manifest")
        if self.hub is not None and set(self.hub.build) != set(self.variants):
            raise ValueError("hub.build must name a folder of the repository's build/ for each of [variants.*]")
        return self

    @model_validator(mode="after")
    def _named_as_version(self) -> EnvManifest:
        base, separator, _ = self.name.partition("@")
        if (base if separator else None) != self.version_of:
            raise ValueError(
                f"version_of is {self.version_of!r}, and the file is called {self.name}.toml; allowed: version_of = "
                '"NAME" in a file NAME@VERSION.toml, and no version_of in others'
            )
        return self

    @property
    def is_allowed(self) -> bool:
        """Whether it may be built and run; what does not come from outside always may."""
        return self.source is None or not self.source.refusal

    def _demand_allowed(self) -> None:
        if self.source is not None:
            self.source.demand_allowed()

    @property
    def pythons(self) -> tuple[str, ...]:
        """The versions of Python that it may be built with, the manifest's first choice first."""
        first = self.own_python or self.python
        return tuple(dict.fromkeys((first, *self.other_pythons))) if first else ()

    def with_python(self, minor: str) -> EnvManifest:
        """The same environment for another Python. Raises ConfigError for one that the manifest does not name."""
        if minor not in self.pythons:
            allowed = ", ".join(self.pythons) or "none, since it runs in the broker's own interpreter"
            raise ConfigError(
                f"{self.path}: other_pythons: {self.name} is not made for Python {minor}; allowed: {allowed}; to allow "
                f'it: other_pythons = ["{minor}"], then lz env lock {self.name} --python {minor}'
            )
        return self.model_copy(update={"python": minor, "own_python": self.pythons[0]})

    def beside(self, minor: str, lacks: Sequence[str]) -> EnvManifest:
        """What is put beside an existing interpreter of this Python ("3.11"): the requirements that it lacks."""
        return self.model_copy(update={"python": minor, "variants": {"cpu": Variant(requirements=tuple(lacks))}})

    @property
    def provider_target(self) -> str:
        """What the worker imports: a dotted module, or the absolute path of a .py file. Raises ConfigError for what
        may not be run."""
        self._demand_allowed()
        if self.provider.endswith(".py"):
            return str((self.path.parent / self.provider).resolve())
        return f"layerzero.workers.providers.{self.provider}"

    @property
    def descriptor_path(self) -> Path:
        if self.descriptor.endswith(".json"):
            return (self.path.parent / self.descriptor).resolve()
        return package_folder("capabilities") / "descriptors" / f"{self.descriptor}.json"

    @property
    def folder(self) -> Path | None:
        """The folder that has to be named to find this manifest; None for ours, and for what comes from outside."""
        folder = self.path.parent.resolve()
        return None if folder == BUILTIN or self.source is not None else folder

    def variant_for(self, wanted: VariantName) -> VariantName:
        """The variant to use on a machine set to `wanted`: a backend without builds for an accelerator has none for
        this one either, and serves on the CPU; one of OWN_VARIANTS is used whichever is wanted."""
        own = [name for name in self.variants if name in OWN_VARIANTS]
        return own[0] if own else "cpu" if set(self.variants) <= {"cpu"} else wanted

    def lock_path(self, variant: str) -> Path:
        """Built-in locks have a folder of their own; anyone else's lie beside the manifest."""
        folder = self.path.parent.resolve()
        is_other = self.python != (None if self.interpreter == "existing" else next(iter(self.pythons), None))
        tag = f".py{self.python.replace('.', '')}" if self.python and is_other else ""
        return (folder.parent / "locks" if folder == BUILTIN else folder) / f"{self.name}.{variant}{tag}.txt"

    def requirements(self, variant: VariantName) -> tuple[str, ...]:
        """Everything to resolve for a variant. Raises ConfigError for one that the manifest lacks, and for what may
        not be built."""
        self._demand_allowed()
        if variant not in self.variants:
            is_hidden = variant == "cpu" and OWN_VARIANTS.isdisjoint(self.variants)
            hint = "; those need an NVIDIA GPU, and LAYERZERO_VARIANT to be set" if is_hidden else ""
            raise ConfigError(
                f"{self.path}: variants: {self.name} has no variant {variant!r}; allowed: {', '.join(self.variants)}"
                + hint
            )
        ours = () if self.interpreter == "existing" else WORKER_REQUIREMENTS  # of which it may have some
        return (*self.variants[variant].requirements, *ours)


@dataclass(frozen=True)
class Problem:
    """A manifest that is disabled, and why."""

    name: str
    path: Path
    message: str


def package_folder(package: str) -> Path:
    """Where layerzero.PACKAGE lies, without importing it."""
    spec = find_spec(f"layerzero.{package}")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"layerzero.{package} is not installed as plain files; reinstall layerzero-broker")
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def load(path: Path) -> EnvManifest:
    """Read and check one manifest. Raises ConfigError naming file, key, value and what is allowed."""
    name = path.stem
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"{path}: file name: {name!r} is no environment name; allowed: {NAME_PATTERN}")
    try:
        text = files.read(path, MAX_BYTES)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read as TOML: {exc}") from exc
    data = parse_toml(text, str(path))
    for key in _NOT_IN_TEXT:
        if key in data:
            raise ConfigError(f"{path}: {key}: {data[key]!r} must be absent; the file's place and name say it")
    try:
        return EnvManifest.model_validate({"name": name, "path": path, **data})
    except ValidationError as exc:
        raise ConfigError(f"{path}: {_explain(exc.errors()[0], data)}") from exc


def parse_toml(text: bytes, where: str) -> dict[str, Any]:
    """A manifest's text as plain values, not yet checked. Raises ConfigError."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where}: larger than {MAX_BYTES:,} bytes, the most that a manifest may have")
    if any(line.count(b".") > MAX_DOTS for line in text.splitlines()):  # the reader's time is their square
        raise ConfigError(f"{where}: cannot be read as TOML: a line with more than {MAX_DOTS} dots")
    try:
        return tomllib.loads(text.decode())
    except ValueError as exc:  # not UTF-8, not TOML, an integer of thousands of digits
        raise ConfigError(f"{where}: cannot be read as TOML: {exc}"[:1000]) from exc
    except RecursionError as exc:
        raise ConfigError(f"{where}: cannot be read as TOML: nested too deeply") from exc


def discover(folders: Sequence[Path] = ()) -> tuple[dict[str, EnvManifest], list[Problem]]:
    """All manifests of the built-in folder and of `folders`, in that order. A broken one disables only itself;
    of two with one name the first counts."""
    found: dict[str, EnvManifest] = {}
    problems: list[Problem] = []
    for folder in (BUILTIN, *folders):
        if not folder.is_dir():
            problems.append(Problem(folder.name, folder, f"{folder}: manifest folder does not exist"))
        for path in sorted(folder.glob("*.toml")):
            try:
                manifest = load(path)
            except ConfigError as exc:
                problems.append(Problem(path.stem, path, exc.message))
                continue
            first = found.setdefault(manifest.name, manifest)
            if first is not manifest:
                text = f"{path}: name: {manifest.name!r} is taken by {first.path}; rename one of the two files"
                problems.append(Problem(manifest.name, path, text))
    return found, problems


def _explain(error: Any, data: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"] if part != "[key]")
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{where}: missing; it is required"
    if error["type"] == "extra_forbidden":
        model = EnvManifest if len(error["loc"]) == 1 else Hub if error["loc"][0] == "hub" else Variant
        allowed = [key for key in model.model_fields if key not in _NOT_IN_TEXT]
        return f"{where}: {unknown_name('key', error['loc'][-1], allowed)} (got {error['input']!r:.80})"
    value = "" if error["input"] is data or not where else f" (got {error['input']!r:.120})"
    return f"{where or 'manifest'}: {message}{value}"
