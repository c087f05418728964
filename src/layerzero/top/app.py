"""The terminal's screen: rows of backends, rows of ops, and keys."""

from __future__ import annotations

import time
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
BACKENDS = ("backend", "state", "calls/s", "p50", "p99", "running", "waiting", "fallbacks", "restarts", "memory")
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
        yield DataTable(id="ops", cursor_type="none")
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
        self.query_one("#head", Static).update(head)
        self.query_one("#rates", Sparkline).data = seen.rates or [0.0]
        self._fill("#backends", [] if sample is None else [self._backend(row) for row in backend_rows(sample)])
        rows = [] if sample is None else op_rows(sample)[:MAX_OPS]
        self._fill("#ops", [(*r[:3], f"{r.rate:,.1f}", time_text(r.p50_us), time_text(r.p99_us)) for r in rows])
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
        )

    def _fill(self, selector: str, rows: list[tuple[Any, ...]]) -> None:
        table = self.query_one(selector, DataTable)
        at = table.cursor_row
        table.clear()
        for row in rows:
            table.add_row(*row)
        if rows and table.cursor_type == "row":
            table.move_cursor(row=min(at, len(rows) - 1), animate=False)

    def _say(self, text: str) -> None:
        self.query_one("#said", Static).update(Text(text))

    @property
    def _chosen(self) -> str | None:
        table = self.query_one("#backends", DataTable)
        return str(table.get_row_at(table.cursor_row)[0]) if table.row_count else None

    def action_step(self, by: int) -> None:
        self._source.step(by * STEP_S)
        self._look()

    def action_now(self) -> None:
        self._source.at = None
        self._look()

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._show(self._seen)

    def action_restart(self) -> None:
        name = self._chosen
        if name is None or not self._seen.is_live:
            self._say("choose a backend that is there now")
            return
        self._say(f"restart {name}: asked for")
        self.run_worker(lambda: self._restart(name), thread=True, group="act")

    def _restart(self, name: str) -> None:
        try:
            self._source.ask("restart", backend=name, timeout_s=RESTART_S, force=False)
            said = f"restart {name}: another worker starts, and takes over when it is ready"
        except lz.LayerZeroError as exc:
            said = f"restart {name}: {exc.message}"
        self.call_from_thread(self._say, said)
