"""What tests of lifted calls on the GPU of threads share: sites whose kernels are machine code, and which broker may
lift them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tests.process.gpu_site import gpu_site, report
from tests.process.harness import Site, made_on, wait_until
from tests.soft_gpu import soft_kernels, soft_lifted

import layerzero as lz
from layerzero.client.gpu.lifting import loaded

LiftedSites = Callable[..., Site]
_NO_LIBRARY = {"LAYERZERO_CUPTI": "/no/libcupti.so"}  # whatever this machine has: soft_lifted.py is in its place


@pytest.fixture
def kernels(soft: None) -> Iterator[Any]:
    """This process can launch machine code, and has loaded none."""
    loaded.forget()
    yield soft_kernels.install()
    loaded.forget()


@pytest.fixture
def lifted_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Probes of earlier tests are in it, and nothing that they have lifted."""
    store = tmp_path_factory.getbasetemp() / "store"
    shutil.rmtree(store / "lifted", ignore_errors=True)
    return store


@pytest.fixture
def lifted_site(lifted_store: Path, kernels: Any) -> Iterator[LiftedSites]:
    """Make sites, not yet started, which all have one store. `wrong`: of ops what is wrong with their kernels
    (soft_faults.py). `variables`: of the workers; `environ`: of the broker."""
    made: list[Site] = []

    def make(
        *names: str,
        isolation: str = "lifted",
        wrong: Mapping[str, str] = MappingProxyType({}),
        variables: Mapping[str, str] = MappingProxyType({}),
        environ: Mapping[str, str] = MappingProxyType({}),
        **settings: Any,
    ) -> Site:
        site = gpu_site(
            lifted_store,
            *(names or ("one",)),
            isolation=isolation,
            provider="soft_lifted.py",
            variables=variables,
            **settings,
        )
        # Not a variable of theirs: each site would be probed anew, which says nothing about lifting.
        (site.manifests / soft_lifted.VARIANTS).write_text(json.dumps(dict(wrong)))
        site.environ.update(_NO_LIBRARY)
        site.environ.update(environ)
        made.append(site)
        return site

    yield make
    lz.disconnect()
    for site in made:
        site.stop()


def lift(call: Callable[[], Any]) -> Any:
    """Make the call until this process launches its kernel; the result of that."""
    try:
        return made_on("lifted", call)
    except AssertionError as exc:
        raise AssertionError(f"{exc}; the broker's calls: {rows()}") from None


def refused(call: Callable[[], Any]) -> str:
    """Make the call until a report says why it is not lifted; that."""
    found: list[str] = []

    def is_told() -> bool:
        call()
        assert report().path != "lifted"
        found[:] = [note for note in report().notes if note.startswith("not lifted: ")]
        return bool(found)

    wait_until(is_told)
    return found[0].removeprefix("not lifted: ")


def rows() -> list[tuple[str, str, str]]:
    """Kernel, state and reason of what `lz status` tells of lifted calls."""
    return [(row["kernel_id"], row["state"], row["reason"]) for row in lz.status()["lifted"]]
