"""`lz dashboard` over HTTP: what its answers have, who may ask, and what happens when the broker or a backend is gone.
The page itself: test_dashboard_page.py."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.backends.toy import KILL
from tests.process.harness import Site, wait_ended, wait_until
from tests.process.test_cli import command
from tests.process.test_express import X, bad, settle

import layerzero as lz

pytest.importorskip("starlette", reason="the extra `dashboard` is not installed")
pytest.importorskip("uvicorn", reason="the extra `dashboard` is not installed")
TOKEN = "0123456789abcdef0123"
SHOWN = {"Authorization": f"Bearer {TOKEN}"}
Make = Callable[..., Site]


class Dashboard:
    """One that runs. `get` answers with status, headers in small letters, and text."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = f"http://127.0.0.1:{port}/?token={TOKEN}"

    def get(
        self, path: str, method: str = "GET", host: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.putrequest(method, path, skip_host=host is not None)
            for name, value in {**named, **({} if host is None else {"Host": host})}.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read().decode()
        finally:
            connection.close()

    def ask(self, path: str, method: str = "GET", **headers: str) -> Any:
        status, _, text = self.get(path, method, **SHOWN, **headers)
        assert status == 200, text
        return json.loads(text)

    def frames(self) -> Iterator[Any]:
        """Of the stream, as they come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", "/events", headers=SHOWN)
            answer = connection.getresponse()
            assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
            while line := answer.readline():
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        finally:
            connection.close()

    def wait(self, is_it: Callable[[Any], bool]) -> Any:
        """The first frame of which that is true."""
        for frame in self.frames():
            if is_it(frame):
                return frame
        raise AssertionError("the stream has ended")


@contextlib.contextmanager
def dashboard(site: Site, *words: str) -> Iterator[Dashboard]:
    token = site.folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    given = command(site, ("dashboard", "--at", "127.0.0.1:0", "--token-file", str(token), *words))
    process = subprocess.Popen(**given, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(rf"http://127\.0\.0\.1:(\d+)/\?token={TOKEN}\n", line)
        assert found is not None, (line, process.communicate())
        yield Dashboard(int(found[1]))
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert "Traceback" not in said, said


@pytest.fixture
def site(new_site: Make, tmp_path: Path) -> Site:
    made = new_site()
    made.use_store(tmp_path)
    made.environ["LAYERZERO_CAPSULES"] = "shapes"
    return made


def seen(page: Dashboard, seconds: str) -> int:
    """Calls in the charts' points."""
    return sum(round(rate * width) for _, width, rate, *_ in page.ask(f"/api/history?seconds={seconds}")["points"])


def test_what_the_page_is_told(site: Site, tmp_path: Path) -> None:
    """Calls, a worker that dies, decisions, a capsule, a trace: each as it is, while it happens; and what was seen is
    kept where no recorder does."""
    site.start().connect()
    site.wait_ready("alpha", "beta")
    with dashboard(site) as page:
        settle()
        with lz.trace() as trace:
            for _ in range(20):
                lz.silu(X)

        def is_busy(one: Any) -> bool:
            """It shows the second before; so this one has a call, too."""
            lz.silu(X)
            return bool(one.get("now") and any(row[3] > 0 for row in one["now"]["calls"]))

        frame = page.wait(is_busy)
        assert frame["error"] is None
        assert {row["name"]: row["state"] in ("ready", "busy") for row in frame["now"]["backends"]}["alpha"] is True
        assert frame["point"][2] > 0
        with site.environment():
            lz.silu(bad(KILL, "alpha"))
        frame = page.wait(lambda one: bool(one["now"]["fallbacks"]))
        assert [(row["backend"], row["code"]) for row in frame["now"]["fallbacks"]] == [("alpha", "BACKEND_ERROR")]
        assert "worker.exited" in {one["event"] for one in frame["events"]}
        for span in ("900", "86400"):
            page.wait(lambda _, span=span: seen(page, span) > 0)

        found = page.ask("/api/decisions")
        one = next(one for one in found["decisions"] if one["op"] == "silu")
        assert one["call"] == "silu(8:float32)"
        accepted = [c["kernel_id"] for c in one["candidates"] if c["accepted"]]
        assert accepted == [c.kernel_id for c in lz.explain("silu", X).candidates if c.accepted]

        [capsule] = page.ask("/api/capsules")["capsules"]
        assert (capsule["kernel"], capsule["ended_by"]) == ("alpha.silu", "signal9")
        whole = page.ask(f"/api/capsules/{capsule['name']}")
        assert whole["replay"] == f"lz replay {capsule['name']} --env all"

        folder = Path(page.ask("/api/traces")["folder"])
        assert folder == tmp_path / "traces"
        folder.mkdir()
        trace.save(folder / "one.lztrace")
        (folder / "none.lztrace").write_text("this is no trace")
        assert {row["name"] for row in page.ask("/api/traces")["traces"]} == {"one.lztrace", "none.lztrace"}
        shown = page.ask("/api/traces/one.lztrace")
        assert (shown["count"], shown["calls"][0]["label"]) == (20, "silu(8:float32)")
        for path in ("traces/none.lztrace", "traces/..", "capsules/nothing", "capsules/.."):
            assert page.ask(f"/api/{path}")["error"]["message"]
        assert page.get("/api/traces/..%2f..%2ftoken", **SHOWN)[0] == 404
        assert page.ask("/api/matrix") == {"matrix": None}
        for wrong in ("seconds=x", "seconds=0", "seconds=nan", "seconds=1e9", "end=1e12"):
            assert "error" in page.ask(f"/api/history?{wrong}")


def test_a_broker_that_comes_and_goes(site: Site) -> None:
    """No broker is started; the page says which command does, and goes on with the next broker."""
    with dashboard(site) as page:
        frame = page.wait(lambda one: one["error"] is not None and "no broker runs" in one["error"]["message"])
        assert frame["error"]["repair"] == "lz up"
        assert site.broker_pid is None
        assert page.ask("/api/decisions")["error"]["message"].startswith("no broker runs")
        for _ in range(2):
            site.start()
            pid = site.broker_pid
            assert pid is not None
            assert page.wait(lambda one: one["error"] is None)["now"]["broker"]["pid"] == pid
            os.kill(pid, signal.SIGKILL)
            wait_ended(pid)
            page.wait(lambda one: one["error"] is not None)


def test_who_may_ask(site: Site) -> None:
    """Nothing is told without the token, to another site's page, or under another name of this machine."""
    with dashboard(site) as page:
        for headers in ({}, {"Authorization": "Bearer " + TOKEN[:-1]}, {"Cookie": f"lz-dashboard-{page.port}=x"}):
            for path in ("/", "/app.js", "/events", "/api/site", "/nothing", "/?token=wrong"):
                status, found, text = page.get(path, **headers)
                assert (status, "token" in text) == (401, True), path
                assert "frame-ancestors 'none'" in found["content-security-policy"]
        status, found, _ = page.get(f"/?token={TOKEN}")
        cookie, *flags = found["set-cookie"].split("; ")
        assert (status, found["location"]) == (303, "/")
        assert {"httponly", "samesite=strict"} <= {flag.lower() for flag in flags}
        status, found, text = page.get("/", Cookie=cookie)
        assert (status, "<title>LayerZero</title>" in text) == (200, True)
        policy = dict(part.split(" ", 1) for part in found["content-security-policy"].split("; "))
        assert (policy["default-src"], policy["script-src"], policy["connect-src"]) == ("'none'", "'self'", "'self'")
        for site_ in ("cross-site", "same-site"):
            assert page.get("/api/site", Cookie=cookie, Sec_Fetch_Site=site_)[0] == 403
        assert page.get("/api/site", host=f"evil.example:{page.port}", Cookie=cookie)[0] == 421
        assert page.get("/api/site", host=f"localhost:{page.port}", Cookie=cookie)[0] == 200
        assert page.get("/api/restart/alpha", "POST", Cookie=cookie, X_LayerZero="1")[0] == 403  # it only shows


def test_acting_when_it_is_allowed(site: Site) -> None:
    """Another worker takes over; a form of another site cannot ask for it."""
    site.start().connect()
    [before] = site.wait_ready("alpha")
    with dashboard(site, "--allow-actions") as page:
        assert page.ask("/api/site")["may_act"] is True
        evil = {"Origin": "http://evil.example", "X_LayerZero": "1"}
        assert page.get("/api/restart/alpha", "POST", **SHOWN)[0] == 403
        assert page.get("/api/restart/alpha", "POST", **SHOWN, **evil)[0] == 403
        assert page.get("/api/shutdown/alpha", "POST", **SHOWN, X_LayerZero="1")[0] == 404
        assert "nobody" in page.ask("/api/reset/nobody", "POST", X_LayerZero="1")["error"]["message"]
        page.ask("/api/restart/alpha", "POST", X_LayerZero="1", Origin=f"http://127.0.0.1:{page.port}")
        wait_until(lambda: site.backend("alpha")["pid"] not in (None, before))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--at", "0.0.0.0:0"), "--reachable if that is what you want"),
        (("--at", "nonsense"), "give ADDRESS:PORT, such as 127.0.0.1:9465"),
        (("--at", "127.0.0.1:99999"), "give ADDRESS:PORT, such as 127.0.0.1:9465"),
    ],
)
def test_where_it_may_listen(site: Site, words: tuple[str, ...], said: str) -> None:
    """Other machines do not reach it unasked."""
    given = command(site, ("dashboard", *words))
    found = subprocess.run(**given, check=False, capture_output=True, timeout=120)
    assert (found.returncode, said in found.stderr) == (2, True)


def test_files_of_the_page_need_nothing_from_elsewhere() -> None:
    """No other address is named in them; no script or style is in the page, which the content policy would refuse."""
    from layerzero.dashboard.serving import FILES, PAGE

    assert {path.name for path in PAGE.iterdir()} == set(FILES)
    for name in FILES:
        text = (PAGE / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text), (
            name
        )
        assert max(map(len, text.splitlines())) <= 200, name
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", page)
