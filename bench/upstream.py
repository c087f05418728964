"""Tests of FlashInfer, xFormers and Liger themselves, with calls of LayerZero in the place of the functions that they
test. Writes results/upstream.md from all runs of one folder, and exits with 1 where one of their tests fails.

    python bench/upstream.py run flashinfer --source DIR --into RUNS [--backend NAME] [--here] [--each N]
    python bench/upstream.py table RUNS

DIR is a checkout of the library's tests alone (`git archive TAG tests`): nothing of theirs is in this repository. The
library itself has to be importable, since its tests import it; none of its kernels runs in this process but where
upstream_calls says so. Needs pytest, and torch with CUDA.

A test counts as "right" if it passed and LayerZero served a call of it; as "no such option" if it asked for what no op
of ours has; as "refused" if no kernel took the call, by reason; as "theirs" if they skip it on this machine, or it
fails before it calls any function of ours. Tests that call none are left out.

`--each N` takes N of a function's parameters, by a seed; `--here` runs the backend in this interpreter, as NAME-here,
where no environment of it was built.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import RESULTS, backend_versions, own_broker, save

import layerzero as lz
from layerzero.capabilities.profiles import Profile
from layerzero.envs import profiles

DESCRIPTORS = Path(lz.__file__).parent / "capabilities" / "descriptors"
PYTEST = ("-q", "--no-header", "--tb=short", "-c", os.devnull, "-p", "no:cacheprovider", "--import-mode=importlib")
OURS = "layerzero: "  # how the reasons of tests that we skip begin
PROVIDER = """
from dataclasses import replace

from {module} import load as load_theirs


def load():
    found = load_theirs()
    return replace(found, kernels={{key.replace("{name}", "{own}", 1): bind for key, bind in found.kernels.items()}})
"""
LIBRARIES = {"flashinfer": "flashinfer-python", "xformers": "xformers", "liger": "liger-kernel"}


class Plugin:
    """What becomes of each test. `tally`: (file, outcome, reason) of each."""

    def __init__(self, calls: Any, each: int, seed: int) -> None:
        self.calls, self.each, self.seed = calls, each, seed
        self.tally: Counter[tuple[str, str, str]] = Counter()
        self.wrong: list[str] = []
        self.before = 0

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        by_function = defaultdict(list)
        for item in items:
            by_function[item.nodeid.partition("[")[0]].append(item)
        chosen = random.Random(self.seed)
        kept = [one for found in by_function.values() for one in chosen.sample(found, min(self.each, len(found)))]
        config.hook.pytest_deselected(items=[one for one in items if one not in set(kept)])
        items[:] = kept

    def pytest_runtest_setup(self, item: Any) -> None:
        self.before = sum(self.calls.served.values())
        self.calls.file = item.path.name

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and not (report.when == "setup" and report.outcome != "passed"):
            return
        file = report.nodeid.partition("::")[0].rpartition("/")[2]
        what, why = report.outcome, ""
        if hasattr(report, "wasxfail"):
            what, why = "theirs", f"expected to fail: {report.wasxfail[:60]}"
        elif report.outcome == "skipped":
            why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            why = why.removeprefix("Skipped: ")
            what, why = why.removeprefix(OURS).split(": ", 1) if why.startswith(OURS) else ("theirs", why[:80])
        elif report.outcome == "failed":
            last, is_ours = str(report.longrepr).splitlines()[-1], "layerzero" in str(report.longrepr)
            what = "wrong" if is_ours or sum(self.calls.served.values()) > self.before else "theirs"
            why = "" if what == "wrong" else f"fails before a call of ours: {last[:80]}"
            if what == "wrong":
                self.wrong.append(f"{report.nodeid}: {last[:200]}")
        else:
            what = "right" if sum(self.calls.served.values()) > self.before else "not ours"
        self.tally[file, what, why] += 1


@contextlib.contextmanager
def in_this_interpreter(names: list[str]) -> Iterator[dict[str, str]]:
    """Manifests of backends with workers of this interpreter, as NAME-here; the variables that find them."""
    with tempfile.TemporaryDirectory(prefix="lz-here-") as folder:
        for name in names:
            own, module = f"{name}-here", f"layerzero.workers.providers.{name.replace('-', '_')}"
            made = json.loads((DESCRIPTORS / f"{name}.json").read_text()) | {"backend": own}
            for kernel in (kernel for found in made["ops"].values() for kernel in found):
                kernel["kernel_id"] = kernel["kernel_id"].replace(name, own, 1)
                # Compiled within their first calls: a compilation of its own for each shape of a test takes longer.
                kernel.pop("needs_jit", None), kernel.pop("compiled_for", None)
            Path(folder, f"{own}.json").write_text(json.dumps(made))
            Path(folder, f"{own}.py").write_text(PROVIDER.format(module=module, name=name, own=own))
            environ = {"FLASHINFER_NO_DOWNLOAD": "1", "FLASHINFER_USE_CUDA_NORM": "1"}
            if "LD_LIBRARY_PATH" in os.environ:  # xFormers needs CUDA 12's runtime beside a torch for CUDA 13
                environ["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
            lines = ['summary = "here"', f'provider = "{own}.py"', f'descriptor = "{own}.json"', 'interpreter = "host"']
            given = ", ".join(f'{key} = "{value}"' for key, value in environ.items())
            Path(folder, f"{own}.toml").write_text("\n".join([*lines, f"env = {{{given}}}", ""]))
        yield {"LAYERZERO_MANIFEST_DIRS": folder}


def _each(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Functions as parts of a test's id; all of a file where none is named."""
    return [(name,) for name in names] or [()]


