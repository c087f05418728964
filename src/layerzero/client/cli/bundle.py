"""`lz bundle`: execution plans as files: written of a function, looked at, and run without it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerzero.client.cli.options import Json

if TYPE_CHECKING:
    from layerzero.client.bundles.form import BundleFile
    from layerzero.ipc.vocabulary.tensors import TensorSpec

bundle_app = typer.Typer(help="Write execution plans to files, and run them without their code.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(metavar="FILE", help="Of lz bundle write or lz.write_bundle.")]
RUNS = 8  # until a plan is frozen and its calls cross as one, at most


@bundle_app.command()
def write(
    function: Annotated[
        str, typer.Argument(metavar="FUNCTION", help="MODULE:NAME or FILE.py:NAME, of a function, model or lz.plan.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To write.")],
    arrays: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARRAY...]", help="Its arguments: SHAPE:DTYPE of random ones, or FILE.npy."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random arrays.")] = 0,
    as_json: Json = False,
) -> None:
    """Run a function until its plan is frozen, and write that."""
    import layerzero as lz
    from layerzero.client.bundles import form
    from layerzero.client.cli.calls import Connected
    from layerzero.client.cli.output import note, print_json
    from layerzero.client.plans.execution_plan import FROZEN, ExecutionPlan

    found = _function(function)
    plan = found if isinstance(found, ExecutionPlan) else lz.plan(found)
    given = [_array(word, seed + place) for place, word in enumerate(arrays or ())]
    _demand_all(plan, given)
    with Connected():
        for _ in range(RUNS):
            plan(*given)
            if plan.phase == FROZEN and plan.explain().messages:
                break
        lz.write_bundle(plan, file)
    if as_json:
        print_json(_facts(form.read(file)))
    else:
        note(f"{file}: {file.stat().st_size:,} bytes; lz bundle show has what is in it")


@bundle_app.command()
def show(
    file: File,
    lock: Annotated[
        str | None, typer.Option("--lock", metavar="BACKEND", help="Print the lock of this backend's environment.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what a bundle takes and gives, its calls, and what they ran in."""
    from rich.table import Table
    from rich.text import Text

    from layerzero.client.bundles import form
    from layerzero.client.cli.output import out, print_json
    from layerzero.ipc.errors import InvalidArgument

    found = form.read(file)
    if lock is not None:
        if lock not in found.locks:
            raise InvalidArgument(f"{file} has no lock of {lock!r:.80}; it has: {', '.join(found.locks) or 'none'}")
        out().print(found.locks[lock], soft_wrap=True, end="", markup=False, highlight=False)
        return
    if as_json:
        print_json(_facts(found))
        return
    facts = _facts(found)
    said = [f"{facts['name']}, by layerzero {facts['made_by']}{', on a GPU' if facts['is_on_gpu'] else ''}"]
    for kind in ("inputs", "outputs"):
        said += [f"  {kind[:-1]} {one['name']}: {one['dtype']}{one['shape']}" for one in facts[kind]]
    said += [f"  {name} in environment {env}" for name, env in facts["environments"].items()]
    said.append(f"  {facts['constant_bytes']:,} bytes of constants, {facts['slot_bytes']:,} of slots")
    out().print(Text("\n".join(said)), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("step", "op", "kernel", "us", "at"):
        table.add_column(head, overflow="fold")
    for number, step in enumerate(facts["steps"]):
        table.add_row(str(number), step["op"], step["kernel"], f"{step['us']:,.1f}", Text(step["where"]))
    out().print(table)


@bundle_app.command()
def verify(file: File, as_json: Json = False) -> None:
    """Compare every byte with its SHA-256; exit code 1 where one is another."""
    from layerzero.client.bundles import form
    from layerzero.client.cli.output import FAILED, note, print_json
    from layerzero.ipc.errors import LayerZeroError

    problem = ""
    try:
        form.verify(file)
    except LayerZeroError as exc:
        problem = exc.message
    if as_json:
        print_json({"file": str(file), "problem": problem})
    else:
        note(problem or f"{file} is as it was written")
    if problem:
        raise typer.Exit(FAILED)


@bundle_app.command()
def run(
    file: File,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="FILE.npz", help="Its inputs by name; else random ones.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.npz", help="Write its outputs there, by name.")
    ] = None,
    any_lock: Annotated[
        bool, typer.Option("--any-lock", help="Also where environments are locked otherwise than the bundle's.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of random inputs.")] = 0,
    as_json: Json = False,
) -> None:
    """Run a bundle once, and print which kernels served it."""
    import numpy as np

    from layerzero.client.bundles.bundle import load_bundle
    from layerzero.client.cli.calls import Connected
    from layerzero.client.cli.output import note, out, print_json
    from layerzero.ipc.errors import InvalidArgument

    given: dict[str, Any] = {}
    if inputs is not None:
        try:
            with np.load(inputs, allow_pickle=False) as held:
                given = dict(held)
        except (OSError, ValueError) as exc:
            raise InvalidArgument(f"name a file that numpy.savez has written: {inputs}: {exc!s:.200}") from exc
    with Connected():
        bundle = load_bundle(file, any_lock=any_lock)
        if bundle.is_on_gpu:
            raise InvalidArgument(f"run it by lz.load_bundle, with arrays on a GPU: {file} is of a plan on one")
        if inputs is None:
            given = {name: _random(spec, seed + place) for place, (name, spec) in enumerate(bundle.inputs.items())}
        found = bundle.arrays_of(bundle(**given))
    if output is not None:
        try:
            with open(output, "wb") as stream:
                np.savez(stream, **found)
        except OSError as exc:
            raise InvalidArgument(f"name a file that can be written: {output}: {exc.strerror}") from exc
    steps = [{"step": one.number, "kernel": one.kernel_id, "us": one.us, "how": one.how} for one in bundle.timings()]
    if as_json:
        print_json({"steps": steps, "outputs": {name: list(array.shape) for name, array in found.items()}})
        return
    for one in steps:
        out().print(f"step {one['step']} by {one['kernel']} in {one['us']:,.1f} us", highlight=False)
    note(f"outputs: {', '.join(f'{name} {list(array.shape)}' for name, array in found.items())}")


