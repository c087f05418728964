"""The command line `lz`: what can be typed. The work is in cli_broker, cli_calls and cli_logs, imported when needed.

`main` is the entry point; `python -m layerzero.client.cli.app` is the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import platformdirs
import typer

from layerzero.client.cli import bisect as cli_bisect
from layerzero.client.cli import options
from layerzero.client.cli import restart as cli_restart
from layerzero.client.cli import rollout as cli_rollout
from layerzero.client.cli.attach import attach
from layerzero.client.cli.bundle import bundle_app
from layerzero.client.cli.cache import cache_app
from layerzero.client.cli.capsule import capsule_app
from layerzero.client.cli.cluster import cluster_app
from layerzero.client.cli.compare import compare
from layerzero.client.cli.dashboard import dashboard
from layerzero.client.cli.group import Group
from layerzero.client.cli.lift import lift_app
from layerzero.client.cli.ops import ops
from layerzero.client.cli.options import (
    All,
    Backend,
    Device,
    Devices,
    Json,
    Keys,
    Op,
    Params,
    Tokenizer,
    Words,
)
from layerzero.client.cli.profile import profile_app
from layerzero.client.cli.replay import replay
from layerzero.client.cli.selftest import selftest
from layerzero.client.cli.status import status
from layerzero.client.cli.top import report, top
from layerzero.client.cli.trace import trace_app
from layerzero.client.cli.types import types
from layerzero.ipc.version import __version__

EPILOG = (
    "Exit codes: 0 done; 1 the operation failed; 2 wrong usage or impossible arguments; 3 no broker runs or it went "
    "away. Data goes to stdout, notes and errors to stderr; --json output has a field `schema`, now 1."
)
_STORE = platformdirs.user_cache_path("layerzero")


def _print_version(value: bool) -> None:
    if value:
        print(f"layerzero {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Group,
    help="LayerZero: call kernels from libraries that cannot be installed together.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

policy_app = typer.Typer(help="Check and show the policy of selection.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")
keys_app = typer.Typer(help="Make secrets of stacks, and keys for tcp.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
bench_app = typer.Typer(help="Try what is promised under load and faults.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
_PARTS = (("cache", cache_app), ("lift", lift_app), ("capsule", capsule_app), ("trace", trace_app))
for name, part in (*_PARTS, ("cluster", cluster_app), ("bundle", bundle_app), ("profile", profile_app)):
    app.add_typer(part, name=name)
for command in (status, replay, attach, ops, types, compare, dashboard, top, report, selftest):
    app.command()(command)
app.command()(cli_restart.restart)
cli_rollout.add_to(app)
app.command("bisect")(cli_bisect.bisect)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", envvar="LAYERZERO_TRACEBACK", help="Show where an error comes from.")
    ] = False,
) -> None:
    pass


@app.command()
def up(
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Do not go into the background: logs to stderr, ends on SIGTERM.")
    ] = False,
    watchdog: Annotated[
        bool,
        typer.Option("--watchdog", help="Stay in the foreground and start another broker when this one dies."),
    ] = False,
    joined: options.Joined = None,
    secret_file: options.SecretFile = None,
    allow_uid: options.AllowUid = None,
    metrics: options.Metrics = None,
    metrics_token_file: options.MetricsTokenFile = None,
    history: options.History = False,
    record: options.Record = None,
    as_json: Json = False,
) -> None:
    """Start a broker that stays until `lz down`."""
    from layerzero.client.cli import broker

    settings = {} if joined is None else {"joined": joined}
    if secret_file is not None:
        settings["secret_file"] = str(secret_file.absolute())
    if allow_uid:
        settings["allow_uids"] = ",".join(map(str, allow_uid))
    if metrics is not None:
        settings["metrics"] = metrics
    if metrics_token_file is not None:
        settings["metrics_token_file"] = str(metrics_token_file.absolute())
    if history:
        settings["history"] = "1"
    if record is not None:
        settings["record"] = str(record.absolute())
    raise typer.Exit(broker.up(as_json=as_json, foreground=foreground, watchdog=watchdog, settings=settings))


@app.command()
def down(
    force: Annotated[bool, typer.Option("--force", help="Kill it; calls that run are lost.")] = False,
    as_json: Json = False,
) -> None:
    """End the broker: what runs is finished, the rest is refused."""
    from layerzero.client.cli import broker

    broker.down(force=force, as_json=as_json)


@app.command()
def logs(
    backend: Annotated[
        str | None, typer.Argument(metavar="BACKEND", help="Whose worker; the broker itself if left out.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
    as_json: Json = False,
) -> None:
    """Print a log: the broker's events, or what a worker wrote. Works without a broker, too."""
    from layerzero.client.cli import logs as cli_logs

    cli_logs.logs(backend, lines=lines, follow=follow, as_json=as_json)


