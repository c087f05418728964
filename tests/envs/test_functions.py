"""Functions in real environments: two NumPys and two protobufs in one program, arrays that are lent, conflicts."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.envs import numpy_functions as fn
from tests.process.harness import ROOT, Site, wait_until

import layerzero as lz

EXAMPLE = ROOT / "examples" / "functions.py"


def run(site: Site, *argv: str) -> subprocess.CompletedProcess[str]:
    with site.environment():
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PATH": path}
        return subprocess.run([sys.executable, *argv], env=environ, capture_output=True, text=True, check=False)


def is_well(backend: str) -> bool:
    return any(row["name"] == backend and not row["unavailable"] for row in lz.status()["backends"])


@pytest.fixture(scope="module")
def own_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose environments of functions nobody else sees; their wheels come from the installer's cache."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def site(own_store: Path) -> Iterator[Site]:
    """A broker that starts after the environments were built."""
    one = Site(own_store)
    with one.environment():
        fn.OLD.build(quiet=True)
        fn.NEW.build(quiet=True)
        one.start().connect()
        yield one
        lz.disconnect()
    one.stop()


@pytest.mark.timeout(600)  # it may have to download two NumPys
def test_the_example_has_two_of_each_in_one_program(own_store: Path) -> None:
    """As a newcomer runs it."""
    site = Site(own_store)
    try:
        answer = run(site, str(EXAMPLE), "--build")
    finally:
        site.stop()
    assert answer.returncode == 0, answer.stderr
    said = answer.stdout
    assert "old {'numpy': '1.26.4', 'protobuf': '3.20.3', 'onnxruntime': '1.16.3'} new {'numpy': '2." in said
    assert "'protobuf': '6." in said
    assert "'torch': '2.13" in said
    assert float(said.partition("largest difference ")[2].split()[0]) < 1e-4
    assert said.count("0 copied") == 2


DTYPES = ["bool", "uint8", "int16", "uint32", "int64", "float16", "float32", "float64"]


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("chunksize", [1, 3, 100])
def test_arrays_of_a_map_cross_as_in_single_calls(chunksize: int) -> None:
    """Shared ones as they lie, others copied; results are the caller's own."""
    plain = [np.full((3, n), n, np.float32) for n in range(1, 9)]
    shared = [lz.share(array) for array in plain]
    found = list(fn.new_echo.map([*plain, *shared], chunksize=chunksize))
    for array, (result, told) in zip([*plain, *plain], found, strict=True):
        np.testing.assert_array_equal(result, array)
        assert told == ["float32", list(array.shape), False]
        result[...] = 0
    np.testing.assert_array_equal(shared[3], plain[3])
    if chunksize > 1:
        assert list(fn.total.map(shared[:3], chunksize=3)) == [array.sum() for array in plain[:3]]
        report = fn.total.last_report()
        assert report.function.endswith("total (3 calls as one)")
        assert (report.uncopied_bytes, report.copies) == (sum(array.nbytes for array in shared[:3]), ())


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_all_kinds_cross_both_ways(site: Site, dtype: str) -> None:
    """Dense ones, views with gaps, transposed, reversed, empty and 0-dimensional ones."""
    base = np.arange(24).reshape(4, 6).astype(dtype)
    shared = lz.share(base)
    for array in (base, shared, shared[::2, 1:4], shared.T, base[::-1], base[:0], np.array(base[1, 2])):
        for echo in (fn.old_echo, fn.new_echo):
            found, seen = echo(array)
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(found, array)
            assert seen == [str(array.dtype), list(array.shape), array.size == 0]


def test_shared_arrays_are_lent_and_others_copied_and_the_report_says_so(site: Site) -> None:
    shared, own = lz.share(np.ones(1000)), np.ones(500)
    assert fn.total([shared, {"x": own}, shared[10:20]]) == 1510
    report = fn.total.last_report()
    assert report.uncopied_bytes == 8 * 1010
    assert [(copy.nbytes, copy.where) for copy in report.copies] == [(4000, "client")]
    assert lz.last_report().copies == report.copies
    first = fn.old_echo(shared)[0]
    assert fn.total([first]) == 1000  # a result lies in shared memory already
    assert fn.total.last_report().copies == ()


def test_results_live_as_long_as_someone_has_them(site: Site) -> None:
    """Their memory is not given to later calls, whatever part of the result is kept."""
    kept = [fn.old_echo(np.full(2000, n, np.int64))[0][5:7] for n in range(50)]
    assert [part.tolist() for part in kept] == [[n, n] for n in range(50)]


