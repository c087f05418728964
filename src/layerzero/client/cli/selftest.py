"""`lz selftest`: whether this installation does what it promises."""

from __future__ import annotations

from typing import Annotated

import typer

from layerzero.client.cli.options import Json


def selftest(
    backends: Annotated[
        list[str] | None, typer.Argument(metavar="[BACKEND...]", help="Which; all that can serve here if left out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Try this installation with a broker of its own: each backend's results beside NumPy's float64, an express lane, a
    worker that dies. Exit code 1 when something failed."""
    from rich.text import Text

    from layerzero.client.cli.output import FAILED, err, out, print_json
    from layerzero.client.tools import selftest as tools

    styles = {tools.OK: "green", tools.FAILED: "bold red", tools.SKIPPED: "dim"}
    found = []
    with err().status("...") as status:
        for check in tools.selftest(backends or None, lambda what: status.update(f"{what} ...")):
            found.append(check)
            if not as_json:
                line = Text.assemble((f"{check.outcome:<8}", styles[check.outcome]), f"{check.name}: {check.detail}")
                out().print(line.append(f" ({check.seconds:.1f} s)", "dim"), soft_wrap=True)
    if as_json:
        print_json({"checks": [check.to_dict() for check in found]})
    if any(check.outcome == tools.FAILED for check in found):
        raise typer.Exit(FAILED)
