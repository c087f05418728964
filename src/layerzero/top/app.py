"""The terminal's screen: rows of backends, rows of ops, and keys."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Sparkline, Static

import layerzero as lz
from layerzero.client.history.moments import backend_rows, bytes_text, op_rows, time_text
from layerzero.top.source import STEP_S, Seen, Source

EVERY_S = 1.0
RESTART_S = 120.0
MAX_OPS = 20
_GOOD, _CARE = ("ready", "busy"), ("starting", "probing", "backoff")
BACKENDS = (
    "backend",
    "state",
    "calls/s",
    "p50",
    "p99",
    "running",
    "waiting",
    "fallbacks",
    "restarts",
    "memory",
    "GPU memory",
)
OPS = ("op", "backend", "path", "calls/s", "p50", "p99")


class Top(App[None]):
    """`may_act`: backends may be restarted."""

    CSS = """
    #head { height: auto; padding: 0 1; }
    #rates { height: 2; margin: 0 1; }
    DataTable { height: auto; max-height: 50%; margin: 1 1 0 1; }
    #said { height: auto; padding: 0 1; color: $warning; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("left", "step(-1)", "back 10 s", priority=True),
        Binding("right", "step(1)", "on 10 s", priority=True),
        Binding("n", "now", "now"),
        Binding("p", "pause", "stop and go on"),
        Binding("r", "restart", "restart"),
        Binding("f", "restart(True)", "restart at once"),
        Binding("d", "drain", "drain, or not"),
        Binding("l", "lock", "lock op, or not"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._is_paused = False
        self._seen = Seen(time.time(), None, [])

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Sparkline([], id="rates")
        yield DataTable(id="backends", cursor_type="row", zebra_stripes=True)
        yield DataTable(id="ops", cursor_type="row", zebra_stripes=True)
        yield Static(id="said")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#backends", DataTable).add_columns(*BACKENDS)
        self.query_one("#ops", DataTable).add_columns(*OPS)
        self.query_one("#backends", DataTable).focus()
        self.set_interval(EVERY_S, self._tick)
        self._look()

    def on_unmount(self) -> None:
        self._source.close()

    def _tick(self) -> None:
        if not self._is_paused and self._source.at is None:
            self._look()

    def _look(self) -> None:
        """On a thread: the broker may be slow."""
        self.run_worker(self._take, thread=True, exclusive=True, group="look")

    def _take(self) -> None:
        try:
            seen = self._source.look()
        except lz.LayerZeroError as exc:
            seen = Seen(time.time(), None, [], exc.message, is_live=False)
        self.call_from_thread(self._show, seen)

    def _show(self, seen: Seen) -> None:
        self._seen = seen
        sample = seen.sample
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.at))
        head = Text.assemble(("LayerZero ", "bold"), clock, (" live" if seen.is_live else " history", "cyan"))
        if self._is_paused:
            head.append(" stopped", "yellow")
        if sample is not None:
            total = sample.total()
            head.append(f"   {total.count / max(sample.seconds, 1e-3):,.0f} calls/s")
            p50, p99 = (time_text(total.quantile_us(share)) or "-" for share in (0.5, 0.99))
            head.append(f"   p50 {p50}   p99 {p99}")
            head.append(f"   clients {sample.gauges.get('clients', 0):.0f}   lanes {sample.gauges.get('lanes', 0):.0f}")
            head.append(f"   lent {bytes_text(sample.gauges.get('host_bytes', 0.0)) or '0 MiB'}")
            if gpu := bytes_text(sample.gauges.get("gpu_bytes", 0.0)):
                head.append(f", on GPUs {gpu}")
            faults = sum(sample.fallbacks.values()), sum(sample.errors.values())
            head.append(f"   fallbacks {faults[0]}   errors {faults[1]}", "yellow" if any(faults) else "")
        if seen.drained:
            head.append(f"   drained: {', '.join(seen.drained)}", "yellow")
        if seen.locks:
            head.append(f"   locked: {', '.join(f'{op} to {to}' for op, to in seen.locks.items())}", "yellow")
        self.query_one("#head", Static).update(head)
        self.query_one("#rates", Sparkline).data = seen.rates or [0.0]
        self._fill("#backends", [] if sample is None else [self._backend(row) for row in backend_rows(sample)], 1)
        rows = [] if sample is None else op_rows(sample)[:MAX_OPS]
        self._fill("#ops", [(*r[:3], f"{r.rate:,.1f}", time_text(r.p50_us), time_text(r.p99_us)) for r in rows], 3)
        if seen.problem:
            self._say(seen.problem)
        elif self.query_one("#said", Static).has_class("problem"):
            self._say("")
        self.query_one("#said", Static).set_class(bool(seen.problem), "problem")

    @staticmethod
    def _backend(row: Any) -> tuple[Any, ...]:
        style = "green" if row.state in _GOOD else "yellow" if row.state in _CARE else "red"
        return (
            row.name,
            Text(row.state, style),
            f"{row.rate:,.1f}",
            time_text(row.p50_us),
            time_text(row.p99_us),
            row.running,
            row.waiting,
            Text(str(row.fallbacks), "yellow" if row.fallbacks else ""),
            Text(str(row.restarts), "yellow" if row.restarts else ""),
            bytes_text(row.memory_bytes),
            bytes_text(row.gpu_bytes),
        )

    def _fill(self, selector: str, rows: list[tuple[Any, ...]], names: int) -> None:
        """The chosen row stays the one with these names, wherever it is now."""
        table = self.query_one(selector, DataTable)
        chosen = self._chosen(selector, names)
        table.clear()
        for row in rows:
            table.add_row(*row)
        known = [tuple(str(cell) for cell in row[:names]) for row in rows]
        if chosen in known:
            table.move_cursor(row=known.index(chosen), animate=False)

    def _say(self, text: str) -> None:
        self.query_one("#said", Static).update(Text(text))

    def _chosen(self, selector: str, names: int) -> tuple[str, ...]:
        """What the chosen row begins with; empty where there is no row."""
        table = self.query_one(selector, DataTable)
        return tuple(str(cell) for cell in table.get_row_at(table.cursor_row)[:names]) if table.row_count else ()

    def action_step(self, by: int) -> None:
        self._source.step(by * STEP_S)
        self._look()

    def action_now(self) -> None:
        self._source.at = None
        self._look()

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._show(self._seen)

    def action_restart(self, is_forced: bool = False) -> None:
        what = "it ends now, with its calls" if is_forced else "another worker starts, and takes over when it is ready"
        self._of_backend("restart", lambda name: ("restart", what, self._restarting(name, is_forced)))

    @staticmethod
    def _restarting(name: str, is_forced: bool) -> dict[str, Any]:
        return {"backend": name, "timeout_s": RESTART_S, "force": is_forced}

    def action_drain(self) -> None:
        """It gets no more calls, or, if that is so already, gets them again."""

        def drain(name: str) -> tuple[str, str, dict[str, Any]]:
            is_off = name in self._seen.drained
            said = "it gets calls again" if is_off else "no new calls go there; d takes that back"
            return "steer", said, {"drain": name, "off": is_off}

        self._of_backend("drain", drain)

    def action_lock(self) -> None:
        """Calls of the chosen row's op go to its backend alone, or, if that is so already, where they did."""
        chosen = self._chosen("#ops", 2)
        if not chosen or not self._seen.is_live:
            self._say("choose a row of the lower table (Tab), live")
            return
        op, backend = chosen
        is_off = self._seen.locks.get(op) == backend
        said = f"lock {op}: {'taken back' if is_off else f'its calls go to {backend} alone; l takes that back'}"
        self.run_worker(
            lambda: self._act(said, "steer", lock=op, to="" if is_off else backend), thread=True, group="act"
        )

    def _of_backend(self, verb: str, asked: Callable[[str], tuple[str, str, dict[str, Any]]]) -> None:
        chosen = self._chosen("#backends", 1)
        if not chosen or not self._seen.is_live:
            self._say("choose a backend that is there now")
            return
        method, what, params = asked(chosen[0])
        said = f"{verb} {chosen[0]}"
        self._say(f"{said}: asked for")
        self.run_worker(lambda: self._act(f"{said}: {what}", method, **params), thread=True, group="act")

    def _act(self, said: str, method: str, **params: Any) -> None:
        try:
            self._source.ask(method, **params)
        except lz.LayerZeroError as exc:
            said = f"{said.partition(':')[0]}: {exc.message.partition(chr(10))[0]}"
        self.call_from_thread(self._say, said)
