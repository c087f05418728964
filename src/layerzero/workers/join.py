"""`python -m layerzero.workers.join --backend NAME --directory DIR [--secret-file FILE]`: keep a backend's worker for a
broker that did not start us, in a container for instance.

The agent registers with the broker, tries this environment in a throw-away child, and starts, watches and kills the
worker, a child too, when the broker says so. It is small, so that it answers whatever the libraries do. When the
broker's end of its connection closes it kills the worker at once: nobody may write into memory of clients that has not
got a broker. It comes back to the next broker. Works as pid 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from layerzero.ipc.errors import NEVER, ConfigError, LayerZeroError
from layerzero.ipc.logs import flush, log
from layerzero.ipc.transport import control, messages, secret, wire
from layerzero.ipc.transport.endpoints import Endpoints, default_runtime_dir
from layerzero.ipc.transport.hello import greet
from layerzero.workers.agent import Children, Place, describe_place

REFUSED = 2  # exit code: the broker will not have us, and trying again changes nothing
CONNECT_TIMEOUT_S = 10.0
BACKOFF_S, BACKOFF_MAX_S = 0.2, 5.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="layerzero.workers.join", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--backend", required=True, help="whose worker this is: the name of its manifest")
    parser.add_argument("--directory", type=Path, help="folder of the broker's sockets; default LAYERZERO_RUNTIME_DIR")
    parser.add_argument("--secret-file", type=Path, help="the stack's secret; default LAYERZERO_SECRET_FILE")
    parser.add_argument("--provider", default="", help="where the provider is, if not where the broker's manifest says")
    args = parser.parse_args(argv)
    environ = os.environ
    folder = args.directory or environ.get("LAYERZERO_RUNTIME_DIR") or default_runtime_dir(environ)
    secret_file = args.secret_file or environ.get("LAYERZERO_SECRET_FILE")
    try:
        key = secret.read(Path(secret_file)) if secret_file else None
        place = describe_place(args.backend, args.provider)
    except ConfigError as exc:
        print(f"error: {exc.message}", file=sys.stderr)
        return REFUSED
    try:
        return Agent(Endpoints(Path(folder)).control, place, key).run()
    finally:
        flush()


class Agent:
    """One connection after the other, until SIGTERM or SIGINT."""

    def __init__(self, path: Path, place: Place, key: bytes | None) -> None:
        self._path = path
        self._place = place
        self._key = key
        self._signalled, signal_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)
        self._is_ending = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up is what counts

    def _end(self, *_: object) -> None:
        self._is_ending = True

    def run(self) -> int:
        """Returns the exit code."""
        pause_s, said = BACKOFF_S, ""
        while not self._is_ending:
            why = ""
            try:
                sock, number = self._connect()
            except LayerZeroError as exc:
                if exc.retry == NEVER:
                    log("agent.refused", backend=self._place.backend, code=exc.code, error=exc.message)
                    return REFUSED
                why = exc.message
            except control.Closed:
                why = "the broker hung up before it said welcome"
            except OSError as exc:
                why = f"nobody answers on {self._path}: {exc.strerror or exc}"
            else:
                log("agent.joined", backend=self._place.backend, number=number)
                joined_s, said = time.monotonic(), ""
                try:
                    cause = self._serve(sock)
                finally:
                    sock.close()
                log("agent.parted", backend=self._place.backend, is_ending=self._is_ending, cause=cause)
                if time.monotonic() - joined_s > BACKOFF_MAX_S:  # else it may part for the same reason again
                    pause_s = BACKOFF_S
            if why and why != said:
                log("agent.waits", backend=self._place.backend, cause=why)
                said = why
            self._sleep(pause_s * random.uniform(0.75, 1.25))
            pause_s = min(2 * pause_s, BACKOFF_MAX_S)
        return 0

    def _sleep(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while not self._is_ending and (left_s := end_s - time.monotonic()) > 0:
            control.is_readable(self._signalled, left_s)
            self._drain_signals()

    def _drain_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._signalled, 512)

    def _connect(self) -> tuple[socket.socket, int]:
        sock = control.connect(self._path, timeout_s=CONNECT_TIMEOUT_S)
        try:
            hello = messages.Hello(
                protocols=[wire.PROTOCOL],
                role="agent",
                package="",
                pid=os.getpid(),
                backend=self._place.backend,
                env=self._place.env,
                source=self._place.source,
            )
            welcome, fds = greet(sock, hello, self._key)
            for fd in fds:
                os.close(fd)
            sock.settimeout(CONNECT_TIMEOUT_S)  # for what we send: a broker that does not read is as good as gone
        except BaseException:
            sock.close()
            raise
        return sock, welcome.number

    def _serve(self, sock: socket.socket) -> str:
        """Do what the broker says until it hangs up or we are told to end; then nothing of ours runs any more. Returns
        why."""
        children = Children(self._place, self._path, lambda message, fds=(): control.send(sock, message, fds))
        try:
            while not self._is_ending:
                poll = select.poll()
                for fd in (sock.fileno(), self._signalled, *children.fds):
                    poll.register(fd, select.POLLIN)
                ready = {fd for fd, _ in poll.poll(children.timeout_ms)}
                self._drain_signals()
                children.look(ready)
                if sock.fileno() in ready:
                    self._take(sock, children)
            return "it was told to end"
        except control.Closed:
            return "the broker has hung up"
        except OSError as exc:  # of a broker that does not read, or of a child that cannot be started
            return f"{type(exc).__name__}: {exc}"
        except LayerZeroError as exc:
            return f"the broker misleads us: {exc.message}"
        finally:
            children.end()

    @staticmethod
    def _take(sock: socket.socket, children: Children) -> None:
        message, fds = control.receive(
            sock,
            messages.Keep,
            messages.StartWorker,
            messages.KillWorker,
            messages.CompileHere,
            messages.Ping,
            messages.Refused,
        )
        if isinstance(message, messages.Ping):
            control.send(sock, messages.Pong(number=message.number))
        elif isinstance(message, messages.Keep):
            children.keep(message, fds)
            return
        elif isinstance(message, messages.StartWorker):
            children.start_worker(message)
        elif isinstance(message, messages.CompileHere):
            children.compile(message)
        elif isinstance(message, messages.KillWorker):
            children.kill_worker(message.generation)
        elif isinstance(message, messages.Refused):
            log("agent.cut_off", error=str(message.error.get("message")))
            raise control.Closed
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
