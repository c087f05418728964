"""`lz tune` and `lz solve`: which calls to measure, where it is, what came of it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from layerzero.client.cli.calls import TEXT_OPS, Connected, find_op, parse_arrays, parse_params, parse_texts
from layerzero.client.cli.output import FAILED, err, out, print_json
from layerzero.client.gpu.arrays import device_name, named_device
from layerzero.client.tools import tune as tuning
from layerzero.client.tools.calls import Call, all_default_calls, default_calls
from layerzero.client.tools.solve import solve_calls, with_extents
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import PUBLIC_OPS

INTERRUPTED = 130  # as shells say it
REDRAW_S = 0.1


def tune(
    words: Sequence[str],
    params: Sequence[str],
    *,
    device: str | None,
    tokenizer: Path | None,
    budget_s: float,
    as_json: bool,
) -> int:
    """Print the times of each kernel. Returns the exit code: 0 when something was measured."""
    calls = parse_calls(words, params, tokenizer, device)
    with Connected(), _Display(budget_s) as display:
        report = tuning.tune_calls(calls, budget_s=budget_s, on_progress=display.show)
    if as_json:
        print_json(report.to_dict())
    else:
        out().print(report)
    if report.was_interrupted:
        return INTERRUPTED
    return 0 if any(call.fastest for call in report.calls) else FAILED


def solve(
    words: Sequence[str],
    params: Sequence[str],
    extents: Sequence[str],
    *,
    devices: Sequence[str],
    tokenizer: Path | None,
    path: Path | None,
    budget_s: float,
    as_json: bool,
) -> int:
    """Measure, write a dispatch table, print both. Returns the exit code: 0 when it was written."""
    calls = [
        call
        for device in devices or (None,)
        for one in with_extents(words, extents)
        for call in parse_calls(one, params, tokenizer, device)
    ]
    repeated = (("--param", params), ("--extent", extents), ("--device", devices))
    options = [word for name, given in repeated for value in given for word in (name, value)]
    options += [] if path is None else ["--out", str(path)]
    command = shlex.join(["lz", "solve", *words, *options])
    with Connected(), _Display(budget_s) as display:
        report = solve_calls(calls, path=path, budget_s=budget_s, command=command, on_progress=display.show)
    if as_json:
        print_json(report.to_dict())
    else:
        out().print(report)
    if report.measured.was_interrupted:
        return INTERRUPTED
    return FAILED if report.path is None else 0


def parse_calls(
    words: Sequence[str], params: Sequence[str], tokenizer: Path | None, device: str | None = None
) -> list[Call]:
    """No words: typical calls of all ops; names of ops: those of these; an op with arguments: that call. `device`: of
    all of them. Raises InvalidArgument."""
    for word in words[:1]:
        find_op(word)
    are_ops = all(word in PUBLIC_OPS for word in words)
    if are_ops and (params or tokenizer):
        raise InvalidArgument("--param and --tokenizer belong to one call: lz tune OP ARG... --param NAME=VALUE")
    if not words:
        return all_default_calls(device)
    if are_ops:
        return [call for op in words for call in default_calls(op, device)]
    function = find_op(words[0])
    scalars = parse_params(function, params)
    where = device_name(named_device(words[0], (), device))
    if words[0] in TEXT_OPS:
        return [Call(words[0], {}, {**parse_texts(function, words[1:], tokenizer), **scalars}, where)]
    return [Call(words[0], parse_arrays(function, words[1:]), scalars, where)]


class _Display:
    """A bar on stderr. Drawn between runs only: a thread of its own would disturb the times."""

    def __init__(self, budget_s: float) -> None:
        columns = (TextColumn("{task.fields[what]}", markup=False), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=err(), auto_refresh=False, transient=True, disable=not err().is_terminal)
        self._task = self._bar.add_task("", total=budget_s, what="explaining")
        self._drawn_s = 0.0

    def __enter__(self) -> _Display:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def show(self, at: tuning.Progress) -> None:
        if at.rounds and time.monotonic() - self._drawn_s < REDRAW_S:
            return
        rounds = f", {at.rounds} rounds" if at.rounds else ""
        what = f"{at.index + 1}/{at.total} {at.label}: {at.doing}{rounds}"
        self._bar.update(self._task, completed=at.elapsed_s, what=what)
        self._bar.refresh()
        self._drawn_s = time.monotonic()
