"""`lz types`: which dtypes an op takes together and gives, who has that, and why it takes no others. Asks no broker."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerzero.client.cli.options import Json
from layerzero.envs.cli.options import STORE, Folders, ProfileName, StoreDir, Variant, VariantChoice
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.names import unknown_name
from layerzero.ipc.vocabulary.ops import PUBLIC_OPS
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, ITEMSIZE

if TYPE_CHECKING:
    from layerzero.capabilities.type_rules import TypeTable

_INTEGERS = frozenset(dtype for dtype in ITEMSIZE if "int" in dtype)
_SHAPE = re.compile(r"\[[\d, ]*\]|, \(1 or \d+, \d+\)")  # extents of the sample


def types(
    name: Annotated[
        str | None, typer.Argument(metavar="[OP]", help="All dtypes of this one; if left out, a line for each op.")
    ] = None,
    store: StoreDir = STORE,
    manifests: Folders = None,
    variant: VariantChoice = Variant.CPU,
    profile: ProfileName = "all",
    as_json: Json = False,
) -> None:
    """Show which dtypes an op takes together, what kernels compute in and give, and why it takes no others."""
    from layerzero.capabilities.type_rules import type_table
    from layerzero.client.cli.env import site
    from layerzero.client.cli.output import note, print_json
    from layerzero.envs import profiles
    from layerzero.envs.cli.op_rows import kernel_rows
    from layerzero.envs.cli.type_rows import type_rows
    from layerzero.envs.descriptors import read_all
    from layerzero.workers.certify.samples import samples

    def table_of(op: str) -> TypeTable:
        return type_table(op, samples(op))

    if name is not None and name not in PUBLIC_OPS:
        raise InvalidArgument(unknown_name("op", name, PUBLIC_OPS))
    if name is None:
        lines = [summary(table_of(op)) for op in PUBLIC_OPS]
        print_json({"ops": lines}) if as_json else _show_all(lines)
        return
    found, problems = site(store, manifests or ()).discover()
    allowed = {one: manifest for one, manifest in found.items() if manifest.is_allowed}
    for problem in problems:
        note(f"disabled: {problem.message}")
    known = kernel_rows(allowed, variant.value, store, profiles.read(profile, store))
    certified = {row["kernel_id"]: list(row["certified"]) for row in known}
    table = table_of(name)
    rows = list(type_rows(table, read_all(allowed)[0], certified))
    refusals = [
        {"dtypes": dict(one.dtypes), "attrs": dict(one.attrs), "found": one.found, "allowed": one.allowed}
        for one in table.refusals
    ]
    if as_json:
        print_json({"op": name, "variant": variant.value, "types": rows, "refused": refusals})
    else:
        _show_rows(name, table.data, rows)
        _show_refusals(refusals)


def summary(table: TypeTable) -> dict[str, Any]:
    """An op's dtypes in one line: what each of its tensors may be of, and whether results are of the data's dtype."""
    rules = table.rules
    others: dict[str, dict[str, None]] = {}
    for rule in rules:
        for name, dtypes in rule.others.items():
            others.setdefault(name, {}).update(dict.fromkeys(dtypes))
    results = len(rules[0].gives) if rules else 0
    return {
        "op": table.op,
        "takes": {
            name: list(dict.fromkeys(rule.data[n] for rule in rules)) for n, name in enumerate(table.data) if rules
        },
        "with": {name: list(dtypes) for name, dtypes in others.items()},
        "gives": [list(dict.fromkeys(rule.gives[n] for rule in rules)) for n in range(results)],
        "of_one_dtype": all(len(set(rule.data)) == 1 for rule in rules),
        "gives_the_same": [all(rule.gives[n] == rule.data[0] for rule in rules) for n in range(results)],
    }


def words(line: Mapping[str, Any]) -> tuple[str, str]:
    """What such a line says of data and of results."""
    takes = [short(dtypes) for dtypes in line["takes"].values()]
    if line["of_one_dtype"]:
        takes = takes[:1]
    else:
        takes = [f"{name} {dtypes}" for name, dtypes in zip(line["takes"], takes, strict=True)]
    gives = [
        "the same" if is_same else short(dtypes)
        for dtypes, is_same in zip(line["gives"], line["gives_the_same"], strict=True)
    ]
    return "; ".join(takes) or "texts, or nothing", "; ".join(dict.fromkeys(gives))


def short(dtypes: Iterable[str]) -> str:
    """Dtypes as one list, with a word for all floats and for all integers."""
    found = list(dict.fromkeys(dtypes))
    for word, whole in (("integers", _INTEGERS), ("floats", FLOAT_DTYPES)):
        if whole <= set(found):
            found = [word, *(dtype for dtype in found if dtype not in whole)]
    return ", ".join(found)


def joined(dtypes: Sequence[str]) -> str:
    """Those of several tensors: one where they are equal."""
    return dtypes[0] if len(set(dtypes)) == 1 else " and ".join(dtypes)


def _show_all(lines: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from layerzero.client.cli.output import note, out

    table = Table("op", "takes", "gives", box=None)
    table.columns[0].no_wrap = True
    for line in lines:
        takes, gives = words(line)
        table.add_row(line["op"], Text(takes), Text(gives))
    out().print(table)
    note("lz types OP: what is taken together, what kernels compute in, who has it, and why nothing else is taken")


def _show_rows(op: str, data: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """One line for each triple of what is taken, computed in and given; those that differ in what is given alone are
    one."""
    from rich.table import Table
    from rich.text import Text

    from layerzero.client.cli.output import note, out

    lines: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for row in rows:
        here = tuple(dict.fromkeys(one["backend"] for one in row["kernels"] if one["certified"]))
        others = tuple(dict.fromkeys(one["backend"] for one in row["kernels"] if one["backend"] not in here))
        form = [value for name, value in row["attrs"].items() if name == "weight_format"]
        takes = " ".join([joined(list(row["takes"].values())), *form])
        key = (takes, row["computes_in"] or "-", here, others)
        lines.setdefault(key, []).append(joined(row["gives"][:1]))
    if not lines:
        note(f"{op} takes no numbers of which dtypes could be chosen")
        return
    table = Table(", ".join(data), "computes in", "gives", "certified here", "not here", box=None)
    order = list(dict.fromkeys(takes for takes, *_ in lines))
    for (takes, computes, here, others), gives in sorted(lines.items(), key=lambda one: order.index(one[0][0])):
        cells = takes, computes, short(gives), ", ".join(here), ", ".join(others) or ("" if here else "no kernel")
        table.add_row(*(Text(cell, style="dim" if n == 4 else "") for n, cell in enumerate(cells)))
    out().print(table)
    others_of: dict[str, dict[str, None]] = {}
    for row in rows:
        for name, dtypes in row["with"].items():
            others_of.setdefault(name, {}).update(dict.fromkeys(dtypes))
    for name, known in others_of.items():
        out().print(Text(f" {name}: {short(known)}"))


def _show_refusals(refusals: Sequence[Mapping[str, Any]]) -> None:
    """How many of a kind there are, and one of them."""
    from rich.table import Table
    from rich.text import Text

    from layerzero.client.cli.output import out

    if not refusals:
        return
    counts, first = Counter[str](), dict[str, str]()
    for one in refusals:
        allowed = _SHAPE.sub("", one["allowed"])
        counts[allowed] += 1
        first.setdefault(allowed, _SHAPE.sub("", one["found"]))
    table = Table("rejected", "for example", "allowed", box=None, title_justify="left")
    for allowed, count in counts.most_common():
        table.add_row(str(count), Text(first[allowed]), Text(allowed))
    out().print()
    out().print(table)
