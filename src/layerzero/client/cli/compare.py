"""`lz compare`: one call on several backends or versions, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from layerzero.client.cli.options import Device, Json, Op, Params, Tokenizer, Words


def compare(
    op: Op,
    words: Words = None,
    backends: Annotated[
        str, typer.Option("--backends", "-b", metavar="A,B,...", help="The others are compared with the first.")
    ] = "",
    param: Params = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    budget: Annotated[float, typer.Option("--budget", min=0.1, help="Seconds for all timed runs.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Make one call on several backends, onnxruntime,onnxruntime@1.16 for instance: largest error, time, speed-up. Exit
    code 1 when a result is off by more than is allowed, or a backend has none."""
    code = run([op, *(words or ())], backends, param or (), device, tokenizer, budget, as_json=as_json)
    raise typer.Exit(code)


def run(
    words: Sequence[str],
    backends: str,
    params: Sequence[str],
    device: str | None,
    tokenizer: Path | None,
    budget_s: float,
    *,
    as_json: bool,
) -> int:
    """Print what was found. Returns the exit code. Raises InvalidArgument."""
    from layerzero.client.cli.calls import Connected
    from layerzero.client.cli.output import FAILED, out, print_json
    from layerzero.client.cli.tune import parse_calls
    from layerzero.client.tools.compare import compare_call, named

    names = [name.strip() for name in backends.split(",") if name.strip()]
    if not names:
        raise typer.BadParameter("needs two names, or one to compare with what is chosen", param_hint="--backends")
    with Connected():
        (call, *_) = parse_calls(words, params, tokenizer, device)
        report = compare_call(call, named(names), call.arguments(), budget_s=budget_s)
    if as_json:
        print_json({"call": call.label, **report.to_dict()})
    else:
        out().print(report)
    return 0 if report.is_equal else FAILED
