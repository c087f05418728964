"""`python -m layerzero.broker`: fork away, read settings, take the lock, build the parts, run the loop."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import sys

from layerzero.ipc.loading import loading

_PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="layerzero.broker", description=__doc__)
    parser.add_argument("--runtime-dir", help="folder of sockets, locks and logs")
    parser.add_argument("--stays", action="store_true", help="do not end with the last client")
    parser.add_argument("--ready-fd", type=int, help="descriptor to write a byte to when clients may connect")
    parser.add_argument("--daemon", action="store_true", help="go on as a daemon")
    parser.add_argument("--for-uid", type=int, help="serve this user alone, for the broker that starts us")
    parser.add_argument("--parent-pid", type=int, help="that broker: end with it")
    args = parser.parse_args()
    if args.daemon and os.fork():
        os._exit(0)
    # Until the loop has a handler of its own. The kernel ignores it for a pid 1 that has none.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if args.parent_pid is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != args.parent_pid:  # it ended before
            return 1
    with loading():
        from layerzero.broker import run  # after the fork: nothing is imported twice

    faulthandler.enable()  # what a crash leaves is in the log
    owns_log = args.daemon or args.for_uid is not None
    code = run.run(
        runtime_dir=args.runtime_dir,
        stays=args.stays,
        ready_fd=args.ready_fd,
        owns_log=owns_log,
        for_uid=args.for_uid,
    )
    sys.stderr.flush()
    os._exit(code)  # not waiting for a probe's thread, which would keep the lock; the probe ends with us


if __name__ == "__main__":
    raise SystemExit(main())
