"""lz.solve and `lz solve` with toy backends: what is written, who uses it, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.process.harness import Site
from tests.process.test_cli import USAGE, data
from tests.process.test_cli import lz as run_lz
from tests.process.test_tune import provider, waiting

import layerzero as lz
from layerzero.broker.selection import dispatch_table
from layerzero.client.facade import api
from layerzero.client.tools import solve as solving
from layerzero.client.tools.tune import Progress
from layerzero.ipc.vocabulary.tensors import TensorSpec


def silu(rows: int, cols: int = 8) -> lz.Call:
    return lz.Call.of("silu", TensorSpec.contiguous("float32", (rows, cols)))


@pytest.fixture
def site(new_site: Callable[..., Site]) -> Site:
    """A backend that is chosen for its priority, and slow from 1000 rows on."""
    site = new_site()
    statement = "threading.Event().wait(0.02) if len(x) > 1000 else None"
    site.add_backend("steep", priority=90, provider=provider(statement))
    site.add_backend("slow", priority=80, provider=waiting(0.005))
    return site


def test_the_table_has_the_fastest_kernel_of_each_size_and_rules_when_policy_names_it(
    site: Site, tmp_path: Path
) -> None:
    """Measured once, decided for good; with plan_mode, what was not measured is refused."""
    path = tmp_path / "table.json"
    site.environ |= {"LAYERZERO_DISPATCH_TABLE": str(path), "LAYERZERO_PLAN_MODE": "true"}
    site.start().connect()
    report = lz.solve([silu(64), silu(2048)], path=path, budget_s=10.0)
    assert (report.path, report.kinds, report.in_force) == (path, 1, True)
    assert "in force" in str(report)
    table = dispatch_table.parse(path.read_text(), "t")
    assert set(table.header.capability_hashes) == {"alpha", "beta", "gamma", "slow", "steep"}
    [group] = table.trees
    for call, point in zip(report.measured.calls, group.points, strict=True):
        assert call.fastest is not None
        assert call.fastest.kernel_id not in ("slow.silu", *(["steep.silu"] if point.extents[0] == 2048 else []))
        explained = lz.explain("silu", TensorSpec.contiguous("float32", point.extents))
        assert explained.kernel_id == group.lookup(point.extents)
        chosen = explained.candidates[0]
        assert "table" in chosen.terms
    with pytest.raises(lz.NoBackend, match="PLAN_BUCKET_MISS"):
        lz.silu(lz.empty((9, 100_000)))
    wider = lz.solve([silu(64), silu(9, 100_000)], path=path, budget_s=5.0)  # it had no bucket, and yet is measured
    assert [call.fastest is not None for call in wider.measured.calls] == [True, True]
    assert lz.explain("silu", TensorSpec.contiguous("float32", (9, 100_000))).kernel_id is not None


@pytest.mark.usefixtures("connected")
def test_calls_that_have_not_settled_are_named_last(tmp_path: Path) -> None:
    """A table of one sample each decides for good; its reader must know."""
    report = lz.solve([silu(4), silu(8)], path=tmp_path / "table.json", budget_s=1e-6)
    assert report.unsettled == ("silu(4x8:float32)",)
    assert str(report).endswith(
        "1 of 2 calls have not settled: silu(4x8:float32); solve again with a larger budget_s than 1e-06"
    )


def test_starts_of_workers_are_no_part_of_the_budget(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """They take seconds; the first call's share was gone before anything had been timed, and one run of it decided."""
    site = new_site()
    load = "def load() -> Loaded:\n"
    late = provider("None").replace(load, f"{load}    threading.Event().wait(3)\n")
    site.add_backend("late", priority=90, provider=late)
    site.start().connect()
    report = lz.solve([silu(4), silu(8)], path=tmp_path / "table.json", budget_s=4.0)
    counts = [kernel.kernel.count for call in report.measured.calls for kernel in call.kernels if kernel.kernel]
    assert len(counts) == 8
    assert min(counts) > 1


