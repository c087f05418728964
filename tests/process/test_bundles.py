"""Bundles: plans as files, run by processes without the code that they were recorded of. Against real brokers."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from tests.backends.toy import KILL, fault
from tests.process.harness import Site, wait_ended
from tests.process.planned import W, X, agree, block, expected, settled, silu, some, two_ready
from tests.process.test_cli import data
from tests.process.test_cli import lz as lz_command

import layerzero as lz
from layerzero.client.bundles import form
from layerzero.client.cli import bundle as cli_bundle
from layerzero.ipc.errors import EnvChanged, InvalidArgument

SCALE = np.linspace(1, 2, 24, dtype=np.float32).reshape(6, 4)


def many(x: Any, y: Any) -> Any:
    """Views, a part of a constant, one that is read in two ways, and results that are not all of their memory."""
    h = lz.matmul(lz.silu(x), SCALE)
    rest = lz.silu(lz.matmul(lz.matmul(y.T, W[1:5]), SCALE[:6]))
    return {"h": lz.silu(lz.matmul(h, SCALE.T)), "rest": [rest.T, rest[1:], 3], "none": None}


@pytest.fixture
def written(connected: Site, tmp_path: Path) -> Path:
    """The bundle of `block`."""
    connected.wait_ready("alpha")
    path = tmp_path / "block.lzb"
    lz.write_bundle(settled(lz.plan(block), X), path)
    return path


def test_a_bundle_gives_the_bits_of_its_plan(connected: Site, written: Path) -> None:
    """By the same kernels, in one message; its arrays by order or by name, and no others."""
    bundle = lz.load_bundle(written)
    spec = lz.TensorSpec.contiguous("float32", (4, 6))
    assert (bundle.name, bundle.inputs, bundle.outputs) == ("block", {"x": spec}, {"result": spec})
    assert [one.backend for one in bundle.environments] == ["alpha"]
    assert bundle.timings() == []
    for seed in range(3):
        assert np.array_equal(bundle(some(seed)), block(some(seed)))
        agree(bundle(x=some(seed)), expected(some(seed)))
    assert [run.kernel_id for run in bundle.timings()] == ["alpha.silu", "alpha.matmul", "alpha.silu"]
    assert {run.how for run in bundle.timings()} == {"chain"}
    assert repr(bundle) == "<lz.Bundle of block(float32[4, 6]): 3 calls>"
    for args, named, why in (
        ((X.astype("f8"),), {}, r"x is float64\[4, 6\]; this bundle was made for float32\[4, 6\]"),
        ((X[:2],), {}, r"x is float32\[2, 6\]"),
        ((np.asfortranarray(X),), {}, "pass x in row-major order"),
        ((memoryview(X),), {}, "pass x as a NumPy array"),
        ((), {}, "0 arrays were given; needed: x"),
        ((X,), {"x": X}, "'x' is no input of it, or was given twice"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            bundle(*args, **named)


def test_views_constants_and_results_of_any_form(connected: Site, tmp_path: Path) -> None:
    """Where they lie is in the file; the result has the form that the function gave it."""
    connected.wait_ready("alpha")
    y = some(1, 4, 3)
    plan, path = lz.plan(many), tmp_path / "many.lzb"
    while not (plan.phase == "FROZEN" and plan.explain().messages):
        plan(X, y)
    lz.write_bundle(plan, path)
    bundle = lz.load_bundle(path)
    assert [*bundle.inputs, *bundle.outputs] == ["x", "y", "h", "rest.0", "rest.1"]
    for seed in range(3):
        x, y = some(seed), some(seed + 9, 4, 3)
        found, wanted = bundle(x, y), many(x, y)
        assert found.keys() == wanted.keys()
        assert (found["none"], found["rest"][2]) == (None, 3)
        for one, other in ((found["h"], wanted["h"]), *zip(found["rest"][:2], wanted["rest"][:2], strict=True)):
            assert np.array_equal(one, other)


def test_an_executor_is_a_bundle_of_one_call(connected: Site, tmp_path: Path) -> None:
    """All its arrays are inputs, and its kernel is kept to."""
    connected.wait_ready("alpha")
    path = tmp_path / "matmul.lzb"
    lz.write_bundle(lz.jit("matmul", X, W), path)
    bundle = lz.load_bundle(path)
    assert [*bundle.inputs] == ["a", "b"]
    assert np.array_equal(bundle(X, b=W), lz.matmul(X, W))
    assert [run.kernel_id for run in bundle.timings()] == ["alpha.matmul"]


def test_a_worker_that_dies_in_a_bundle_costs_no_result(connected: Site, written: Path) -> None:
    """The next best kernel answers, and `timings` tells."""
    bundle = lz.load_bundle(written)
    agree(bundle(X), expected(X))
    x = X.copy()
    x.flat[0] = fault(KILL, "alpha")
    agree(bundle(x)[1:], expected(x[1:]))
    [first, *_] = bundle.timings()
    assert first.attempts == 1
    assert first.kernel_id in ("beta.silu", "gamma.silu")
    agree(bundle(X), expected(X))


def with_env(path: Path, env: str, kernel: str = "") -> Path:
    """The same bundle of another environment, or with another kernel for its first step."""
    found = form.verify(path)
    room = memoryview(bytearray(found.content.constant_bytes))
    found.constants(room)
    envs = {one.backend: (env or one.env, "a==1\n") for one in found.manifest.environments}
    first, *rest = found.content.steps
    content = replace(found.content, steps=(replace(first, kernel=kernel or first.kernel), *rest))
    other = path.with_name(f"other{env}{kernel}.lzb")
    form.write(other, found.manifest.name, found.manifest.made_by, found.manifest.made_s, content, envs, [room])
    return other


def test_another_lock_is_an_error_that_says_which(written: Path) -> None:
    """And so is a kernel that is not here; unless the caller says that they may be any."""
    other = with_env(written, "0123456789abcdef")
    said = r"have alpha locked as the bundle has it .*0123456789abcdef, here it is"
    with pytest.raises(EnvChanged, match=said) as another:
        lz.load_bundle(other)
    assert f"(lz bundle show {other} --lock alpha)" in another.value.message
    assert "--any-lock" in another.value.facts["repair"]  # what is built here would be built with its own lock again
    agree(lz.load_bundle(other, any_lock=True)(X), expected(X))
    other = with_env(written, "", "alpha.gone")
    with pytest.raises(EnvChanged, match=r"write the bundle again, or pass any_lock=True: .* needs alpha.gone"):
        lz.load_bundle(other)
    agree(lz.load_bundle(other, any_lock=True)(X), expected(X))


@pytest.mark.parametrize("given", [{"backends": "a"}, {"backends": [1]}, {"kernels": ["a"] * 1025}])
def test_locks_are_asked_for_by_lists_of_names(connected: Site, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="locks takes lists of at most 1024 texts"):
        lz.session().ask("locks", **given)


def test_a_bundle_goes_on_with_the_next_broker(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """Which is asked for its locks and kernels, too; and in a forked child."""
    site, path = two_ready(new_site), tmp_path / "block.lzb"
    lz.write_bundle(settled(lz.plan(block), X), path)
    bundle = lz.load_bundle(path)
    agree(bundle(X), expected(X))
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            agree(bundle(X + 1), expected(X + 1))
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    pid = site.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    with pytest.raises(lz.BrokerLost):
        bundle(X)
    site.connect()
    agree(bundle(X), expected(X))


def own(x: Any) -> Any:
    return lz.silu(x) + 1


def back(x: Any) -> Any:
    return lz.silu(x), x


def fixed(x: Any) -> Any:
    return lz.silu(x), W


def into(x: Any, out: Any) -> Any:
    return lz.silu(x, out=out)


def test_what_cannot_be_a_bundle_says_why(connected: Site, tmp_path: Path) -> None:
    """With the step and its line."""
    connected.wait_ready("alpha")
    for function, args, why in (
        (own, (X,), r"do it with an lz op.*: step 1, add at test_bundles.py:\d+, is code of Python's own"),
        (back, (X,), "return what steps make: the result has an argument"),
        (fixed, (X,), "return what steps make: the result has an array of the function's own"),
        (into, (X, np.empty_like(X)), r"leave out=.*: step 0, silu at test_bundles.py:\d+"),
        (block, (np.asfortranarray(X),), "pass x as an array in row-major order"),
    ):
        plan = lz.plan(function)
        for _ in range(3):
            plan(*args)
        with pytest.raises(InvalidArgument, match=why):
            lz.write_bundle(plan, tmp_path / "none.lzb")
    plan = lz.plan(block)
    with pytest.raises(InvalidArgument, match="run the plan first"):
        lz.write_bundle(plan, tmp_path / "none.lzb")
    plan(X)
    with pytest.raises(InvalidArgument, match="run the plan until it is FROZEN: it is WARM"):
        lz.write_bundle(plan, tmp_path / "none.lzb")
    with pytest.raises(InvalidArgument, match="not a function"):
        lz.write_bundle(block, tmp_path / "none.lzb")  # type: ignore[arg-type]
    assert [*tmp_path.iterdir()] == []


def test_commands_write_show_verify_and_run(
    connected: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes of their own: that which runs it has no code of the function's."""
    connected.wait_ready("alpha")
    code, file = tmp_path / "my_block.py", tmp_path / "block.lzb"
    code.write_text(
        "import numpy as np\nimport layerzero as lz\nW = np.eye(6, dtype=np.float32) * 2\n\n\n"
        "def block(x):\n    return lz.matmul(lz.silu(x), W)\n"
    )
    told = data(lz_command(connected, "bundle", "write", f"{code}:block", str(file), "4x6:float32", "--json"))
    kernels = ["alpha.silu", "alpha.matmul"]
    assert [step["kernel"] for step in told["steps"]] == kernels
    assert (told["name"], told["constant_bytes"]) == ("block", W.nbytes)
    code.unlink()
    np.savez(tmp_path / "in.npz", x=X)
    words = ["--inputs", str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz"), "--json"]
    ran = data(lz_command(connected, "bundle", "run", str(file), *words))
    assert [step["kernel"] for step in ran["steps"]] == kernels
    agree(np.load(tmp_path / "out.npz")["result"], silu(X) * 2)
    cli_bundle.show(file)
    cli_bundle.verify(file)
    shown = capsys.readouterr()
    assert "input x: float32[4, 6]" in shown.out
    assert "alpha.matmul" in shown.out
    assert "is as it was written" in shown.err
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(typer.Exit):
        cli_bundle.verify(file)
    assert "constants has other bytes than its SHA-256 says" in " ".join(capsys.readouterr().err.split())


def test_commands_say_what_is_missing_and_where_nothing_can_be_written(connected: Site, tmp_path: Path) -> None:
    """In a line each, and nothing is left."""
    connected.wait_ready("alpha")
    code, file, nowhere = tmp_path / "my_block.py", tmp_path / "block.lzb", tmp_path / "none" / "x"
    code.write_text("import layerzero as lz\n\n\ndef block(x, y):\n    return lz.silu(x), lz.silu(y)\n")
    spec = "4x6:float32"
    for words, why in (
        (("write", f"{code}:block", str(file), spec), "give an array for each argument of block(x, y): missing"),
        (("write", f"{code}:block", str(file), spec, spec, spec), "of block(x, y): too many positional arguments"),
        (("write", f"{code}:block", str(nowhere), spec, spec), f"name a file that can be written: {nowhere}: No such"),
    ):
        told = lz_command(connected, "bundle", *words, COLUMNS="1000")
        assert told.returncode != 0
        assert why in told.stderr
        assert "Traceback" not in told.stderr
    assert not file.exists()
    data(lz_command(connected, "bundle", "write", f"{code}:block", str(file), spec, spec, "--json"))
    told = lz_command(connected, "bundle", "run", str(file), "-o", str(nowhere), COLUMNS="1000")
    assert f"name a file that can be written: {nowhere}: No such" in told.stderr
    assert "Traceback" not in told.stderr
    with pytest.raises(InvalidArgument, match="name a file that can be written"):
        lz.jit("silu", X).export(nowhere)
