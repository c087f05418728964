"""What tests of exported and imported lifted calls share: a folder that one site has exported, and sites that have none
of its backends. Over the GPU of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from tests.process.gpu_site import gpu_site, randn
from tests.process.harness import Site
from tests.process.lifted_site import _NO_LIBRARY, LiftedSites, lift
from tests.process.test_cli import DONE, Finished
from tests.process.test_cli import lz as lz_command

import layerzero as lz
from layerzero.client.gpu.lifting import loaded

Importers = Callable[..., Site]


class Exported(NamedTuple):
    """`key`: of its signature; `public`: what others trust."""

    folder: Path
    key: Path
    public: Path


@pytest.fixture
def exported(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Exported:
    """silu of 32 x 32 and of 500 of backend `one`, signed; this process has forgotten them. Made once for all tests."""
    top = tmp_path_factory.getbasetemp() / "for-others"
    made = Exported(top / "exported", top / "lift.key", top / "lift.key.pub")
    if not made.folder.is_dir():
        lifted_site: LiftedSites = request.getfixturevalue("lifted_site")
        site = lifted_site()
        site.connect()
        for x in (randn(32, 32)[0], randn(500)[0]):
            lift(lambda x=x: lz.silu(x))  # type: ignore[misc]
        lz.disconnect()
        loaded.forget()
        done(site, "key", str(made.key))
        done(site, "export", str(made.folder), "--key", str(made.key))
    return made


@pytest.fixture
def importer(kernels: Any, lifted_store: Path, tmp_path: Path) -> Iterator[Importers]:
    """Make sites, not yet started, with an empty store of their own; `names`: the backends that they have."""
    made: list[Site] = []

    def make(*names: str, environ: Mapping[str, str] = MappingProxyType({}), **settings: Any) -> Site:
        store = tmp_path / f"store-{len(made)}"
        isolation = settings.pop("isolation", "lifted")
        site = gpu_site(lifted_store, *names, isolation=isolation, provider="soft_lifted.py", **settings)
        site.use_store(store)
        site.environ.update(_NO_LIBRARY)
        site.environ.update(environ)
        made.append(site)
        return site

    yield make
    lz.disconnect()
    for site in made:
        site.stop()


def take(site: Site, exported: Exported, *words: str) -> Finished:
    """Trust the key, and import the folder."""
    done(site, "trust", str(exported.public), "--name", "ci")
    return run(site, "import", str(exported.folder), *words)


def run(site: Site, *words: str) -> Finished:
    return lz_command(site, "lift", *words)


def done(site: Site, *words: str) -> Finished:
    finished = run(site, *words)
    assert finished.returncode == DONE, finished.stderr
    return finished
