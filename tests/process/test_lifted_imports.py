"""Lifted calls that were exported on one machine and serve another, which has none of their library. Over the GPU of
threads."""

from __future__ import annotations

from tests.process.gpu_site import close, randn, report, silu, soft
from tests.process.import_site import Exported, Importers, exported, importer, take
from tests.process.lifted_site import kernels, lifted_site, lifted_store, rows
from tests.process.test_cli import DONE
from tests.process.test_cli import lz as lz_command

import layerzero as lz
from layerzero.client.gpu.lifting import loaded

__all__ = ["exported", "importer", "kernels", "lifted_site", "lifted_store", "soft"]


def test_a_machine_without_the_library_serves_what_was_exported(exported: Exported, importer: Importers) -> None:
    """From the first call on, and no worker runs; in the next broker without another proof."""
    site = importer()
    shown = take(site, exported)
    assert (shown.returncode, "2 lifted calls of one, signed by ci" in shown.stdout) == (DONE, True), shown.stderr
    site.connect()
    x, values = randn(32, 32)
    for _ in range(3):
        close(lz.silu(x), silu(values))
        assert (report().path, report().backend) == ("lifted", "one")
    row = site.backend("one")
    assert (row["state"], row["pid"], row["unavailable"]["code"]) == ("absent", None, "LIFTED_ONLY")
    assert row["imported"] == {"import": "exported", "signer": "ci", "calls": 2}
    assert rows() == [("one.silu", "lifted", "")]
    assert len(site.events("lifted.proved")) == 1
    lz.disconnect()
    loaded.forget()
    assert lz_command(site, "down").returncode == DONE
    site.connect()
    close(lz.silu(x), silu(values))
    assert report().path == "lifted"
    assert len(site.events("lifted.proved")) == 1
