"""`lz env`: what it refuses, and what it says of it. Backends of these tests run in our own interpreter: nothing is
downloaded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import BACKENDS, ROOT, Site
from tests.process.test_cli import DONE, FAILED, USAGE, data, lz

from layerzero.ipc.vocabulary.ops import PUBLIC_OPS

Sites = Callable[..., Site]


@pytest.fixture
def site(new_site: Sites) -> Site:
    return new_site()


def rows(finished: Any, code: int) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in data(finished, code)["environments"]}


# --- descriptors that no broker would take

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt field": (
        {"require_contiguous": True},
        "odd.json: ops.silu.0.require_contiguous: unknown field require_contiguous; did you mean requires_contiguous?",
    ),
    "an op that does not exist": ({}, "odd.json: ops: no op is called 'sliu'; did you mean 'silu'?"),
}


@pytest.fixture(params=MISTAKES)
def mistaken(request: pytest.FixtureRequest, site: Site) -> tuple[Site, str]:
    """A site whose backend `odd` has a mistake in its descriptor, and what must be said of it."""
    claims, said = MISTAKES[request.param]
    site.add_backend("odd", **claims)
    if not claims:
        path = site.manifests / "odd.json"
        path.write_text(path.read_text().replace('"silu": [', '"sliu": ['))
    return site, said


@pytest.mark.parametrize("verb", ["build", "probe"])
def test_a_descriptor_that_no_broker_takes_is_refused_before_anything_is_probed(
    mistaken: tuple[Site, str], verb: str
) -> None:
    """Else it is "ok, 24 certified", and then every call says that there is no such backend."""
    site, said = mistaken
    row = rows(lz(site, "env", verb, "odd", "alpha", "--json"), FAILED)
    assert row["alpha"]["ok"]
    assert (row["odd"]["ok"], row["odd"]["stage"], "probe" in row["odd"]) == (False, "descriptor", False)
    assert row["odd"]["repair"] == f"mend {site.manifests / 'odd.json'}"
    assert said in row["odd"]["cause"]
    shown = lz(site, "env", verb, "odd")
    assert "descriptor failed" in shown.stdout
    assert said in shown.stdout


def test_list_and_lock_refuse_such_a_descriptor_too(mistaken: tuple[Site, str]) -> None:
    """Whoever looks for what is wrong asks these first."""
    site, said = mistaken
    row = rows(lz(site, "env", "list", "--json"), DONE)["odd"]
    assert (row["state"], said in row["cause"]) == ("refused", True)
    locked = lz(site, "env", "lock", "odd")
    assert (locked.returncode, said in locked.stderr) == (FAILED, True)


def test_the_environment_of_a_program_is_locked_as_the_head_of_its_lock_says(site: Site, tmp_path: Path) -> None:
    """It serves nothing. Without an index nothing comes of it here but its resolution."""
    manifest = 'summary = "a program"\nprovider = "null"\ndescriptor = "null"\npython = "3.11"\n'
    (tmp_path / "program.toml").write_text(f'{manifest}[variants.cpu]\nrequirements = ["no-such-package"]\n')
    said = lz(site, "env", "lock", "program", "--manifests", str(tmp_path), PIP_NO_INDEX="1")
    assert said.returncode == FAILED
    assert "no-such-package" in said.stderr
    assert "its manifest says" not in said.stderr


def test_the_broker_says_that_the_descriptor_was_refused(mistaken: tuple[Site, str]) -> None:
    """A backend that is built, and of which calls and `lz doctor` say that nothing is called so."""
    site, said = mistaken
    site.start()
    for words in (("run", "silu", "8:float32", "-b", "odd"), ("explain", "silu", "8:float32", "-b", "odd")):
        refused = lz(site, *words)
        assert refused.returncode == USAGE
        assert "no backend is called 'odd': its descriptor was refused: " in refused.stderr
        assert said in refused.stderr
    for words in (("doctor", "odd"), ("restart", "odd"), ("status", "-b", "odd")):
        assert said in lz(site, *words).stderr


# --- probes

SEGV = """
import os
from layerzero.workers.provider import Loaded