@pytest.mark.usefixtures("site")
def test_arguments_of_calls_past_the_broker_are_let_go() -> None:
    """Also where the last report, or a future, is kept, and where the call has raised."""
    ones = lz.share(np.ones(3))

    def path(report: Any) -> str:
        return str(report.selection.path)

    wait_until(lambda: (fn.total(ones), path(fn.total.last_report())) == (3, "express"))
    x = lz.share(np.ones(5))
    gone = weakref.ref(x)
    futures = [fn.total.submit(x) for _ in range(3)]
    for future in futures:
        assert future.result() == 5
        assert (path(future.report), future.report.uncopied_bytes) == ("express", x.nbytes)
    odd = fn.total.submit(x[:0].reshape(0, 5).T)
    assert odd.result() == 0
    broken = fn.total.submit(None)
    with pytest.raises(lz.RemoteError, match="AttributeError"):
        broken.result()
    fn.total(x)
    del x
    gc.collect()
    assert gone() is None


def test_what_is_lent_again_is_seen_as_it_is_now(site: Site) -> None:
    """Past the broker, where a call that comes again is not read again: other contents, another shape of the same
    array, views that overlap, other memory, and memory that was given back and is another array's."""
    base = lz.share(np.arange(24.0).reshape(4, 6))

    def is_settled() -> bool:
        assert fn.told(base, None, 1.0) == "float64 (4, 6) (48, 8) False 276.0"
        return bool(fn.told.last_report().selection.path == "express")

    wait_until(is_settled)
    for step in range(4):
        base[0, 0] = step
        for x, y in (
            (base, None),
            (base[::2, 1:4], base[1:]),
            (base.T, base),
            (base[:, :1], base[0]),
            (base[1:2], None),
        ):
            for factor in (1.0, 2.0):
                total = x.sum() * factor + (0 if y is None else y.sum())
                for _ in range(3):
                    assert fn.told(x, y, factor) == f"float64 {x.shape} {x.strides} False {total}"
                assert fn.told.last_report().uncopied_bytes == x.nbytes + (0 if y is None else y.nbytes)
                assert fn.told.last_report().selection.path == "express"
    for dtype in ("float32", "int64", "float32"):
        mine = lz.share(np.ones(4096, dtype))
        for _ in range(3):
            assert fn.told(mine, None, 1.0).split()[0] == dtype
        del mine
    base.shape = (2, 12)
    assert fn.told(base, None, 1.0).startswith("float64 (2, 12) (96, 8) False")
    with pytest.raises(lz.RemoteError):
        fn.overwrite(base)


def test_what_is_lent_cannot_be_written(site: Site) -> None:
    shared = lz.share(np.zeros(4))
    with pytest.raises(lz.RemoteError, match="read-only"):
        fn.overwrite(shared)
    assert shared.tolist() == [0, 0, 0, 0]


IMPORTING = """
import layerzero as lz

OLD = lz.env("numpy-old", requires=["numpy==1.26.4"], python="3.11")

@lz.isolated(OLD)
def files():
    import helper, numpy
    return [helper.__file__, numpy.__file__]

if __name__ == "__main__":
    lz.connect()
    print(*files(), sep="\\n")
"""


def test_bytecode_is_left_in_the_environment_and_not_beside_the_users_files(site: Site, tmp_path: Path) -> None:
    """So that what a function imports there is compiled once, and not at each start of a worker."""
    (tmp_path / "helper.py").write_text("VALUE = 1\n")
    (tmp_path / "importing.py").write_text(IMPORTING)
    answer = run(site, str(tmp_path / "importing.py"))
    assert answer.returncode == 0, answer.stderr
    helper, numpy = map(Path, answer.stdout.split())
    assert helper.parent == tmp_path
    assert [path.name for path in (numpy.parent / "__pycache__").glob("__init__.*.pyc")] == ["__init__.cpython-311.pyc"]
    assert not (tmp_path / "__pycache__").exists()


def test_contradictions_are_told_by_the_resolver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_STORE", str(tmp_path))
    wrong = lz.env("wrong", requires=["numpy<2", "numpy>=2"])
    with pytest.raises(lz.EnvError, match=r"^require something else of .* wrong\..*: it does not resolve") as refused:
        wrong.build(quiet=True)
    assert "toml" not in refused.value.facts["repair"]  # which nobody is to edit
    assert "numpy<2" in refused.value.facts["cause"]
    assert "numpy>=2" in refused.value.facts["cause"]
    assert not wrong.is_built


def no_broker(*_: Any, **__: Any) -> Any:
    raise lz.BrokerLost("")