def run(args: argparse.Namespace) -> None:
    import pytest

    library: str = args.library
    calls = importlib.import_module(f"upstream_{library}")
    by_file = {file: calls.TESTS.get(file, ()) for file in args.tests or calls.TESTS}
    tests = [str(args.source / "::".join((file, *one))) for file, names in by_file.items() for one in _each(names)]
    names = [library, *(["torch-cuda"] if args.beside else [])] if args.here else []
    plugin = Plugin(calls.calls, args.each, args.seed)
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(in_this_interpreter(names))
        settings = {"LAYERZERO_TIMEOUT_S": "400"}
        if args.here:  # nothing is certified yet: bounded to what these tests call
            store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lz-store-")))
            profiles.write(Profile(library, dict.fromkeys(args.ops or calls.OPS, calls.DTYPES)), store)
            settings |= {**found, "LAYERZERO_STORE": str(store), "LAYERZERO_PROFILE": library}
        broker = stack.enter_context(own_broker(**settings))
        calls.calls.backend = args.backend
        calls.patch()
        sys.path.insert(0, str(args.source))
        os.chdir(args.source)
        code = pytest.main(
            [*PYTEST, f"--rootdir={args.source}", *getattr(calls, "PYTEST", ()), *args.pytest, *tests], plugins=[plugin]
        )
        versions = backend_versions()
        log = (broker / "broker.log").read_bytes()
    served = Counter({" by ".join(key): count for key, count in calls.calls.served.items()})
    made = {
        "library": library,
        "version": version(LIBRARIES[library]),
        "backend": args.backend or "whichever is best",
        "tally": [[*key, count] for key, count in plugin.tally.items()],
        "served": dict(served),
        "wrong": plugin.wrong,
        "versions": versions,
        "code": int(code),
        "each": args.each,
    }
    args.into.mkdir(parents=True, exist_ok=True)
    (args.into / f"{library}-{args.backend or 'any'}.log").write_bytes(log)
    (args.into / f"{library}-{args.backend or 'any'}.json").write_text(json.dumps(made, indent=1))
    print(json.dumps({key: made[key] for key in ("tally", "served", "wrong")}, indent=1))
    sys.exit(1 if plugin.wrong else 0)


def table(args: argparse.Namespace) -> None:
    runs = [json.loads(path.read_text()) for path in sorted(args.runs.glob("*.json"))]
    rows, notes, versions = [], [], {}
    for made in runs:
        versions |= made["versions"]
        by_file: dict[str, Counter[str]] = defaultdict(Counter)
        for file, what, _, count in made["tally"]:
            by_file[file][what] += count
        for file, found in sorted(by_file.items()):
            if found.total() == found["not ours"]:
                continue
            outcomes = ("right", "wrong", "refused", "no such option", "theirs")
            name = f"{made['library']} {made['version']}"
            rows.append([name, made["backend"], file, *(str(found[what]) for what in outcomes)])
        why: Counter[str] = Counter()
        for _, what, reason, count in made["tally"]:
            if what in ("refused", "no such option"):
                why[f"{what}: {reason}"] += count
        told = "; ".join(f"{reason} {count}" for reason, count in why.most_common())
        served = ", ".join(f"{kernel} {count}" for kernel, count in sorted(made["served"].items()))
        notes += [
            f"**{made['library']}, {made['backend']}.** Served: {served or 'none'}. Not served: {told or 'none'}.",
            "",
        ]
        notes += [f"- WRONG {one}" for one in made["wrong"]]
    headings = ("library", "backend", "file", "right", "wrong", "refused", "no such option", "theirs")
    wrong = sum(len(made["wrong"]) for made in runs)
    title = "Tests of FlashInfer, xFormers and Liger, with LayerZero's calls in place of their functions"
    command = f"python bench/upstream.py run LIBRARY --source DIR --into RUNS --each {runs[0]['each']}, then table RUNS"
    notes.append(f"Wrong in all: {wrong} (aim: none: {'met' if not wrong else 'MISSED'}).")
    print("written:", save("upstream", title, versions, command, headings, rows, notes), RESULTS)
    sys.exit(1 if wrong else 0)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = made.add_subparsers(required=True)
    one = verbs.add_parser("run", help="one library's tests")
    one.add_argument("library", choices=LIBRARIES)
    one.add_argument("--source", type=Path, required=True, help="folder with the library's tests")
    one.add_argument("--into", type=Path, required=True, help="folder for what came of it, which `table` reads")
    one.add_argument("--backend", help="the backend of each call; any by default")
    one.add_argument("--here", action="store_true", help="the library's backend in this interpreter, as NAME-here")
    one.add_argument("--beside", action="store_true", help="with --here: torch-cuda-here beside it")
    one.add_argument("--each", type=int, default=60, help="so many of each test function's parameters")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--tests", nargs="*", help="files of theirs, in place of those that upstream_LIBRARY names")
    one.add_argument("--ops", nargs="*", help="with --here: the ops to certify and serve, in place of all of them")
    one.add_argument("--pytest", nargs="*", default=(), help="further arguments of pytest")
    one.set_defaults(do=run)
    every = verbs.add_parser("table", help="results/upstream.md of the runs in a folder")
    every.add_argument("runs", type=Path)
    every.set_defaults(do=table)
    args = made.parse_args()
    for name in ("source", "into"):
        if hasattr(args, name):
            setattr(args, name, getattr(args, name).resolve())
    args.do(args)


if __name__ == "__main__":
    main()
