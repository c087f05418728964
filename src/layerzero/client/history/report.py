"""A stretch of history as one HTML page: no other file, no script, nothing from a network."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from layerzero.client.history.history_file import Kept
from layerzero.client.history.moments import backend_rows, bytes_text, op_rows, time_text
from layerzero.client.history.sample import Sample
from layerzero.ipc.version import __version__

WIDTH, HEIGHT = 900, 120
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #fff; --line: #d1d9e0; --a: #1f6feb;
  --b: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9da7b1; --paper: #0d1117; --line: #3d444d;
  --a: #58a6ff; --b: #f0883e; } }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 1.5rem 0 .4rem; } .soft { color: var(--soft); }
svg { display: block; width: 100%; height: 8rem; border: 1px solid var(--line); border-radius: 6px; }
path { fill: none; stroke-width: 1.6; vector-effect: non-scaling-stroke; }
.a { stroke: var(--a); } .b { stroke: var(--b); } rect.a { fill: var(--a); } rect.b { fill: var(--b); }
.ka { color: var(--a); } .kb { color: var(--b); }
.times { display: flex; justify-content: space-between; color: var(--soft); font-size: .8rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; font-size: .85rem; } .n { text-align: right; }
"""


def whole(kept: Iterable[Kept]) -> Sample:
    """All of them together."""
    found = Sample()
    for one in kept:
        found.add(one.sample)
    return found


def clock(at: float) -> str:
    """For people, in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def page(kept: Sequence[Kept], begin: float, end: float) -> str:
    """The whole page; text of backends is escaped."""
    total = whole(kept)
    body = "\n".join([*_head(total, begin, end), *_charts(kept, begin, end), *_tables(total)])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>LayerZero, {escape(clock(begin))}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _head(total: Sample, begin: float, end: float) -> Iterator[str]:
    calls = total.total()
    p50, p99 = (time_text(calls.quantile_us(share)) or "-" for share in (0.5, 0.99))
    yield "<h1>What LayerZero did</h1>"
    yield f'<p class="soft">{escape(clock(begin))} to {escape(clock(end))}, layerzero {escape(__version__)}; '
    yield f"{total.seconds:,.0f} s of it were seen</p>"
    yield (
        f"<p>{calls.count:,} calls ended well, half of them within {p50}, 99 % within {p99}. "
        f"{sum(total.fallbacks.values()):,} fallbacks, {sum(total.errors.values()):,} errors, "
        f"{sum(total.restarts.values()):,} restarts of workers.</p>"
    )


def _charts(kept: Sequence[Kept], begin: float, end: float) -> Iterator[str]:
    def rate(sample: Sample) -> float | None:
        return sample.total().count / max(sample.seconds, 1e-3)

    yield from _lines("Calls a second", kept, begin, end, [("calls", rate)], lambda value: f"{value:,.0f}")
    quantiles: list[tuple[str, Callable[[Sample], float | None]]] = [
        ("p50", lambda sample: sample.total().quantile_us(0.5)),
        ("p99", lambda sample: sample.total().quantile_us(0.99)),
    ]
    yield from _lines("How long calls took", kept, begin, end, quantiles, time_text, is_logarithmic=True)
    faults: list[tuple[str, Callable[[Sample], float | None]]] = [
        ("fallbacks", lambda sample: float(sum(sample.fallbacks.values()))),
        ("errors", lambda sample: float(sum(sample.errors.values()))),
    ]
    yield from _lines("Fallbacks and errors", kept, begin, end, faults, lambda value: f"{value:,.0f}", is_bars=True)


def _lines(
    title: str,
    kept: Sequence[Kept],
    begin: float,
    end: float,
    lines: Sequence[tuple[str, Callable[[Sample], float | None]]],
    text: Callable[[float], str],
    *,
    is_logarithmic: bool = False,
    is_bars: bool = False,
) -> Iterator[str]:
    columns = [[value(one.sample) for one in kept] for _, value in lines]
    values = [value for column in columns for value in column if value]
    top, low = max(values, default=1.0) * 1.1, min(values, default=1.0) / 1.1
    keys = " ".join(f'<span class="k{"ab"[n]}">{escape(name)}</span>' for n, (name, _) in enumerate(lines))
    most = f"at most {escape(text(max(values)))}" if values else "none"
    yield f'<h2>{escape(title)} <small class="soft">{keys} {most}</small></h2>'
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none"'
    yield f'<svg {box} role="img" aria-label="{escape(title)}: {most}">'
    scale = WIDTH / max(end - begin, 1.0)
    for style, column in zip("ab", columns, strict=False):
        points, last = "", -math.inf
        for one, value in zip(kept, column, strict=True):
            x = (one.at - begin) * scale
            if value is None or ((is_bars or is_logarithmic) and not value):
                continue
            share = math.log(value / low) / math.log(top / low) if is_logarithmic else value / top
            y = HEIGHT * (1 - share)
            if is_bars:
                width = max(one.width_s * scale, 2.0)
                yield f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HEIGHT - y:.1f}"/>'
            else:
                points += f"{'M' if one.at - last > 2.5 * one.width_s else 'L'}{x:.1f} {y:.1f}"
                last = one.at
        if points:
            yield f'<path class="{style}" d="{points}"/>'
    yield f'</svg><div class="times"><span>{escape(clock(begin))}</span><span>{escape(clock(end))}</span></div>'


def _tables(total: Sample) -> Iterator[str]:
    yield from _table(
        "Backends",
        ("backend", "state at the end", "calls/s", "p50", "p99", "fallbacks", "restarts", "memory", "GPU memory"),
        [
            (
                row.name,
                row.state,
                f"{row.rate:,.1f}",
                time_text(row.p50_us),
                time_text(row.p99_us),
                f"{row.fallbacks:,}",
                f"{row.restarts:,}",
                bytes_text(row.memory_bytes),
                bytes_text(row.gpu_bytes),
            )
            for row in backend_rows(total)
        ],
        2,
    )
    yield from _table(
        "Calls",
        ("op", "backend", "path", "calls/s", "p50", "p99"),
        [(*row[:3], f"{row.rate:,.1f}", time_text(row.p50_us), time_text(row.p99_us)) for row in op_rows(total)],
        3,
    )
    for title, counts in (("Fallbacks", total.fallbacks), ("Errors", total.errors)):
        rows = [(*key, f"{count:,}") for key, count in sorted(counts.items(), key=lambda row: -row[1])]
        yield from _table(title, ("op", "backend", "reason", "calls"), rows, 3)
    restarts = [(*key, f"{count:,}") for key, count in sorted(total.restarts.items(), key=lambda row: -row[1])]
    yield from _table("Restarts of workers", ("backend", "cause", "times"), restarts, 2)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> Iterator[str]:
    """`texts`: so many columns are no numbers."""
    yield f"<h2>{escape(title)}</h2>"
    if not rows:
        yield '<p class="soft">None.</p>'
        return
    style = ["" if n < texts else ' class="n"' for n in range(len(heads))]
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f'<th scope="col"{style[n]}>{escape(head)}</th>' for n, head in enumerate(heads))
    yield "</tr></thead><tbody>"
    for row in rows:
        yield "<tr>" + "".join(f"<td{style[n]}>{escape(cell)}</td>" for n, cell in enumerate(row)) + "</tr>"
    yield "</tbody></table></div>"