def test_commands_list_build_and_forget_an_environment(tmp_path: Path) -> None:
    """From the error of a call on, without Python."""
    site = Site(tmp_path)
    try:
        with site.environment():
            plain = lz.env("plain")
            plain.explain_failure(lz.NoBackend(""), no_broker)  # what a call does, which declares it
        assert run(site, "-m", "layerzero", "env", "build", plain.backend).returncode == 0
        rows = json.loads(run(site, "-m", "layerzero", "env", "list", "--json").stdout)["environments"]
        assert next(row for row in rows if row["name"] == plain.backend)["state"] == "built"
        kept = json.loads(run(site, "-m", "layerzero", "env", "gc", "--dry-run", "--json").stdout)["removed"]
        assert [row for row in kept if plain.backend in row["path"]] == []
        assert run(site, "-m", "layerzero", "env", "remove", plain.backend).returncode == 0
        gone = json.loads(run(site, "-m", "layerzero", "env", "gc", "--json").stdout)["removed"]
        assert [row for row in gone if plain.backend in row["path"]]
    finally:
        site.stop()


@pytest.mark.usefixtures("site")
def test_objects_are_lent_arrays_and_own_those_that_they_may_keep() -> None:
    """Of its constructor's arguments and of attributes it has copies, which the report shows."""
    cls: Any = fn.Scaled
    factors, values = lz.share(np.full(1 << 16, 2.0)), lz.share(np.arange(float(1 << 16)))
    with cls(factors) as scaled:
        built = cls.last_report()
        assert [(copy.nbytes, copy.where) for copy in built.copies] == [(factors.nbytes, "worker")]
        assert built.uncopied_bytes == 0
        factors[:] = 0
        assert np.array_equal(scaled.of(values), values * 2)
        assert cls.last_report().uncopied_bytes == values.nbytes
        assert scaled.sees(values) == (False, True)
        scaled.factors = np.full(1 << 16, 3.0)
        assert [copy.where for copy in cls.last_report().copies] == ["client", "worker"]
        assert np.array_equal(scaled.of(values), values * 3)
        assert scaled.factors[0] == 3.0


@pytest.mark.usefixtures("site")
def test_what_stays_inside_has_arrays_of_its_own() -> None:
    """What a call that keeps its result was lent is copied, since that may be a view of it."""
    shared = lz.share(np.arange(4096.0))
    with fn.new_echo.options(keep=True)(shared) as held:
        assert [(copy.nbytes, copy.where) for copy in held_copies()] == [(shared.nbytes, "worker")]
        shared[:] = 0
        found, _ = held.fetch()
        assert np.array_equal(found, np.arange(4096.0))


def held_copies() -> Any:
    return lz.last_report().copies


@pytest.mark.usefixtures("site")
def test_modules_of_two_numpys_by_name() -> None:
    """Functions, values, classes and the library's own types, without a file of the program's."""
    old, new = lz.module("numpy", fn.OLD), lz.module("numpy", fn.NEW)
    assert old.__class__ is new.__class__
    assert (old.version.version, new.version.version[:2]) == ("1.26.4", "2.")
    shared = lz.share(np.arange(6.0).reshape(2, 3))
    assert np.array_equal(old.transpose(shared, axes=(1, 0)), shared.T)
    assert old.transpose.last_report().uncopied_bytes == shared.nbytes
    assert np.allclose(new.linalg.norm(shared, axis=0), np.linalg.norm(shared, axis=0))
    assert (old.float_, new.pi) != (None, 0)
    for module in (old, new):  # which give scalars of NumPy's
        assert (module.mean(shared), type(module.mean(shared))) == (2.5, float)
        assert module.argmax(shared) == 5
    with pytest.raises(AttributeError, match=r"`np\.float_` was removed"):
        new.float_  # noqa: B018
    with new.random.default_rng.options(keep=True)(7) as rng:
        assert rng.type == "numpy.random._generator.Generator"
        assert new.random.Generator.random(rng, 3).tolist() == np.random.default_rng(7).random(3).tolist()
    with new.poly1d(np.array([1.0, 2.0])) as line:
        assert (line(np.array([3.0])).tolist(), line.order) == ([5.0], 1)


def test_a_result_of_a_declared_shape_is_made_where_it_lies(site: Site) -> None:
    """Whatever its size: no copy, and no second trip."""
    for count in (3, 100_000):
        x = lz.share(np.arange(float(count)))
        np.testing.assert_array_equal(fn.scaled(x, 3.0), x * 3)
        report = fn.scaled.last_report()
        assert (report.copies, report.uncopied_bytes, report.attempts) == ((), 2 * x.nbytes, 1)
    np.testing.assert_array_equal(fn.scaled.submit(x).result(), x * 2)
    np.testing.assert_array_equal(fn.scaled.local(x), x * 2)