def load():
    def silu(call, inputs, outputs):
        return lambda: os.kill(os.getpid(), 11)
    return Loaded({}, {"odd.silu": silu, "odd.null": lambda *_: lambda: None})
"""
# Right numbers, and zeros between the elements of the output.
CARELESS = (
    (BACKENDS / "toy.py").read_text()
    + """
_right = _silu

def _silu(call, inputs, outputs):
    run, memory = _right(call, inputs, outputs), outputs[0].memory

    def careless():
        memory[:] = bytes(len(memory))
        run()

    return careless
"""
)


def test_a_kernel_that_kills_the_probe_is_named_with_its_case_and_what_to_mend(site: Site) -> None:
    """To build again mends nothing."""
    site.add_backend("odd", provider=SEGV)
    row = rows(lz(site, "env", "probe", "odd", "--json"), FAILED)["odd"]
    assert re.match(r"crash: the probe's process died of SIGSEGV in odd\.silu, float32, case '.+'$", row["cause"])
    mend = f"mend odd.silu in {site.manifests / 'odd.py'}, or take it out of {site.manifests / 'odd.json'}, then: "
    assert row["repair"].startswith(f"{mend}lz env probe odd --manifests {site.manifests} ")
    assert "Segmentation fault" in row["probe"]["stderr_tail"]


def test_what_is_not_certified_for_one_cause_is_one_line(site: Site) -> None:
    """Dozens of near-equal lines are read by nobody."""
    site.add_backend("odd", provider=CARELESS)
    shown = lz(site, "env", "probe", "odd")
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("not certified")]
    assert line.startswith("not certified: odd.silu in float32, ")
    assert "the kernel wrote between the elements of its output" in line
    assert line.endswith("does it need requires_contiguous?")
    assert "more classes, of " in line


# --- the command line itself


@pytest.mark.parametrize(
    "words", [(), *((verb,) for verb in ("list", "build", "probe", "lock", "gc", "add", "export"))]
)
def test_every_command_has_short_help(site: Site, words: tuple[str, ...]) -> None:
    """As all others of `lz`; and `lz env` installs no completion of its own."""
    shown = lz(site, "env", *words, "-h")
    assert shown.returncode == DONE
    assert "-h" in shown.stdout
    assert "completion" not in shown.stdout


def test_gc_can_be_asked_before(site: Site, tmp_path: Path) -> None:
    """What is removed cost minutes to build."""
    stale = tmp_path / "store" / "envs" / "gone-0000000000000003"
    stale.mkdir(parents=True)
    words = ("env", "gc", "--store", str(tmp_path / "store"))
    said = data(lz(site, *words, "--dry-run", "--json"))
    assert ([row["path"] for row in said["removed"]], said["dry_run"]) == ([str(stale)], True)
    assert "nothing was removed" in lz(site, *words, "--dry-run").stdout
    assert stale.exists()


@pytest.mark.parametrize("name", ["onnxruntime@1.16", "old-numpy"])
def test_removing_what_is_not_declared_says_where_names_are_to_be_had(site: Site, name: str) -> None:
    """A version and an environment of functions are no backends from outside."""
    said = lz(site, "env", "remove", name)
    assert said.returncode == 1
    assert said.stderr.startswith(f"name what can be forgotten: '{name}' is no version")
    assert "lz env list" in said.stderr


def test_a_lock_of_the_installed_package_is_not_rewritten_in_silence(site: Site, tmp_path: Path) -> None:
    """The next `pip install` replaces it. Without an index nothing comes of it here."""
    package = tmp_path / "site-packages" / "layerzero"
    shutil.copytree(ROOT / "src" / "layerzero", package, ignore=shutil.ignore_patterns("__pycache__"))
    said = lz(site, "env", "lock", "mlx", PYTHONPATH=str(package.parent), PIP_NO_INDEX="1")
    assert said.returncode == FAILED
    text = (
        f"{package / 'envs' / 'locks' / 'mlx.cpu.txt'} is of the installed package, whose next installation replaces it"
    )
    assert text in said.stderr


# --- lz ops


def test_ops_shows_what_is_certified_and_what_is_not_tried(
    site: Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What a backend claims serves nobody before its probe has said so; the table must tell the two apart. In
    a store of its own: in that of other tests its backends have been probed."""
    site.environ["LAYERZERO_STORE"] = str(tmp_path_factory.mktemp("store"))
    site.add_backend("odd", provider=CARELESS)
    said = {row["backend"]: row for row in data(lz(site, "ops", "silu", "--json"))["ops"]["silu"]}
    assert (said["alpha"]["state"], said["alpha"]["certified"]) == ("not probed", {})
    assert lz(site, "env", "probe", "alpha", "odd").returncode == DONE
    said = {row["backend"]: row for row in data(lz(site, "ops", "silu", "--json"))["ops"]["silu"]}
    assert said["alpha"]["state"] == "certified"
    assert "plain/small/dense" in said["alpha"]["certified"]["float32"]
    assert said["odd"]["state"] == "certified"
    assert "plain/small/strided" in said["odd"]["refused"]["float32"]
    assert "plain/small/strided" not in said["odd"]["certified"]["float32"]
    assert said["cupy"]["state"] == "other variant"
    assert "cu13" in said["cupy"]["cause"]


