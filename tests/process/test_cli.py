"""The command line as its users see it: what it prints where, its exit codes, what it leaves running."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process import forks
from tests.process.harness import ROOT, Site, wait_ended

import layerzero
from layerzero.client.cli import calls
from layerzero.client.facade import api
from layerzero.client.tools import inputs
from layerzero.ipc.vocabulary.ops import PUBLIC_OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

DONE, FAILED, USAGE, NO_BROKER = 0, 1, 2, 3
Sites = Callable[..., Site]
Finished = subprocess.CompletedProcess[str]


def command(site: Site, words: tuple[str, ...], **variables: str) -> dict[str, Any]:
    """Arguments of subprocess for `lz WORDS`, with the settings of this site only."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LAYERZERO_")}
    environ |= {**site.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100", **variables}
    return {"args": [sys.executable, "-P", "-m", "layerzero.client.cli.app", *words], "env": environ, "text": True}


def lz(site: Site, *words: str, **variables: str) -> Finished:
    given = command(site, words, **variables)
    return forks.run(given["args"], env=given["env"])


def data(finished: Finished, code: int = DONE) -> dict[str, Any]:
    """What --json printed; all of it has a schema."""
    assert finished.returncode == code, finished.stderr
    value: dict[str, Any] = json.loads(finished.stdout)
    assert value.pop("schema") == 1
    return value


@pytest.fixture
def idle(new_site: Sites) -> Site:
    """A runtime folder without a broker."""
    return new_site()


@pytest.fixture(scope="module")
def site(broker: Site) -> Site:
    """The module's broker, for commands that leave it as it is."""
    return broker


# --- up, status, down


def test_up_status_and_down_tell_of_the_same_broker(idle: Site) -> None:
    """The three are one story: started, seen, ended; each may be typed twice."""
    up = data(lz(idle, "up", "--json"))
    assert (up["started"], up["pid"], up["socket"]) == (True, idle.broker_pid, str(idle.endpoints.control))
    again = lz(idle, "up")
    assert (again.returncode, str(up["pid"]) in again.stdout, "already" in again.stdout) == (DONE, True, True)
    assert data(lz(idle, "status", "--json"))["broker"]["pid"] == up["pid"]
    assert data(lz(idle, "down", "--json")) == {"stopped": True, "pid": up["pid"]}
    assert idle.broker_pid is None
    nothing = lz(idle, "down")
    assert (nothing.returncode, "no broker runs" in nothing.stdout) == (DONE, True)


def test_status_without_a_broker_starts_none(idle: Site) -> None:
    """Looking must not change what is looked at; a script learns it from the exit code."""
    result = lz(idle, "status")
    assert (result.returncode, result.stdout) == (NO_BROKER, "")
    assert "next: lz up" in result.stderr
    assert idle.broker_pid is None


def test_error_is_json_too_when_json_was_asked_for(idle: Site) -> None:
    """A script parses one thing, whatever happens."""
    assert data(lz(idle, "status", "--json"), NO_BROKER)["error"]["code"] == "NOT_CONNECTED"


def test_up_makes_a_broker_stay_that_a_client_has_started(new_site: Sites) -> None:
    """`lz up` promises a broker that stays; one found by chance must keep that promise."""
    site = new_site()
    code = "import sys\nlz.connect()\nprint('connected', flush=True)\nsys.stdin.read()"
    with site.python(code, stdin=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdin is not None
        client.stdout.readline()
        before = data(lz(site, "status", "--json"))["broker"]
        assert data(lz(site, "up", "--json"))["started"] is False
        client.stdin.close()
    after = data(lz(site, "status", "--json"))["broker"]
    assert (before["pid"], before["stays"], after["pid"], after["stays"]) == (
        after["pid"],
        False,
        site.broker_pid,
        True,
    )


def test_down_force_ends_a_broker_that_does_not_react(new_site: Sites) -> None:
    """A stuck broker cannot be asked, and its user must not need ps and kill."""
    site = new_site().start()
    pid = site.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert data(lz(site, "down", "--force", "--json")) == {"stopped": True, "pid": pid}
    wait_ended(pid)
    assert data(lz(site, "up", "--json"))["started"] is True


def test_status_names_what_is_wrong_and_the_command_that_repairs_it(site: Site) -> None:
    """Environments that are not built are the first thing that a new user meets; one command builds all."""
    result = lz(site, "status")
    assert result.returncode == DONE
    assert "not built" in result.stdout
    [line] = [line for line in result.stdout.splitlines() if "lz env build" in line]
    assert {"mlx", "torch"} <= set(line.partition("lz env build")[2].split())


def test_status_does_not_count_the_client_that_asks(idle: Site) -> None:
    """Who wonders whether the broker may be ended wants to know of the others."""
    lz(idle, "up")
    assert "0 connected" in lz(idle, "status").stdout
    lz(idle, "down")


def test_output_to_a_pipe_has_no_colors(site: Site) -> None:
    """Escape codes in a file or a grep are noise."""
    assert "\x1b" not in lz(site, "status").stdout


# --- explain


def test_explain_shows_the_choice_and_the_runners_up(site: Site) -> None:
    """Why this kernel is the question that the command is for."""
    result = lz(site, "explain", "silu", "4x8:float32")
    assert result.returncode == DONE
    assert result.stdout.startswith("silu: alpha.silu (alpha)")
    assert "beta.silu" in result.stdout


def test_explain_gives_a_reason_for_each_rejected_kernel(site: Site) -> None:
    """Silent filtering is what makes dispatchers hard to use."""
    call = ("explain", "matmul", "4x4:int32", "4x4:int32")
    report = data(lz(site, *call, "--json"))
    assert report["kernel_id"] is None
    reasons = {c["backend"]: {r["code"] for r in c["reasons"]} for c in report["candidates"]}
    assert reasons["alpha"] == {"DTYPE_UNSUPPORTED"}
    assert "NOT_INSTALLED" in reasons["torch"]
    assert all(reasons.values())
    shown = lz(site, *call).stdout
    assert shown.startswith("matmul: no kernel")
    assert "DTYPE_UNSUPPORTED: a is int32; allowed: " in shown


def test_explain_takes_parameters_as_json(site: Site) -> None:
    """Scalars decide which kernels fit, so they must be sayable."""
    shape = "1x4x16x8:f32"
    words = ("attention", shape, shape, shape, "none", "-p", "is_causal=true", "-p", "scale=0.5", "--json")
    assert data(lz(site, "explain", *words))["op"] == "attention"


# --- run


def test_run_computes_and_tells_what_served(site: Site) -> None:
    """The result is a real one: silu is never below -0.2785, and random inputs come close to it."""
    answer = data(lz(site, "run", "silu", "100x10:float32", "--backend", "beta", "--json"))
    result = answer["result"]
    assert (result["shape"], result["dtype"], result["not_finite"]) == ([100, 10], "float32", 0)
    assert -0.27847 < result["min"] < -0.278
    assert (answer["report"]["backend"], answer["report"]["copies"]) == ("beta", [])


def test_run_repeats_with_the_inputs_of_the_seed(site: Site) -> None:
    """Numbers that change by themselves cannot be compared."""
    words = ("run", "silu", "16:float64", "--repeat", "3", "--json", "--seed")
    one, same, other = (data(lz(site, *words, seed)) for seed in ("1", "1", "2"))
    assert one["result"] == same["result"] != other["result"]
    assert one["times"]["runs"] == len(one["times"]["elapsed_us"]) == sum(one["times"]["served"].values()) == 3


def test_run_prints_result_and_report_for_people(site: Site) -> None:
    """The first thing that someone types must read well."""
    result = lz(site, "run", "silu", "4:f32", "-r", "2")
    assert result.returncode == DONE
    assert result.stdout.startswith("result: float32[4]  min ")
    assert "silu: alpha.silu (alpha, pid " in result.stdout
    assert "2 runs, served by alpha.silu 2" in result.stdout


def test_run_without_numpy_says_what_to_install(site: Site, tmp_path: Any) -> None:
    """NumPy is optional: its lack is a message, not a traceback."""
    (tmp_path / "numpy.py").write_text("raise ImportError('No module named numpy')")
    result = lz(site, "run", "silu", "4:f32", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT / 'src'}")
    assert (result.returncode, result.stdout) == (FAILED, "")
    assert "NumPy" in result.stderr
    assert "next: pip install" in result.stderr


# --- errors


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("run", "silux", "4:float32"), "did you mean 'silu'"),
        (("explain", "softmx", "4:float32"), "did you mean 'softmax'"),
        (("run", "silu", "4:flot32"), "did you mean 'float32'"),
        (("run", "silu", "4y4:float32"), "SHAPE:DTYPE"),
        (("run", "silu"), "1 array as SHAPE:DTYPE (input), got 0"),
        (("explain", "softmax", "4:f32"), "--param dim=VALUE"),
        (("explain", "gelu", "4:f32", "-p", "aproximate=tanh"), "did you mean 'approximate'"),
        (("explain", "gelu", "4:f32", "-p", "approximate"), "not name=value"),
        (("explain", "gelu", "4:f32", "-p", "approximate=sigmoid"), "'sigmoid'"),
        (("run", "tokenize", "text"), "--tokenizer"),
        (("restart", "alfa"), "alpha"),
        (("logs", "alfa"), "'alfa'"),
        (("env", "bild"), "bild"),
        (("statsu",), "status"),
    ],
)
def test_wrong_usage_names_the_word_and_the_way_out(site: Site, words: tuple[str, ...], wanted: str) -> None:
    """Exit code 2, nothing on stdout, no traceback: the mistake is the typist's."""
    result = lz(site, *words)
    assert (result.returncode, result.stdout) == (USAGE, "")
    assert wanted in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("place", ["nowhere/made", ".", "n" * 300])
