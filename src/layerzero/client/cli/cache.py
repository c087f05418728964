"""`lz cache`: compile caches, lifted calls, choices of plans and what is known of tokenizers, as they are kept on disk.
Works on the files, with a broker or without."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerzero.client.cli import compile_caches
from layerzero.client.cli.options import All, Json
from layerzero.ipc.wording import counted

if TYPE_CHECKING:
    from layerzero.broker.lifting.store import LiftStore
    from layerzero.broker.storage.plan_choices import PlanChoice, PlanChoices
    from layerzero.client.planning.kept_libraries import KeptLibraries

cache_app = typer.Typer(
    help="Look after what is kept: compile caches, lifted calls, choices of plans, facts of tokenizers.",
    no_args_is_help=True,
)
cache_app.command("gc")(compile_caches.gc)
cache_app.command("export")(compile_caches.export)
cache_app.command("import")(compile_caches.import_)
SHOWN = 20


def _store() -> LiftStore:
    from layerzero.broker.configuration import settings
    from layerzero.broker.lifting.store import LiftStore

    return LiftStore(settings.load().store / "lifted")


def _plan_choices() -> PlanChoices:
    from layerzero.broker.configuration import settings
    from layerzero.broker.storage.plan_choices import PlanChoices

    return PlanChoices(settings.load().plan_choices)


def _libraries() -> KeptLibraries:
    from layerzero.client.planning.kept_libraries import KeptLibraries

    return KeptLibraries()


@cache_app.command("list")
def show(everything: All = False, as_json: Json = False) -> None:
    """Print compile caches, the calls that are kept, those used last first, kernels kept in their workers, choices of
    plans, and for how many tokenizers it is known which library computes them."""
    from rich.table import Table

    from layerzero.broker.configuration import settings
    from layerzero.client.cli.output import out, print_json

    store = _store()
    rows = [_row(key, entry) for key, entry in store.entries()][::-1]
    faults, choices, libraries = store.faults(), _plan_choices(), _libraries()
    plans = [_plan_row(*one) for one in choices.entries()][::-1]
    compiled = compile_caches.rows(settings.load())
    if as_json:
        facts = {"folder": str(store.folder), "bytes": store.nbytes(), "calls": rows, "faults": faults}
        kept = {"folder": str(libraries.folder), "count": len(libraries)}
        facts["plan_choices"] = {"folder": str(choices.folder), "plans": plans}
        print_json({**facts, "tokenizers": kept, "compile_caches": [one.facts() for one in compiled]})
        return
    compile_caches.show(compiled)
    lifted = sum(not row["reason"] for row in rows)
    out().print(
        f"{lifted} lifted, {len(rows) - lifted} refused, {store.nbytes() / 1e6:,.1f} MB in {store.folder}",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("kernel", "call", "state", "kept for"):
        table.add_column(name, overflow="fold")
    shown = rows if everything else rows[:SHOWN]
    for row in shown:
        hours = (time.time() - row["made_s"]) / 3600
        table.add_row(row["kernel_id"], row["call"], row["reason"] or "lifted", f"{hours:,.1f} h")
    if rows:
        out().print(table)
    if len(shown) < len(rows):
        out().print(f"{len(rows) - len(shown)} more; all of them: --all")
    for fault in faults:
        out().print(f"{fault.get('kernel')}: {fault.get('fault')}", soft_wrap=True)
    if plans:
        out().print(f"{counted(len(plans), 'choice')} of plans in {choices.folder}", soft_wrap=True)
    for row in plans if everything else plans[:SHOWN]:
        told = f"{row['what']}: {row['chosen'] or 'each call its own best'}"
        out().print(f"{row['key'][:12]} ignored: {row['ignored']}" if row["ignored"] else told, soft_wrap=True)
    if len(libraries):
        told = f"{counted(len(libraries), 'tokenizer')}, and which library computes it, in {libraries.folder}"
        out().print(told, soft_wrap=True)


def _plan_row(key: str, choice: PlanChoice | None, ignored: str) -> dict[str, Any]:
    if choice is None:
        return {"key": key, "ignored": ignored}
    its = {"what": choice.what, "chosen": choice.chosen, "us": dict(choice.us), "made_s": choice.made_s}
    return {"key": key, "ignored": "", **its}


def _row(key: str, entry: Any) -> dict[str, Any]:
    from layerzero.ipc.errors import ProtocolError
    from layerzero.ipc.lifting.form import Lifted

    call = ""
    if entry.form:
        try:
            lifted = Lifted.unpack(entry.form)
            call = ", ".join("-" if spec is None else str(spec) for spec in lifted.inputs)
        except ProtocolError as exc:
            call = str(exc)
    return {
        "key": key,
        "kernel_id": entry.kernel_id,
        "backend": entry.backend,
        "call": call or entry.detail,
        "reason": entry.reason,
        "made_s": entry.made_s,
        "made_of": dict(entry.what),
    }


@cache_app.command("verify")
def verify(as_json: Json = False) -> None:
    """Look at every byte, and remove what does not hold; of compile caches it is set aside. Exit code 1 when there was
    something."""
    from layerzero.broker.configuration import settings
    from layerzero.client.cli.output import FAILED, out, print_json

    gone, unfit = _store().verify(), compile_caches.verify(settings.load())
    if as_json:
        print_json({"removed": gone, "compile_caches": unfit})
    else:
        lines = [f"removed {what}" for what in gone]
        lines += [f"set aside of the compile cache of {row['name']}: {row['text']}" for row in unfit]
        out().print("\n".join(lines) or "all of it holds", soft_wrap=True)
    raise typer.Exit(FAILED if gone or unfit else 0)


@cache_app.command("clear")
def clear(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove all lifted calls, which workers lift again, all choices of plans, which are timed again, and what
    is known of tokenizers, which is worked out again. What is known of faults stays, and so do compile caches (lz cache
    gc)."""
    from layerzero.client.cli.output import out, print_json

    store, choices, libraries = _store(), _plan_choices(), _libraries()
    if not yes:
        told = f"Remove all lifted calls in {store.folder}, all choices of plans in {choices.folder} "
        typer.confirm(f"{told}and what is known of tokenizers in {libraries.folder}?", abort=True, err=True)
    count, plans, known = store.clear(), choices.clear(), libraries.clear()
    if as_json:
        print_json({"removed": count, "plan_choices": plans, "tokenizers": known})
    else:
        parts = [f"{counted(plans, 'choice')} of plans"] * bool(plans)
        parts += [counted(known, "tokenizer")] * bool(known)
        out().print(f"removed {' and '.join([f'{count} calls', *parts])}")


@cache_app.command("forgive")
def forgive(as_json: Json = False) -> None:
    """Let kernels be lifted again that a process lost its GPU with, or had launched last when it was killed."""
    from layerzero.client.cli.output import out, print_json

    count = _store().forgive()
    if as_json:
        print_json({"forgiven": count})
    else:
        out().print(f"forgiven: {count}")
