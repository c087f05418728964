"""Several environments, built side by side."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from layerzero.envs.build.build import ensure
from layerzero.envs.build.env import Env
from layerzero.envs.build.installers import Installer
from layerzero.envs.build.progress import Progress
from layerzero.envs.hub.placing import HubAccess
from layerzero.envs.manifest import EnvManifest, VariantName
from layerzero.ipc.errors import ConfigError, EnvError


def ensure_all(
    manifests: Iterable[EnvManifest],
    *,
    store: Path,
    variant: VariantName = "cpu",
    installer: Installer | None = None,
    progress: Progress | None = None,
    force: bool = False,
    jobs: int = 2,
    base: Path | None = None,
    wheelhouse: Path | None = None,
    hub: HubAccess | None = None,
) -> dict[str, Env | EnvError | ConfigError]:
    """Ensure several environments, `jobs` at a time. A failure is a value, so that it hides no other result."""

    def one(manifest: EnvManifest) -> Env | EnvError | ConfigError:
        try:
            return ensure(
                manifest,
                store=store,
                variant=manifest.variant_for(variant),
                installer=installer,
                progress=progress,
                force=force,
                base=base,
                wheelhouse=wheelhouse,
                hub=hub,
            )
        except (EnvError, ConfigError) as exc:
            return exc

    chosen = list(manifests)
    with ThreadPoolExecutor(max_workers=max(1, jobs), thread_name_prefix="lz-env") as pool:
        return dict(zip((m.name for m in chosen), pool.map(one, chosen), strict=True))
