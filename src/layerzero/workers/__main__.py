"""`python -m layerzero.workers --boot-fd N`: boot, hello, load the provider, serve. Started by the broker."""

from __future__ import annotations

import argparse
import sys

from layerzero.workers import boot
from layerzero.workers.loop import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="layerzero.workers", description=__doc__)
    parser.add_argument("--boot-fd", type=int, required=True, help="descriptor with the boot configuration (msgpack)")
    config = boot.read_config(parser.parse_args().boot_fd)
    boot.die_with_parent(config.parent_pid)
    boot.point_stdout_at_stderr()
    return serve(config)


if __name__ == "__main__":
    sys.exit(main())