def test_a_file_that_cannot_be_written_is_named_and_no_traceback(idle: Site, tmp_path: Path, place: str) -> None:
    trace, made = tmp_path / "t.lztrace", tmp_path / place
    layerzero.trace().save(trace)
    shown = lz(idle, "trace", "export", str(trace), "--output", str(made))
    assert shown.returncode == USAGE
    assert shown.stderr.startswith(f"error: name another file or folder than {made}: ")
    assert "Traceback" not in shown.stderr
    assert "Traceback" in lz(idle, "--traceback", "trace", "export", str(trace), "--output", str(made)).stderr


def test_a_full_disk_is_told_and_no_traceback(idle: Site, tmp_path: Path) -> None:
    """Of which Python says no file."""
    trace = tmp_path / "t.lztrace"
    layerzero.trace().save(trace)
    shown = lz(idle, "trace", "export", str(trace), "--output", "/dev/full")
    assert shown.returncode == FAILED
    assert shown.stderr.startswith("error: make room on the disk: [Errno 28] No space left on device")
    assert "Traceback" not in shown.stderr


def test_failed_call_is_one_block_with_the_next_command(new_site: Sites) -> None:
    """What, why, next: and the traceback only for those who ask."""
    site = new_site(failpoints="alpha:executing=kill").start()
    words = ("run", "silu", "4:float32", "--backend", "alpha")
    result = lz(site, *words)
    assert (result.returncode, result.stdout) == (FAILED, "")
    assert result.stderr.startswith("error: ")
    assert "signal 9" in result.stderr
    assert "next: lz logs alpha" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in lz(site, *words, LAYERZERO_TRACEBACK="1").stderr


