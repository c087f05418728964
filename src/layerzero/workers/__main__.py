"""`python -m layerzero.workers --boot-fd N`: boot, hello, load the provider, serve. Started by the broker."""

from __future__ import annotations

import os
import sys
import traceback

from layerzero.ipc.loading import loading

with loading():
    from layerzero.workers import boot
    from layerzero.workers.loop import serve


def main() -> int:
    match sys.argv[1:]:  # argparse takes a tenth of a worker's start
        case ["--boot-fd", number] if number.isdecimal():
            config = boot.read_config(int(number))
        case _:
            sys.exit(f"usage: python -m layerzero.workers --boot-fd N: {__doc__.partition(':')[2].strip()}")
    boot.die_with_parent(config.parent_pid)
    boot.point_stdout_at_stderr()
    try:
        boot.confine(os.environ)
        kept = boot.enter_cache(os.environ)
        if kept is None:
            return serve(config, lambda: None)
        code = serve(config, kept.mark)
        kept.seal()
        return code
    except BaseException as exc:
        # Ends with all descriptors open: the broker kills a worker that closes its connection, and an end by a signal
        # would look like a crash that may pass.
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exc.code if isinstance(exc, SystemExit) and isinstance(exc.code, int) else 1)


if __name__ == "__main__":
    sys.exit(main())
