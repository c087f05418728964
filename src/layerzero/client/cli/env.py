"""`lz env`: the commands of envs/, with what the broker's policy says of backends from outside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from layerzero.broker.configuration import kernel_sources
from layerzero.broker.configuration import settings as knobs
from layerzero.envs.__main__ import app
from layerzero.envs.cli.additions import Site
from layerzero.envs.trust.allowed import Allowed
from layerzero.ipc.errors import ConfigError


def run(args: Sequence[str]) -> int:
    """Run one command line. Returns the exit code."""
    code = app(args=list(args), prog_name="lz env", standalone_mode=False, obj=site)
    if args[:1] in (["build"], ["probe"]) and not {"-h", "--help"} & {*args}:
        from layerzero.client.cli import broker

        broker.tell_about_environments(args[1:])
    return code if isinstance(code, int) else 0


def site(store: Path, folders: Sequence[Path]) -> Site:
    """From the broker's settings, with this store and these folders of manifests. Raises ConfigError."""
    settings = knobs.load(store=store)
    allowed, problem = dict[str, Allowed](), ""
    try:
        allowed |= kernel_sources.allowed(settings)
    except ConfigError as exc:
        problem = exc.message
    return Site(settings.backends_dir.absolute(), store, tuple(folders), allowed, problem)