@pytest.mark.usefixtures("connected")
def test_without_a_path_it_lies_in_the_store(broker: Site) -> None:
    """And the report says what puts it in force."""
    report = lz.solve("null", budget_s=2.0)
    assert report.path == Path(broker.environ["LAYERZERO_STORE"]) / solving.FILE_NAME
    assert (report.in_force, f"dispatch_table: {report.path} in the policy uses it" in str(report)) == (False, True)
    assert json.loads(json.dumps(report.to_dict()))["buckets"] == 1


@pytest.mark.usefixtures("connected")
def test_nothing_is_written_when_nothing_was_measured_or_it_was_interrupted(tmp_path: Path) -> None:
    """A table of half the calls would refuse the other half."""
    path = tmp_path / "table.json"
    nothing = lz.solve("softmax", TensorSpec.contiguous("float32", (2, 2)), dim=0, path=path)
    assert (nothing.path, "nothing was measured" in str(nothing)) == (None, True)

    def interrupt(progress: Progress) -> None:
        if progress.rounds == 3:
            raise KeyboardInterrupt

    half = solving.solve_calls([silu(4), silu(8)], path=path, on_progress=interrupt)
    assert (half.path, "interrupted" in str(half), path.exists()) == (None, True, False)


@pytest.mark.usefixtures("connected")
def test_a_path_that_cannot_be_written_is_an_error_before_anything_is_measured(tmp_path: Path) -> None:
    """Minutes of measuring must not end in an error."""

    def measured(_: Progress) -> None:
        raise AssertionError("something was run")

    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "missing" / "t.json", tmp_path / "folder"):
        with pytest.raises(lz.ConfigError, match="cannot be written"):
            solving.solve_calls([silu(4)], path=path, on_progress=measured)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"measured": [], "command": ""},
        {"measured": 1, "command": ""},
        {"measured": [{"route": b""}], "command": ""},
    ],
)
def test_measurements_of_another_form_are_refused(params: dict[str, object]) -> None:
    """The broker must outlive any client."""
    with pytest.raises(lz.LayerZeroError):
        lz.session().ask("solve", **params)
    assert lz.status()


@pytest.mark.usefixtures("connected")
def test_times_of_kernels_that_do_not_exist_or_that_are_none_are_refused() -> None:
    """They would make a table that chooses nothing, or nonsense."""
    call = silu(4)
    for us in ({"nobody.silu": 1.0}, {"alpha.silu": -1.0}, {"alpha.silu": float("nan")}, {}):
        body = api.signature(call.function, **call.arrays)
        with pytest.raises(lz.InvalidArgument):
            lz.session().ask("solve", measured=[{"route": body, "us": us}], command="c")


def test_named_extents_make_a_call_of_each_combination() -> None:
    """So that a shell can ask for a range of sizes."""
    assert solving.with_extents(["silu", "BxS:f32"], ["B=1,2", "S=3"]) == [["silu", "1x3:f32"], ["silu", "2x3:f32"]]
    assert solving.with_extents(["silu"], []) == [["silu"]]
    for wrong in ("S", "S=", "S=a", "s=1", "S=1,,2", "T=1"):
        with pytest.raises(lz.InvalidArgument, match="--extent"):
            solving.with_extents(["silu", "8xS:f32"], [wrong])


def test_the_command_writes_a_table_and_says_how_to_make_it_anew(broker: Site, tmp_path: Path) -> None:
    """Its own line is in the file, for the day when it is refused."""
    path = tmp_path / "t.json"
    words = ("solve", "silu", "4xS:float32", "--extent", "S=8,64", "--out", str(path), "--budget", "4")
    value = data(run_lz(broker, *words, "--json"))
    assert (value["path"], value["kinds"], len(value["measured"]["calls"])) == (str(path), 1, 2)
    command = dispatch_table.parse(path.read_text(), "t").header.command
    assert command == f"lz solve silu 4xS:float32 --extent S=8,64 --out {path}"
    assert run_lz(broker, "solve", "silu", "4x8:float32", "--extent", "S=8").returncode == USAGE
