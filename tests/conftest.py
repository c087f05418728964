"""Fixtures of the tests that need a broker: private ones, a shared one per module, and the check for leaks."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.example_counts import examples
from tests.process import forks
from tests.process.harness import PREFIX, Site, open_files, other_arenas, processes, wait_until

import layerzero as lz
from layerzero.client.connection import arena

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in a background job: children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Images set it to be small. Then each of the thousand processes that tests start would compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Of programs that import torch themselves: threads that wait for each other take the cores from those they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How long an example takes is the machine's affair: it says nothing about what is tested.
settings.register_profile(
    "tests", max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

# Parts of names. Of what `make test` leaves out something like it stays in, except for the first two groups.
LONG = (
    # the simulator itself: planted bugs in thousands of schedules, and whether those go everywhere
    "test_simulation.py::test_planted_bug_is_found",
    "test_simulation.py::test_schedules_",
    # what torch has to check ops with: each op, as it is traced, compiled and differentiated, on its own samples
    "frameworks/test_torch_ops.py",
    "frameworks/test_torch_opinfo.py",
    # Inductor's C++, graphs of all kinds and sizes, and finite differences of attention
    "test_compiled_block_is_torchs[inductor",
    "test_compiled_block_is_torchs[aot_eager-True",
    "test_compiled_inside_of_accelerate[inductor",
    "test_models_that_are_compiled_and_accelerated[compiled in place",
    "test_models_that_are_compiled_and_accelerated[a part",
    "test_exported_program_has_our_ops[True",
    "test_gradients_are_those_of_finite_differences[attention-0",
    "test_gradients_are_those_of_finite_differences[attention-1",
    "test_gradients_are_those_of_finite_differences[attention-3",
    "test_gradients_are_those_of_finite_differences[attention-4",
    "test_torch_accelerate.py::test_a_worker_dies_in_the_middle[backward",
    # Transformers: more caches, models and layers
    "test_attention.py::test_model_compiles_whole",
    "test_every_cache_gives_the_same_tokens[static",
    "test_every_cache_gives_the_same_tokens[offloaded_static",
    "test_every_cache_gives_the_same_tokens[quantized",
    "test_gradients_are_those_of_the_models_formula[t5",
    "test_gradients_are_those_of_the_models_formula[mixtral",
    "test_attention.py::test_variables[TRANSFORMERS-eager",
    "test_experts[qwen2_moe",
    "test_experts[olmoe",
    "test_experts[deepseek_v3",
    # Diffusers: further graphs, and a program of its own
    "test_models.py::test_model_compiles_whole[flux",
    "test_models.py::test_model_compiles_whole[unet",
    "test_models.py::test_program_that_lays_us_aside",
    # environments: whole installations, and what pip installs as uv does
    "test_wheel.py::test_wheel_installs_and_runs_in_an_empty_venv",
    "test_minilm.py::test_vectors_are_those_of_transformers_and_torch",
    "test_minilm.py::test_tokens_are_those_of_transformers",
    "test_every_backend_of_a_cpu_installation_answers",
    "test_matrix.py::test_the_resolver_refuses_two_versions_of_one_library",
    "test_matrix.py::test_a_crash_is_a_result_and_names_its_signal",
    "test_matrix.py::test_a_changed_struct_is_told_from_other_errors",
    "test_matrix.py::test_isolated_all_of_them_work",
    "test_matrix.py::test_two_environments_serve_all",
    "test_matrix.py::test_the_page_has_the_evidence",
    "test_matrix.py::test_progress_is_on_stderr",
    "test_numpy_of_another_version_is_named",
    "test_failed_build_says_why_and_what_to_run[pip",
    "test_environment_of_a_lock_is_built_from_a_wheelhouse_alone[pip",
    "test_interpreter_that_is_no_venv_can_be_the_base[pip",
    # the same story again: other versions, other ways for a proof to fail or a file to be damaged, other deaths
    "test_no_mix_of_three_versions_is_misread[-1",
    "test_no_mix_of_three_versions_is_misread[1",
    "test_another_version_is_refused_by_both_sides_with_both_numbers[newer",
    "test_a_kernel_that_must_not_be_lifted_stays_in_its_worker[random",
    "test_a_kernel_that_must_not_be_lifted_stays_in_its_worker[strays_before",
    "test_a_kernel_that_must_not_be_lifted_stays_in_its_worker[exits",
    "test_a_kernel_that_must_not_be_lifted_stays_in_its_worker[strikes",
    "test_a_kernel_that_must_not_be_lifted_stays_in_its_worker[hangs",
    "test_what_does_not_hold_is_not_believed[calls-cut",
    "test_what_does_not_hold_is_not_believed[calls-unlink",
    "test_what_does_not_hold_is_not_believed[code-flip",
    "test_what_does_not_hold_is_not_believed[code-cut",
    "test_what_is_of_another_machine_or_environment_is_left_alone[other0",
    "test_what_is_of_another_machine_or_environment_is_left_alone[other1",
    "test_gpu_faults.py::test_random_deaths_cost_no_result",
    "test_users_brokers_end_with_the_one_that_started_them[15",
)
FLOATS = ("-float16]", "-float64]")  # a kernel's conformance in the others is in `make test`
# Minutes each: they begin first, else one process runs them while the others have nothing left to do.
FIRST = ("envs/test_frameworks.py", "envs/test_transformers.py", "envs/test_clusters.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not any(name in item.nodeid for name in FIRST))
    for item in items:
        is_repeated = "test_kernel_gives_the_reference_result" in item.nodeid and item.nodeid.endswith(FLOATS)
        if is_repeated or any(name in item.nodeid for name in LONG):
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Collections of garbage do not walk through twelve thousand tests each, which takes seconds on a busy machine."""
    gc.freeze()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where probes are remembered; one for all processes of a test run."""
    forks.start_server()
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "store"


@pytest.fixture(scope="module")
def broker(store: Path) -> Iterator[Site]:
    """A broker for the tests of a module that leave it intact. Its workers may die often: they restart at once."""
    site = Site(store, restart_budget=100_000, backoff_s=0.01, backoff_max_s=0.01)
    try:
        yield site.start()
    finally:
        site.stop()


@pytest.fixture
def connected(no_leaks: None, broker: Site) -> Iterator[Site]:
    """This process is a client of the module's broker, which has forgotten the failures of earlier tests."""
    broker.connect().ask("reset")
    yield broker
    lz.disconnect()