def test_several_results_of_declared_shapes(site: Site) -> None:
    x = lz.share(np.ones((50, 200)))
    whole, rows = fn.sums(x)
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(rows, np.full(50, 200))
    assert fn.sums.last_report().copies == ()


def test_a_function_without_out_copies_its_result_once(site: Site) -> None:
    x = lz.share(np.zeros(300_000))
    np.testing.assert_array_equal(fn.shifted(x), x + 1)
    assert [(copy.arg, copy.nbytes) for copy in fn.shifted.last_report().copies] == [("result", x.nbytes)]


@pytest.mark.parametrize("chars", [5, 20_000])
def test_what_is_placed_and_what_is_not_come_together(
    site: Site, chars: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts of what was placed, too; also where what was printed has no room before it."""
    x = lz.share(np.arange(1000.0))
    fn.talkative(x, text="t" * chars)  # no shape tells of the third result; the next answer has room for it
    whole, part, other = fn.talkative(x, text="t" * chars)
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(part, x[1:])
    np.testing.assert_array_equal(other, x + 1)
    assert f"[numpy-new] {'t' * chars}" in capsys.readouterr().out
    copied = fn.talkative.last_report().copies
    assert len(copied) == (3 if chars > 1000 else 1)


def test_what_is_no_shape_is_refused(site: Site) -> None:
    with pytest.raises(lz.InvalidArgument, match=r"shapeless: shapes gives .'three', 'float32'.; allowed: .shape, dt"):
        fn.shapeless()
    with pytest.raises(lz.InvalidArgument, match="missing a required argument"):
        fn.scaled()
    with pytest.raises(lz.InvalidArgument, match="without keep=True"):
        fn.shifted.options(keep=True)


def test_declared_shapes_in_several_environments(site: Site) -> None:
    """The result is made where it lies in each of them, and by the next one after a death."""
    x = lz.share(np.arange(1000.0))
    for version, backend in (("2.", fn.NEW.backend), ("1.26", fn.OLD.backend)):
        with lz.prefer(backend):
            np.testing.assert_array_equal(fn.doubled(x), x * 2)
        report = fn.doubled.last_report()
        assert (report.served_by, report.copies, report.uncopied_bytes) == (backend, (), 2 * x.nbytes)
        other = fn.OLD.backend if backend == fn.NEW.backend else fn.NEW.backend
        with lz.prefer(backend):
            np.testing.assert_array_equal(fn.doubled(x, version), x * 2)
        report = fn.doubled.last_report()
        assert (report.served_by, report.copies) == (other, ())
        assert [text.split(": ")[:2] for text in report.failures] == [[backend, "BACKEND_ERROR"]]
        wait_until(lambda name=backend: is_well(name))
    np.testing.assert_array_equal(fn.doubled.local(x), x * 2)


def test_shadow_checks_of_declared_shapes(site: Site) -> None:
    x = lz.share(np.arange(1000.0))
    np.testing.assert_array_equal(fn.halved(x, 0.0), x / 2)
    report = fn.halved.last_report()
    assert (report.shadow, report.copies) == ("agrees with numpy-old", ())
    np.testing.assert_array_equal(fn.halved.submit(x, 0.5).result(), x / 2)
    assert "result differs in 1,000 of 1,000 elements, by up to 0.5" in fn.halved.last_report().shadow


def test_declared_shapes_are_tuned(site: Site) -> None:
    times = fn.halved.tune(lz.share(np.arange(1000.0)), 0.0)
    assert set(times) == {fn.NEW.backend, fn.OLD.backend}
    assert all(0 < time_us < 60e6 for time_us in times.values())


def test_declared_shapes_in_several_workers(site: Site, tmp_path: Path) -> None:
    """Calls that wait for each other, each with a result of its own that nobody copies."""
    arrays = [lz.share(np.full(1000, float(number))) for number in range(2)]
    futures = [fn.met.submit(array, str(tmp_path)) for array in arrays]
    for array, future in zip(arrays, futures, strict=True):
        np.testing.assert_array_equal(future.result(), array)
    reports = [future.report for future in futures]
    assert all(report is not None and report.copies == () for report in reports)
    assert {report.served_by for report in reports if report} == {fn.NEW.backend, f"{fn.NEW.backend}.2"}
    both = fn.doubled.options(workers=2)
    for number, found in enumerate(both.map(arrays)):
        np.testing.assert_array_equal(found, arrays[number] * 2)
    assert len(both.explain(arrays[0]).candidates) == 4
