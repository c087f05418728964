"""Probes of environments, when the core asks for one; threads run them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.processes.launcher import Launcher
from layerzero.broker.processes.supervisor import start_error
from layerzero.capabilities.certificate import ProbeRecord
from layerzero.ipc.errors import EnvError, LayerZeroError
from layerzero.ipc.logs import log

AT_A_TIME = 2


class ProbeJobs:
    """`post` takes each probe's ProbeEnded, from another thread."""

    def __init__(self, launcher: Launcher, post: Callable[[ev.Event], None]) -> None:
        self._launcher = launcher
        self._post = post
        self._threads = ThreadPoolExecutor(max_workers=AT_A_TIME, thread_name_prefix="probe")

    def start(self, action: act.Probe) -> None:
        self._threads.submit(self._work, action.backend)

    def close(self) -> None:
        """Those that have not begun never do."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self, backend: str) -> None:
        error: LayerZeroError | None = None
        record = None
        try:
            record = self._launcher.probe(backend)
            error = self._launcher.failure(record)
            if record.failures:
                _note_failures(record)
        except LayerZeroError as exc:
            error = exc
        except OSError as exc:
            error = start_error(exc, backend)
        except Exception as exc:  # a broken environment may fail in any way; it disables that backend only
            error = EnvError(f"the probe failed: {type(exc).__name__}: {exc}", env=backend)
        self._post(ev.ProbeEnded(backend, error, record))


def _note_failures(record: ProbeRecord) -> None:
    certified, failed = record.counts
    first = [f"{f['kernel_id']} {f['dtype']} {f['shape_class']}: {f['detail']}" for f in record.failures[:10]]
    log("backend.not_certified", backend=record.env, certified=certified, failed=failed, first=first)
