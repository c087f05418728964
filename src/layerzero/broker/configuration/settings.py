"""Every setting of the broker, declared once: name, default, unit, meaning. Variable: LAYERZERO_<NAME>.
broker/configuration/settings_page.py makes docs/settings.md of them.

Precedence: command line > environment > config.toml in the user's configuration folder > default.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
import tomllib
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from layerzero.broker.core.limits import Limits
from layerzero.envs.trust.allowed import record_path
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.transport.endpoints import default_runtime_dir
from layerzero.ipc.vocabulary.policy import VARIABLE_PREFIX, variables

APP = "layerzero"
CONFIG_FILE = platformdirs.user_config_path(APP) / "config.toml"
KEYS = platformdirs.user_config_path(APP) / "keys"
POLICY_FILE = platformdirs.user_config_path(APP) / "policy.yaml"
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Settings(BaseModel):
    """Read with `load()`, which turns a wrong value into a ConfigError."""

    model_config = ConfigDict(extra="forbid")

    runtime_dir: Path = Field(
        default_factory=lambda: default_runtime_dir(os.environ), description="sockets, locks and logs"
    )
    store: Path = Field(
        platformdirs.user_cache_path(APP), description="built environments and probe records", validate_default=True
    )
    perf_db: Path | None = Field(
        None, description="file of measured times, beside which the choices of plans lie; default: perf.db in the store"
    )
    manifest_dirs: tuple[Path, ...] = Field((), description="more folders with env manifests, separated by ':'")
    backends_dir: Path = Field(
        platformdirs.user_config_path(APP) / "backends",
        description="backends from outside that lz env add has allowed",
        validate_default=True,
    )
    policy: Path | None = Field(
        None, description="policy file; default policy.yaml in the user's configuration folder, if it exists"
    )
    rollouts: Path | None = Field(
        None, description="file of rollouts (lz rollout); default: rollouts.json beside the policy file"
    )
    variant: Literal["cpu", "cu12", "cu13"] = Field("cpu", description="accelerator variant of the environments")
    profile: str = Field(
        "all",
        description="what is probed, compiled, warmed and served: inference, quantized, nlp, all, or one that "
        "lz profile learn has made (docs/types.md)",
    )
    overlay: Path | None = Field(
        None, description="interpreter whose overlays serve the backends that have one (lz env build --overlay)"
    )
    wheelhouse: Path | None = Field(
        None, description="folder of wheels that lz env build uses in place of a network; the broker only names it"
    )
    timeout_s: Seconds = Field(60.0, description="how long one attempt of a call may run, when the call does not say")
    start_timeout_s: Seconds = Field(120.0, description="how long a provider may take to load")
    compile_timeout_s: Seconds = Field(600.0, description="how long a kernel may compile for one kind of calls")
    linger_s: Annotated[float, Field(ge=0)] = Field(1.0, description="life of an idle broker after its last client")
    max_in_flight: Annotated[int, Field(ge=1)] = Field(1024, description="open calls per client; more are BUSY")
    depth: Annotated[int, Field(ge=1, le=256)] = Field(16, description="calls sent ahead to one worker")
    share: Annotated[int, Field(ge=1, le=256)] = Field(2, description="of them one client's, while others call it, too")
    standby: Annotated[int, Field(ge=0, le=8)] = Field(1, description="runners-up kept warm for fallback")
    restart_budget: Annotated[int, Field(ge=0)] = Field(3, description="crashes of a worker within restart_window_s")
    restart_window_s: Seconds = Field(30.0, description="window of restart_budget")
    backoff_s: Seconds = Field(0.5, description="delay of the first restart; doubles with each crash in the window")
    backoff_max_s: Seconds = Field(30.0, description="longest delay of a restart")
    retry_disabled_s: Seconds = Field(
        30.0, description="when a backend that crashes have disabled is tried again; doubles with each try that fails"
    )
    retry_disabled_max_s: Seconds = Field(600.0, description="longest delay of such a try")
    poison_quarantine_s: Seconds = Field(600.0, description="how long inputs that killed two workers are refused")
    keep_compiled: bool = Field(
        True, description="what compilers make is kept for later workers; false: each begins anew (docs/caches.md)"
    )
    cache_mib: Annotated[int, Field(ge=0)] = Field(
        16_384, description="MiB that compilers' caches may take together; 0: any amount"
    )
    cache_entries: Annotated[int, Field(ge=0)] = Field(64, description="how many caches there may be; 0: any number")
    shared_cache: Path | None = Field(
        None, description="folder of lz cache export that is looked up first, and never written (docs/caches.md)"
    )
    rest_s: Seconds = Field(
        60.0, description="a worker for GPUs whose calls are all lifted ends when it was not needed for so long"
    )
    counts: bool = Field(True, description="clients count calls that pass the broker by, for metrics and lz status")
    functions_rest_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        600.0, description="a worker of functions that keeps nothing ends when it was not called for so long; 0: never"
    )
    gpu_budget_mib: Annotated[int, Field(ge=0)] = Field(
        0,
        description="MiB of each GPU's memory that workers may hold together: above it those that keep nothing and "
        "were called longest ago end, and start with their next call; 0: any amount",
    )
    stacks_after_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        1.0,
        description="where py-spy is installed, the stacks of a worker are taken that is in one call for so long; "
        "0: never",
    )
    express: bool = Field(True, description="lend settled routes a lane straight to their worker")
    allow_mps: bool = Field(
        False, description="lz doctor finds MPS in order, although a fault of one process ends others"
    )
    joined: str = Field("", description="backends whose workers join by themselves: names separated by ',', or all")
    joined_silence_s: Seconds = Field(2.5, description="so long a joined worker's agent may not answer")
    secret_file: Path | None = Field(None, description="the stack's secret; who connects must prove that they know it")
    remote: str = Field("", description="tcp://ADDRESS:PORT for questions (status, health); needs keys")
    metrics: str = Field(
        "",
        description="where metrics are to be had by HTTP: ADDRESS:PORT or unix:PATH (docs/metrics.md); other addresses "
        "than this machine's own need metrics_token_file",
    )
    metrics_token_file: Path | None = Field(None, description="file of the token that whoever reads metrics must show")
    history: bool = Field(False, description="keep what was seen each second in a file in the store (docs/history.md)")
    record: Path | None = Field(
        None,
        description="file that every event and action of the core is written to, for lz replay --log; what is "
        "there is moved to FILE.1 (docs/recording.md)",
    )
    record_mib: Annotated[int, Field(ge=1, le=65_536)] = Field(256, description="longest record, in MiB; then it ends")
    keys: Path = Field(KEYS, description="folder of this side's key pair and of the public keys that it accepts")
    allow_uids: str = Field(
        "", description="other users, by number, separated by ',', who each get a broker of their own; needs a secret"
    )
    failpoints: str = Field("", description="faults for tests: backend:phase=action[@N], separated by ';'")

    @field_validator("store", "backends_dir")
    @classmethod
    def _refuse_others(cls, folder: Path) -> Path:
        """What lies there is executed: nobody else may put something in its place."""
        try:
            info = folder.stat()
        except OSError:
            return folder  # it will be made
        if info.st_mode & stat.S_IWOTH:
            raise ValueError(f"everybody may write to this folder, whose files are executed; chmod o-w {folder}")
        if info.st_uid not in (os.getuid(), 0) and os.getuid() != 0:
            raise ValueError(f"it belongs to user {info.st_uid}, who could change what is executed; name one of yours")
        return folder

    @field_validator("manifest_dirs", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(Path(p) for p in value.split(os.pathsep) if p) if isinstance(value, str) else value

    def limits(self) -> Limits:
        """The part that the core needs."""
        return Limits(**{name: getattr(self, name) for name in Limits.__dataclass_fields__})

    def policy_file(self) -> tuple[Path, bool]:
        """The policy file, and whether it need not exist."""
        return (POLICY_FILE, True) if self.policy is None else (self.policy, False)

    def source_record(self) -> Path:
        """What `lz env add` has recorded, in the form of a policy file; it need not exist."""
        return record_path(self.backends_dir)

    @property
    def times(self) -> Path:
        """The file of measured times."""
        return self.perf_db or self.store / "perf.db"

    @property
    def rollout_file(self) -> Path:
        """The file of rollouts; it need not exist."""
        return self.rollouts or self.policy_file()[0].with_name("rollouts.json")

    @property
    def plan_choices(self) -> Path:
        """The folder of what execution plans chose by timing whole runs; it need not exist."""
        return self.times.with_suffix(".plans")

    def policy_variables(self) -> list[dict[str, Any]]:
        """The layers of policy that the environment sets."""
        return variables(os.environ)

    def failpoints_of(self, backend: str) -> str:
        """This backend's part of `failpoints`, in the worker's form."""
        items = (item.partition(":") for item in self.failpoints.split(";") if item)
        return ",".join(point for name, _, point in items if name == backend)


def load(**overrides: object) -> Settings:
    """Settings from all sources. Raises ConfigError naming the setting, the value and what is allowed."""
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings.model_validate({**_of_file(CONFIG_FILE), **_of_environment(os.environ), **given})
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(map(str, first["loc"]))
        known = ", ".join(Settings.model_fields)
        hint = f"; known settings: {known}" if first["type"] == "extra_forbidden" else ""
        raise ConfigError(
            f"setting {name} (LAYERZERO_{name.upper()}): {first['msg']}, got {first['input']!r}{hint}"
        ) from exc


def _of_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read as TOML: {exc}") from exc


def _of_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Upper and lower case are the same in the names of variables."""
    names = {f"{VARIABLE_PREFIX}{name}".lower(): name for name in Settings.model_fields}
    return {names[name.lower()]: text for name, text in environ.items() if name.lower() in names}