def test_unbuilt_backend_leads_to_its_build(site: Site) -> None:
    """The next command is known, so it is said."""
    result = lz(site, "run", "silu", "4:float32", "--backend", "torch")
    assert result.returncode == FAILED
    assert result.stderr.rstrip().endswith("next: lz env build torch")


# --- restart


def test_restart_brings_back_a_backend_that_was_given_up(new_site: Sites) -> None:
    """Who repaired something must not have to end the broker and all its clients."""
    site = new_site(failpoints="alpha:executing=kill", restart_budget=0).start()
    assert lz(site, "run", "silu", "4:float32", "-b", "alpha").returncode == FAILED
    assert "lz restart alpha" in lz(site, "status").stdout
    [row] = data(lz(site, "restart", "alpha", "--json"))["backends"]
    assert (row["state"], row["unavailable"]) == ("absent", None)


def test_restart_fails_while_the_cause_is_there(site: Site) -> None:
    """Forgetting failures builds no environment."""
    result = lz(site, "restart", "torch")
    assert result.returncode == FAILED
    assert "lz env build torch" in result.stdout


# --- logs


def test_logs_tell_of_worker_starts_in_words_and_in_json(site: Site) -> None:
    """People and scripts read the same events."""
    pid = data(lz(site, "run", "null", "--backend", "alpha", "--json"))["report"]["worker_pid"]
    lines = lz(site, "logs", "-n", "1000").stdout.splitlines()
    assert any("worker.started" in line and f"backend=alpha generation=1 pid={pid}" in line for line in lines)
    events = [json.loads(line) for line in lz(site, "logs", "-n", "1000", "--json").stdout.splitlines()]
    assert {event["schema"] for event in events} == {1}
    assert pid in [event["pid"] for event in events if event["event"] == "worker.started"]


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_logs_print_the_last_lines_asked_for(new_site: Sites, count: int) -> None:
    """Also of a log without an end of line, and of more bytes than are read at once."""
    site = new_site()
    text = "\n".join(f"{i} {'x' * 200}" for i in range(1500))
    site.endpoints.worker_log("alpha").write_text(text)
    wanted = text.splitlines()[-count:] if count else []
    assert lz(site, "logs", "alpha", "-n", str(count)).stdout.splitlines() == wanted


