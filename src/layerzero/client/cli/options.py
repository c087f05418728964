"""Options and arguments that several commands of `lz` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JSON = "layerzero.json"  # key in the context: the failing command was asked for JSON


def _note_json(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[JSON] = value
    return value


Json = Annotated[bool, typer.Option("--json", callback=_note_json, help="Print JSON.")]
Op = Annotated[str, typer.Argument(metavar="OP", help="attention, matmul, linear, softmax, silu, tokenize, ...")]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ARG...", help="SHAPE:DTYPE of each array, such as 1x8x128x64:float16, or none; tokenize: texts."
    ),
]
Params = Annotated[
    list[str] | None,
    typer.Option("--param", "-p", metavar="NAME=VALUE", help="A parameter of the op, value in JSON; may be repeated."),
]
Keys = Annotated[
    Path | None, typer.Option("--keys", metavar="DIR", help="Folder of keys; default LAYERZERO_KEYS.", file_okay=False)
]
Backend = Annotated[str | None, typer.Option("--backend", "-b", metavar="NAME", help="Allow this backend only.")]
All = Annotated[bool, typer.Option("--all", help="Show every kernel, with all reasons and parts of its score.")]
Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", exists=True, dir_okay=False, help="tokenizer.json, for tokenize and detokenize."),
]
_DEVICE = "Where the made-up arrays are: cpu (the default), cuda, cuda:1 or the UUID of a GPU"
Device = Annotated[str | None, typer.Option("--device", "-d", metavar="NAME", help=f"{_DEVICE}.")]
Devices = Annotated[
    list[str] | None, typer.Option("--device", "-d", metavar="NAME", help=f"{_DEVICE}; may be repeated.")
]
# Of calls that are made again.
OnBackends = Annotated[
    list[str] | None, typer.Option("--backend", "-b", metavar="NAME", help="On this one; may be repeated.")
]
Everywhere = Annotated[str | None, typer.Option("--env", metavar="all", help="all: on every backend that has the op.")]
Times = Annotated[int, typer.Option("--times", "-n", min=1, help="So often on each.")]
TimeoutS = Annotated[float | None, typer.Option("--timeout", help="Seconds for each call.")]
Seed = Annotated[int, typer.Option("--seed", help="Of random arguments, where a call's were not kept.")]


def is_everywhere(env: str | None, backends: list[str] | None) -> bool:
    """Whether --env says so. Raises InvalidArgument, also where --backend says something else."""
    from layerzero.ipc.errors import InvalidArgument

    if env not in (None, "all"):
        raise InvalidArgument(f"--env {env!r:.40}; allowed: all, or --backend NAME")
    if env == "all" and backends:
        raise InvalidArgument("name --env all or --backend NAME, not both")
    return env == "all"


# Of `lz up`.
Joined = Annotated[
    str | None, typer.Option("--joined", metavar="NAMES", help="Backends whose workers join by themselves: a,b or all.")
]
SecretFile = Annotated[
    Path | None, typer.Option("--secret-file", help="Who connects must know this secret (lz keys secret).")
]
AllowUid = Annotated[
    list[int] | None,
    typer.Option("--allow-uid", help="Another user who may connect, to workers of his own; may be repeated."),
]
Metrics = Annotated[
    str | None,
    typer.Option("--metrics", metavar="ADDRESS", help="Show metrics by HTTP at ADDRESS:PORT or unix:PATH."),
]
MetricsTokenFile = Annotated[
    Path | None, typer.Option("--metrics-token-file", help="Who reads metrics must show this token (lz keys secret).")
]
History = Annotated[bool, typer.Option("--history", help="Keep what was seen each second, for lz top and lz report.")]
Record = Annotated[
    Path | None,
    typer.Option("--record", metavar="FILE", help="Write every event and action there, for lz replay --log FILE."),
]
