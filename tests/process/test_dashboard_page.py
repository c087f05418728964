"""The dashboard's page in a browser: each view with calls and with a backend that dies, in narrow and wide windows,
dark and light, by keys alone. Needs Chromium; what it is told is in test_dashboard.py."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.backends.toy import KILL
from tests.process.browser import BINARY, Browser, browser
from tests.process.harness import Site, wait_ended, wait_until
from tests.process.test_dashboard import dashboard
from tests.process.test_express import X, bad, settle

import layerzero as lz

pytestmark = pytest.mark.skipif(BINARY is None, reason="no chromium here: apt-get install chromium")
Make = Callable[..., Site]
VIEWS = ("overview", "backends", "calls", "decisions", "environments", "matrix", "traces", "capsules")
MAIN = "document.querySelector('main').innerText"
FITS = "document.documentElement.scrollWidth <= innerWidth"
SHOWN = "document.querySelector('#views a[aria-current]')?.dataset.view"  # not only where the address is, by then
NAMED = """(({ left, right }) => left >= 0 && right <= innerWidth)(
  document.querySelector('#views a[aria-current]').getBoundingClientRect())"""
FOCUS = "document.activeElement.dataset.key"
COLOUR = "getComputedStyle(document.body).backgroundColor"


def test_every_view_while_a_backend_dies(new_site: Make, tmp_path: Path) -> None:
    """No error in the console, nothing wider than the window, and all of it without a mouse."""
    site = new_site()
    site.use_store(tmp_path)
    site.start().connect()
    site.wait_ready("alpha", "beta")
    settle()
    over = threading.Event()

    def calls() -> None:
        while not over.wait(0.01):
            lz.silu(X)

    with lz.trace() as trace:
        lz.silu(X)
    trace.save(tmp_path / "traces" / "one.lztrace")
    with dashboard(site) as shown, browser() as page:
        thread = threading.Thread(target=calls)
        thread.start()
        try:
            page.resize(1600)
            page.open(shown.address)
            page.wait("document.querySelector('#link')?.textContent === 'live'")
            page.wait(f"/[1-9][0-9]*\\ncalls a second/.test({MAIN})")
            assert page.run("location.search") == ""  # the token is not in the address any more
            with site.environment():
                lz.silu(bad(KILL, "alpha"))
            page.wait(f"/\\n[1-9]\\nfallbacks/.test({MAIN}) && {MAIN}.includes('worker.exited')")
            light = page.run(COLOUR)
            for number, name in enumerate(VIEWS, 1):
                page.press(str(number))
                page.wait(f"{SHOWN} === '{name}' && !{MAIN}.includes('Asking')")
                for width, is_dark in ((360, False), (1600, True), (360, True), (1600, False)):
                    page.resize(width, is_dark=is_dark)
                    page.wait(FITS)
                    page.wait(NAMED)
                    assert (page.run(COLOUR) == light) is not is_dark
            page.press("4")
            page.wait(f"{SHOWN} === 'decisions' && {MAIN}.includes('silu(8:float32)')")
            page.press("j")
            page.wait(f"{FOCUS} === 'silu(8:float32)'")
            page.press("Enter")
            page.wait(f"{MAIN}.includes('May serve it, best first')")
            page.press("Escape")
            page.wait(f"!{MAIN}.includes('May serve it, best first')")
            page.press("8")
            page.wait(f"{SHOWN} === 'capsules' && {MAIN}.includes('alpha.silu')")
            page.press("j")
            page.wait(f"{FOCUS}?.includes('silu')")
            page.press("Enter")
            page.wait(f"{MAIN}.includes('lz replay')")
            page.wait(f"{MAIN}.includes('silu(8:float32) -> 8:float32, alpha.silu: had not ended')")
            page.press("Escape")
            stays_where_one_is(page)
            page.press("7")
            page.wait(f"{MAIN}.includes('one.lztrace')")
            page.press("j")
            page.wait(f"{FOCUS} === 'one.lztrace'")
            page.press("Enter")
            page.wait("document.querySelector('.timeline') !== null")
            page.run("document.querySelector('.timeline').focus()")
            page.press("ArrowRight")
            page.wait(f"{MAIN}.includes('silu(8:float32) on ')")
            later(page)
            assert page.run(f"{MAIN}.includes('silu(8:float32) on ')"), "what was pointed at is still told"
            page.resize(360)
            page.wait(FITS)
            page.resize(1600)
            page.press("t")
            page.wait(f"{COLOUR} !== '{light}'")
            page.press("2")
            page.wait("document.querySelector('#filter')?.placeholder.includes('backends')")
            page.press("/")
            for letter in "beta":
                page.press(letter)
            page.wait(f"{MAIN}.includes('beta') && !{MAIN}.includes('gamma')")
            page.press("Escape")
        finally:
            over.set()
            thread.join()
        pid = site.broker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)
        page.wait("document.querySelector('#trouble').innerText.includes('lz up')")
        assert page.said == []


def test_the_overview_has_a_backend_that_waits_for_its_restart(new_site: Make, tmp_path: Path) -> None:
    """That is the one which somebody looks for."""
    site = new_site(backoff_s=600, backoff_max_s=600)
    site.use_store(tmp_path)
    site.start().connect()
    site.wait_ready("alpha", "beta")
    with dashboard(site) as shown, browser() as page:
        page.resize(1600)
        page.open(shown.address)
        rows = "[...document.querySelectorAll('main tr[tabindex]')].map((row) => row.innerText)"
        page.wait(f"{rows}.some((row) => row.startsWith('alpha') && row.includes('ready'))")
        lz.silu(bad(KILL, "alpha"))
        page.wait(f"{rows}.some((row) => row.startsWith('alpha') && row.includes('backoff'))")
        assert page.said == []


def test_an_address_that_leads_nowhere_says_so(new_site: Make, tmp_path: Path) -> None:
    """Such as one that was sent on in part."""
    site = new_site()
    site.use_store(tmp_path)
    site.start()
    with dashboard(site) as shown, browser() as page:
        page.open(shown.address)
        page.wait("document.querySelector('#link')?.textContent === 'live'")
        for where, says in (("traces/..", "has no answer"), ("capsules/%zz", "no capsule is called '%zz'")):
            page.run(f"location.hash = '{where}'")
            page.wait(f'document.body.innerText.includes("{says}")')
        assert not any("exceptionId" in one for one in page.said)


def test_what_had_no_answer_is_asked_again(new_site: Make, tmp_path: Path) -> None:
    """A lone trace or capsule is asked for once; the error of a server that was away stayed for ever."""
    site = new_site()
    site.use_store(tmp_path)
    site.start()
    with dashboard(site) as shown, browser() as page:
        page.open(shown.address)
        page.wait("document.querySelector('#link')?.textContent === 'live'")
        page.run(
            "{ const ask = fetch; window.fetch = (path) => path.includes('capsules/')"
            " ? (window.fetch = ask, Promise.reject(new Error('it was away'))) : ask(path); }"
        )
        page.run("location.hash = 'capsules/some'")
        page.wait("document.body.innerText.includes('/api/capsules/some has no answer: it was away')")
        page.wait("document.body.innerText.includes(\"no capsule is called 'some'\")")


def stays_where_one_is(page: Browser) -> None:
    """The page draws itself anew each second: that takes away no focus, and what is pressed gets its click."""
    page.press("1")
    page.wait("document.querySelector('main select') !== null")
    page.run("document.querySelector('main select').focus()")
    later(page)
    assert page.run("document.activeElement.tagName") == "SELECT"
    row = "document.querySelector('main tr[tabindex]')"
    page.wait(f"{row} !== null")
    page.run(f"{row}.scrollIntoView({{ block: 'center' }})")

    def is_pressed() -> bool:
        """Again where the row has moved under the mouse."""
        page.hold(row, is_down=True)
        later(page)
        page.hold(row, is_down=False)
        return bool(page.run("location.hash.startsWith('#backends/')"))

    wait_until(is_pressed)
    page.wait("location.hash.startsWith('#backends/') && document.querySelector('.detail button') !== null")
    page.run("document.querySelector('.detail button').focus()")
    later(page)
    assert page.run("document.activeElement.tagName") == "BUTTON"
    page.press("Escape")


def later(page: Browser) -> None:
    """After the page was told something more, and drew it, where it does."""
    page.run("""new Promise((done) => {
      const source = new EventSource("/events");
      let count = 0;
      source.onmessage = () => {
        if (++count < 2) return;
        source.close();
        requestAnimationFrame(() => requestAnimationFrame(done));
      };
    })""")
