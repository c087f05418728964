"""`lz policy`: check a policy file, show the policy in force and where each value comes from.

Reads files as a broker does, with the broker's own code: a file that keeps every broker from starting must be
checkable, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from layerzero.broker.configuration import settings as knobs
from layerzero.broker.configuration.policy_source import PolicySource, load_layer
from layerzero.broker.processes.launcher import Launcher
from layerzero.broker.selection.policy import compose
from layerzero.broker.selection.policy_values import Known
from layerzero.client.cli.broker import connection
from layerzero.client.cli.output import USAGE, note, out, print_json
from layerzero.client.connection import start
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.vocabulary.ops import OPS


def check(file: Path, *, as_json: bool) -> int:
    """Print every problem of a policy file. Returns the exit code."""
    known = Known.of(Launcher(knobs.load()).capabilities, OPS)
    try:
        policy, problems = compose((load_layer(file),), known)
    except ConfigError as exc:
        policy, problems = None, exc.facts.get("problems") or [exc.message]
    if as_json:
        print_json({"file": str(file), "ok": not problems, "problems": problems})
    elif policy is not None:
        count = len(policy.origins)
        out().print(Text(f"{file}: good; sets {count} value{'' if count == 1 else 's'}"), soft_wrap=True)
    else:
        for problem in problems:
            out().print(Text(problem), soft_wrap=True)
    return USAGE if problems else 0


def show(*, with_origin: bool, as_json: bool) -> None:
    """Print the policy that holds for calls of this shell: that of the broker, and this environment's on top."""
    where = start.endpoints()
    if start.secret_key() is None and start.broker_pid(where) is None:
        note("no broker runs: this is what one would read that started now")
        answer = _as_a_broker_would()
    else:
        with connection(where) as session:
            answer = session.ask("policy", overlay=_overlay())
    values: Mapping[str, Mapping[str, Any]] = answer["values"]
    if as_json:
        shown = values if with_origin else {key: row["value"] for key, row in values.items()}
        print_json({**answer, "values": shown})
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    if with_origin:
        table.add_column("origin", overflow="fold")
    for key, row in values.items():
        style = "" if row["origin"] == "default" else "bold"
        origin = (Text(row["origin"]),) if with_origin else ()
        table.add_row(Text(key), Text(json.dumps(row["value"]), style=style), *origin)
    out().print(table)
    if answer["problem"]:
        out().print(Text(f"\nthe changed policy file is not in force\n{answer['problem']}", style="yellow"))


def _overlay() -> dict[str, Any]:
    layers = start.policy_layers()
    return {"layers": layers} if layers else {}


def _as_a_broker_would() -> dict[str, Any]:
    settings = knobs.load()
    file, is_optional = settings.policy_file()
    known = Known.of(Launcher(settings).capabilities, OPS)
    source = PolicySource(
        file,
        is_optional=is_optional,
        variables=settings.policy_variables(),
        known=known,
        record=settings.source_record(),
    )
    return source.describe({})