def test_logs_without_a_broker_show_what_the_last_one_wrote(new_site: Sites) -> None:
    """Logs matter most when something has ended."""
    site = new_site()
    assert lz(site, "logs").returncode == NO_BROKER
    lz(site, "up")
    lz(site, "down")
    assert "broker.ended" in lz(site, "logs").stdout


@pytest.fixture
def following(idle: Site) -> Iterator[subprocess.Popen[str]]:
    idle.endpoints.worker_log("alpha").write_text("first\n")
    words = ("logs", "alpha", "--follow")
    process = subprocess.Popen(**command(idle, words), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    with process:
        yield process
        process.kill()


def test_logs_follow_until_interrupted(idle: Site, following: subprocess.Popen[str]) -> None:
    """New lines come whole and at once, also after the log was moved away; Ctrl-C is the normal end."""
    stream, log = following.stdout, idle.endpoints.worker_log("alpha")
    assert stream is not None
    assert stream.readline() == "first\n"
    with log.open("a") as file:
        file.write("second\n")
    assert stream.readline() == "second\n"
    log.rename(log.with_suffix(".log.1"))
    log.write_text("third\n")
    assert stream.readline() == "third\n"
    following.send_signal(signal.SIGINT)
    assert following.wait(30) == DONE


# --- env


def test_env_probe_tells_the_running_broker(new_site: Sites) -> None:
    """After a repair the broker must look again by itself."""
    site = new_site(failpoints="alpha:executing=kill", restart_budget=0).start()
    lz(site, "run", "silu", "4:float32", "-b", "alpha")
    result = lz(site, "env", "probe", "alpha")
    assert result.returncode == DONE
    assert f"pid {site.broker_pid}" in result.stderr
    rows = {row["name"]: row for row in data(lz(site, "status", "--json"))["backends"]}
    assert rows["alpha"]["unavailable"] is None


def test_env_knows_the_backends_that_the_broker_knows(site: Site) -> None:
    """One set of manifests for both, whatever variable names it."""
    listed = json.loads(lz(site, "env", "list", "--json").stdout)
    assert listed["schema"] == 1
    assert {"alpha", "beta", "gamma"} <= {row["name"] for row in listed["environments"]}


# --- the command itself


def test_version_loads_next_to_nothing(site: Site) -> None:
    """Shell prompts and completion call it; it must not cost what a call costs."""
    code = (
        "import sys; sys.argv = ['lz', '--version']\n"
        "from layerzero.client.cli import app\n"
        "try: app.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'zmq', 'msgpack', 'numpy', 'rich.table', 'pydantic', 'layerzero.ipc.transport.wire'}\n"
        "print(heavy & set(sys.modules))"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    version, loaded = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True).splitlines()
    assert (version.split()[0], loaded) == ("layerzero", "set()")


def test_help_begins_with_what_one_needs_first(site: Site) -> None:
    text = lz(site, "--help").stdout
    places = [text.index(f"\n│ {name} ") for name in ("up", "down", "status", "doctor", "env", "explain", "replay")]
    assert places == sorted(places)


def test_help_documents_the_exit_codes(site: Site) -> None:
    """They are an interface of scripts."""
    text = " ".join(lz(site, "--help").stdout.split())
    for code in ("0 done", "1 the operation failed", "2 wrong usage", "3 no broker"):
        assert code in text


@pytest.mark.parametrize("name", [name for name in PUBLIC_OPS if name not in calls.TEXT_OPS])
def test_words_become_the_tensor_arguments_of_every_op(name: str) -> None:
    """The command line reads op signatures; a new op must not fall out of it."""
    function = api.function_of(name)
    assert len(inputs.tensor_names(function)) == len(PUBLIC_OPS[name].inputs)
    known = {*inputs.tensor_names(function), *calls.scalar_names(function), *calls.CALL_OPTIONS}
    assert set(inspect.signature(function).parameters) <= known


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2x3:float16", TensorSpec.contiguous("float16", (2, 3))),
        ("0x4:bf16", TensorSpec.contiguous("bfloat16", (0, 4))),
        (":i64", TensorSpec.contiguous("int64", ())),
        ("none", None),
    ],
)
def test_shapes_are_written_with_x_and_a_dtype(text: str, wanted: TensorSpec | None) -> None:
    """Empty and zero-dimensional arrays are calls, too."""
    assert calls.parse_spec(text) == wanted