@app.command()
def explain(
    op: Op,
    args: Words = None,
    param: Params = None,
    backend: Backend = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    shows_all: All = False,
    as_json: Json = False,
) -> None:
    """Show which kernel would serve a call, and why not the others. Runs nothing."""
    from layerzero.client.cli import calls

    options = calls.Options(backend, device, tokenizer, shows_all, as_json)
    calls.explain(op, args or (), param or (), options)


@app.command()
def run(
    op: Op,
    args: Words = None,
    param: Params = None,
    backend: Backend = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.001, help="Seconds that one attempt may take.")
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", "-r", min=1, help="Run it so many times.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random inputs.")] = 0,
    shows_all: All = False,
    as_json: Json = False,
) -> None:
    """Run an op on random inputs, or a text; show the result, the times and why this kernel."""
    from layerzero.client.cli import calls

    options = calls.Options(backend, device, tokenizer, shows_all, as_json)
    calls.run(op, args or (), param or (), options, timeout_s=timeout, repeat=repeat, seed=seed)


@app.command()
def tune(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OP...] | [OP ARG...]",
            help="Ops, tuned with typical shapes; or one call as for lz run. All ops if left out.",
        ),
    ] = None,
    param: Params = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    budget: Annotated[float, typer.Option("--budget", min=0.1, help="Seconds for everything.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Measure which kernel is fastest for a call; the broker chooses by it. Ctrl-C shows what was measured so far."""
    from layerzero.client.cli import tune as cli_tune

    code = cli_tune.tune(words or (), param or (), device=device, tokenizer=tokenizer, budget_s=budget, as_json=as_json)
    raise typer.Exit(code)


@app.command()
def solve(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OP...] | [OP ARG...]", help="As for lz tune; a shape may have named extents: 8xS:f32."
        ),
    ] = None,
    param: Params = None,
    extent: Annotated[
        list[str] | None,
        typer.Option("--extent", "-e", metavar="NAME=N,N,...", help="Values of a named extent; may be repeated."),
    ] = None,
    device: Devices = None,
    tokenizer: Tokenizer = None,
    path: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; dispatch_table.json in the store if left out.")
    ] = None,
    budget: Annotated[float, typer.Option("--budget", min=0.1, help="Seconds for everything.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Measure calls of many sizes and write a dispatch table, which a policy can name. Ctrl-C writes nothing."""
    from layerzero.client.cli import tune as cli_tune

    code = cli_tune.solve(
        words or (),
        param or (),
        extent or (),
        devices=device or (),
        tokenizer=tokenizer,
        path=path,
        budget_s=budget,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command()
def doctor(
    backends: Annotated[
        list[str] | None, typer.Argument(metavar="[BACKEND...]", help="Which are needed; all that the policy allows.")
    ] = None,
    ready: Annotated[
        bool, typer.Option("--ready", help="Start the workers, too, and let each answer: the gate of a deployment.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check environments, descriptors, policy, dispatch table, measured times and memory; show what repairs each fault.
    Exit code 1 when there is one."""
    from layerzero.client.cli import ready as cli_ready

    raise typer.Exit(cli_ready.doctor(backends or (), ready=ready, as_json=as_json))


@keys_app.command("secret")
def keys_secret(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where it goes; must not exist.")], as_json: Json = False
) -> None:
    """Write a new secret of a stack to FILE, for its owner only."""
    from layerzero.client.cli import keys

    keys.secret_file(file, as_json=as_json)


@keys_app.command("make")
def keys_make(folder: Keys = None, as_json: Json = False) -> None:
    """Make this side's key pair for tcp, and print the public key."""
    from layerzero.client.cli import keys

    keys.make(folder, as_json=as_json)


@keys_app.command("allow")
def keys_allow(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is; the broker's is called broker.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="The public key, or its file.")],
    folder: Keys = None,
    as_json: Json = False,
) -> None:
    """Accept another side's public key."""
    from layerzero.client.cli import keys

    keys.allow(folder, name, key, as_json=as_json)


@keys_app.command("list")
def keys_list(folder: Keys = None, as_json: Json = False) -> None:
    """Print this side's public key, and those that it accepts."""
    from layerzero.client.cli import keys

    keys.show(folder, as_json=as_json)


@policy_app.command("check")
def policy_check(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A policy in YAML.")],
    as_json: Json = False,
) -> None:
    """Find every mistake in a policy file. Exit code 2 when there is one."""
    from layerzero.client.cli import policy

    raise typer.Exit(policy.check(file, as_json=as_json))


@policy_app.command("show")
def policy_show(
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    as_json: Json = False,
) -> None:
    """Print the policy in force, with this environment's variables on top."""
    from layerzero.client.cli import policy

    policy.show(with_origin=origin, as_json=as_json)


@app.command()
def matrix(
    backends: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BACKEND...]",
            help='Environments, rows of the default matrix, or requirements such as "onnxruntime==1.16.3 numpy<2".',
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="'A + B + C'", help="Try these together, too; may be repeated."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", dir_okay=False, help="Write a page for a report."),
    ] = None,
    store: Annotated[
        Path, typer.Option("--store", envvar="LAYERZERO_STORE", file_okay=False, help="Where environments are kept.")
    ] = _STORE,
    manifests: Annotated[
        list[Path] | None,
        typer.Option("--manifests", envvar="LAYERZERO_MANIFEST_DIRS", help="A further folder of manifests."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Environments tried side by side.")] = 2,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one process may take.")] = 180.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Try again what is known of the same locks.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Try the whole default matrix without being asked.")] = False,
    bisect: Annotated[
        str | None,
        typer.Option("--bisect", metavar="'NAME FROM..TO'", help="Find the first version that fails --test."),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option("--test", metavar="FILE", help="A script, or test_*.py and FILE::NODE for pytest; for --bisect."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Try which backends can share an environment and a process: resolver, files, imports, results. Prints the fewest
    environments that serve all of them. Conflicts are results: the exit code is 0."""
    from layerzero.envs.versions import declaration

    folders = declaration.folders(store, manifests or ())
    if bisect is not None or test is not None:
        if bisect is None or test is None or sets or html:
            raise typer.BadParameter("--bisect and --test need each other, and go without --set and --html")
        cli_bisect.of_matrix(
            bisect,
            backends or (),
            test=test,
            store=store,
            folders=folders,
            timeout_s=timeout,
            as_json=as_json,
        )
        return
    from layerzero.client.cli import matrix as cli_matrix

    cli_matrix.matrix(
        backends or (),
        sets=sets or (),
        html=html,
        store=store,
        folders=folders,
        jobs=jobs,
        timeout_s=timeout,
        fresh=fresh,
        yes=yes,
        as_json=as_json,
    )


@bench_app.command("chaos")
def bench_chaos(
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**31, help="Of the faults and of the calls.")] = 0,
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, max=1500, help="How long.")] = 1.0,
    clients: Annotated[int, typer.Option("--clients", min=1, max=1000, help="Processes that call.")] = 4,
    gap: Annotated[float, typer.Option("--gap", min=0.05, help="Mean seconds between two faults.")] = 1.0,
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", help="Only this one; may be repeated. All if left out.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--history", metavar="FOLDER", help="Keep the history in this new folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Call all backends from many processes while workers, clients and a broker of its own are killed, stopped, slowed
    and cut off; check that each call ended once, right or with a fitting error. Exit code 1 when one did not."""
    from layerzero.client.cli import bench

    code = bench.chaos(
        seed=seed, minutes=minutes, clients=clients, gap_s=gap, backends=backend or (), folder=folder, as_json=as_json
    )
    raise typer.Exit(code)


@bench_app.command("check")
def bench_check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", exists=True, file_okay=False, help="A kept history.")],
    as_json: Json = False,
) -> None:
    """Check the history of a chaos run again."""
    from layerzero.client.cli import bench

    raise typer.Exit(bench.check(folder, as_json=as_json))


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def env(ctx: typer.Context) -> None:
    """List, build, probe, lock and collect backend environments; see `lz env --help`."""
    from layerzero.client.cli import env as cli_env

    raise typer.Exit(cli_env.run(ctx.args))


def main() -> None:
    """Run `lz` with this process's arguments; ends the process."""
    from layerzero.client.cli.output import show_setting_warnings

    show_setting_warnings()
    app(prog_name="lz")


if __name__ == "__main__":
    main()