def test_ops_of_all_ops_fits_a_terminal(site: Site) -> None:
    """Every public op has its line, and no line is wider than 80 columns."""
    shown = lz(site, "ops", COLUMNS="80")
    assert shown.returncode == DONE, shown.stderr
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines[1:] if line[1:2] != " "} == set(PUBLIC_OPS)


# --- backends that nobody of the project has run

NEVER_RUN = ("torch-hpu", "torch-rocm", "torch-xpu")


def test_what_was_never_run_is_shown_as_that(site: Site, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A claim of a library's documents is no certificate: the table has it apart, with what this machine lacks."""
    site.environ["LAYERZERO_STORE"] = str(tmp_path_factory.mktemp("store"))
    said = {row["backend"]: row for row in data(lz(site, "ops", "silu", "--json"))["ops"]["silu"]}
    assert {said[name]["state"] for name in NEVER_RUN} == {"not run"}
    assert {said[name]["certified"] == {} for name in NEVER_RUN} == {True}
    assert said["torch-xpu"]["cause"].startswith("by no machine of this project; this one: needs an Intel GPU")
    shown = " ".join(lz(site, "env", "list").stdout.split())
    assert f"not run by this project on any machine, nor on this one, --all shows why: {', '.join(NEVER_RUN)}" in shown


def test_a_build_for_a_device_that_is_not_here_refuses_and_costs_nothing(site: Site, tmp_path: Path) -> None:
    """Gigabytes for a card that is not here are an accident. Named, it says so; unnamed, it is no part of a build."""
    store = tmp_path / "store"
    said = rows(lz(site, "env", "build", *NEVER_RUN, "--store", str(store), "--json"), FAILED)
    assert {(row["ok"], row["stage"], "probe" in row) for row in said.values()} == {(False, "build", False)}
    assert [name for name in NEVER_RUN if ", and this machine has none (no " not in said[name]["cause"]] == []
    assert not store.exists()
    image = rows(lz(site, "env", "build", "--no-probe", "--store", str(store), "--json", "torch-xpu"), FAILED)
    assert image["torch-xpu"]["repair"] == "lz env lock torch-xpu"


# --- lz types


def test_types_of_an_op_fit_a_terminal(site: Site) -> None:
    """What is taken, computed in and given, with who has it, and what is rejected."""
    shown = lz(site, "types", "scaled_linear", COLUMNS="80")
    assert shown.returncode == DONE, shown.stderr
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["x,", "weight", "computes", "in", "gives", "certified", "here", "not", "here"]
    assert " x_zero_point: int32" in [line.rstrip() for line in lines]
    assert "rejected" in shown.stdout


def test_ops_names_the_op_that_was_meant(site: Site) -> None:
    """As every command does with a name that it does not know."""
    wrong = lz(site, "ops", "sliu")
    assert (wrong.returncode, "no op is called 'sliu'; did you mean 'silu'?" in wrong.stderr) == (USAGE, True)