# --- policy


def test_policy_check_lists_every_problem_with_its_line(idle: Site) -> None:
    """One run shows all there is to repair; no broker is needed, which such a file may keep from starting."""
    file = idle.folder / "wrong.yaml"
    file.write_text("locks:\n  silu: alpha.sliu\nstrict_mode: true\nstrict_mode: maybe\nshadow_rat: 0.1\n")
    result = lz(idle, "policy", "check", str(file))
    assert result.returncode == USAGE
    lines = result.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{file}:{line}" for line in (2, 4, 5)]
    assert "did you mean 'alpha.silu'?" in lines[0]
    assert "did you mean 'shadow_rate'?" in lines[2]
    file.write_text("locks:\n  silu: alpha.sliu\n")
    answer = data(lz(idle, "policy", "check", str(file), "--json"), USAGE)
    [problem] = answer["problems"]
    assert problem.startswith(f"{file}:2: no kernel is called 'alpha.sliu'; did you mean 'alpha.silu'?")
    file.write_text("locks: [\n")
    assert "not YAML" in lz(idle, "policy", "check", str(file)).stdout
    file.write_text("locks:\n  silu: alpha.silu\n")
    good = lz(idle, "policy", "check", str(file))
    assert (good.returncode, good.stdout) == (DONE, f"{file}: good; sets 1 value\n")
    assert idle.broker_pid is None


def test_policy_show_names_the_origin_of_each_value(new_site: Sites) -> None:
    """Of the broker's file and of the shell's own variables; the same before a broker runs."""
    site = new_site()
    file = site.folder / "policy.yaml"
    file.write_text("# here\nstrict_mode: true\n")
    site.environ["LAYERZERO_POLICY"] = str(file)
    expected = {"strict_mode": f"{file}:2", "locks.silu": "LAYERZERO_LOCKS", "plan_mode": "default"}
    for _ in range(2):
        answer = data(lz(site, "policy", "show", "--origin", "--json", LAYERZERO_LOCKS="silu=beta.*"))
        assert {key: answer["values"][key]["origin"] for key in expected} == expected
        assert answer["values"]["locks.silu"]["value"] == "beta.*"
        site.start()
    shown = lz(site, "policy", "show", "--origin", COLUMNS="300")
    [line] = [line for line in shown.stdout.splitlines() if line.startswith("strict_mode")]
    assert line.split() == ["strict_mode", "true", f"{file}:2"]
    assert data(lz(site, "policy", "show", "--json"))["values"]["strict_mode"] is True
    assert str(file) not in lz(site, "policy", "show").stdout
    wrong = data(lz(site, "policy", "show", "--json", LAYERZERO_LOCKS="silu=nobody"), USAGE)
    assert "LAYERZERO_LOCKS: no kernel is called 'nobody'" in wrong["error"]["message"]