@pytest.fixture
def new_site(no_leaks: None, store: Path) -> Iterator[Callable[..., Site]]:
    """Make sites for tests that break their broker or need settings of their own."""
    made: list[Site] = []

    def make(**settings: object) -> Site:
        made.append(Site(store, **settings))
        return made[-1]

    yield make
    lz.disconnect()
    for site in made:
        site.stop()


FAILED = pytest.StashKey[bool]()
LOG_CHARS = 8000  # of a broker's log, beside a failure


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    if report.failed:
        for site in Site.live:
            with contextlib.suppress(OSError):
                report.sections.append((f"end of {site.endpoints.log}", site.endpoints.log.read_text()[-LOG_CHARS:]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Beside the list of what failed, which is all that some see of a run: how a broker ended that was not told to."""
    for report in [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]:
        for title, text in report.sections:
            lines = text.splitlines()
            starts = [n for n, line in enumerate(lines) if line.startswith(("Traceback", "Fatal Python error"))]
            if title.startswith("end of ") and starts:
                terminalreporter.write_sep("-", f"{report.nodeid}: {title}")
                terminalreporter.write_line("\n".join(lines[starts[-1] :][:40]))


@pytest.fixture(scope="module", autouse=True)
def _left_to_rest() -> None:
    """What earlier modules have left, caches and all, is not looked at by each gc.collect() of this one's tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After the test: no process, descriptor, arena or slot that was not there before."""
    gc.collect()
    gc.freeze()  # what was imported so far need not be looked at again by each gc.collect() below
    files, slots, others = open_files(), arena.pool.stats()["slots"], other_arenas()
    yield
    if request.node.stash[FAILED]:  # its traceback keeps all sorts of things
        return
    wait_until(lambda: gc.collect() >= 0 and arena.pool.stats()["slots"] <= slots)
    wait_until(lambda: not open_files() - files)
    wait_until(lambda: gc.collect() >= 0 and other_arenas() <= others)
    found: dict[int, str] = {}

    def are_gone() -> bool:
        """A process of a broker that goes on may end between the two looks at it."""
        found.clear()
        found.update(processes(Path(tempfile.gettempdir()) / PREFIX))
        known = [processes(site.folder) for site in Site.live] if found else []
        for pid in [pid for pid in found if any(pid in site for site in known)]:
            del found[pid]
        return not found

    try:
        wait_until(are_gone)
    except AssertionError:
        raise AssertionError(f"processes are left: {found}") from None