def _demand_all(plan: Any, given: list[Any]) -> None:
    """Raises InvalidArgument where the arrays are not the function's arguments."""
    import inspect

    from layerzero.ipc.errors import InvalidArgument

    function = getattr(plan.__wrapped__, "forward", plan.__wrapped__)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*given)
    except TypeError as exc:
        name = getattr(function, "__name__", "it")
        raise InvalidArgument(f"give an array for each argument of {name}{signature}: {exc}") from exc


def _function(text: str) -> Any:
    import functools
    import importlib
    import importlib.util
    import sys

    from layerzero.ipc.errors import InvalidArgument

    place, _, name = text.rpartition(":")
    if not place or not name:
        raise InvalidArgument(f"{text!r:.80} names no function; allowed: MODULE:NAME or FILE.py:NAME")
    path = Path(place)
    sys.path.insert(0, str(path.parent.absolute() if path.suffix == ".py" else Path.cwd()))
    try:
        module = importlib.import_module(path.stem if path.suffix == ".py" else place)
        return functools.reduce(getattr, name.split("."), module)
    except (ImportError, AttributeError) as exc:
        raise InvalidArgument(f"{text}: {exc}") from exc


def _array(word: str, seed: int) -> Any:
    import numpy as np

    from layerzero.client.cli.calls import parse_spec
    from layerzero.ipc.errors import InvalidArgument

    if word.endswith(".npy"):
        try:
            return np.load(word, allow_pickle=False)
        except (OSError, ValueError) as exc:
            raise InvalidArgument(f"name a file that numpy.save has written: {word}: {exc!s:.200}") from exc
    spec = parse_spec(word)
    return None if spec is None else _random(spec, seed)


def _random(spec: TensorSpec, seed: int) -> Any:
    from layerzero.client.tools.inputs import random_inputs

    return random_inputs("silu", {"input": spec}, seed)["input"]


def _facts(found: BundleFile) -> dict[str, Any]:
    content, manifest = found.content, found.manifest

    def named(which: tuple[tuple[str, int], ...]) -> list[dict[str, Any]]:
        specs = [(name, content.tensors[number].spec) for name, number in which]
        return [{"name": name, "dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in specs]

    return {
        "name": manifest.name,
        "made_by": manifest.made_by,
        "made_s": manifest.made_s,
        "is_on_gpu": content.is_on_gpu,
        "inputs": named(content.inputs),
        "outputs": named(content.outputs),
        "environments": {one.backend: one.env for one in manifest.environments},
        "steps": [
            {"op": step.op, "backend": step.backend, "kernel": step.kernel, "us": step.us, "where": step.where}
            for step in content.steps
        ],
        "constant_bytes": content.constant_bytes,
        "slot_bytes": content.slot_bytes,
        "parts": {part.name: {"bytes": part.nbytes, "sha256": part.sha256.hex()} for part in manifest.parts},
    }
