"""The record of a chaos run: checks its history and writes results/chaos.md.

    python bench/chaos.py [--quick] [--minutes N] [--seed N] [--clients N] [--history FOLDER]

Runs `lz bench chaos` first, unless FOLDER has the history of a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from common import parser, save

from layerzero.client.chaos import checker, history


def main() -> int:
    arguments = parser(__doc__, "half a minute")
    arguments.add_argument("--minutes", type=float, default=5.0)
    arguments.add_argument("--seed", type=int, default=2027)
    arguments.add_argument("--clients", type=int, default=8)
    arguments.add_argument("--history", type=Path, help="of a run that is over")
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="lz-bench-") as folder:
        kept = args.history or Path(folder, "history")
        if args.history is None:
            minutes = 0.5 if args.quick else args.minutes
            words = ["--seed", args.seed, "--minutes", minutes, "--clients", args.clients, "--history", kept]
            command = [sys.executable, "-m", "layerzero.client.cli.app", "bench", "chaos", *map(str, words)]
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL)  # what it found is in the history
        return table(kept, is_quick=args.quick)


def table(folder: Path, *, is_quick: bool) -> int:
    verdict = checker.check(folder)
    found = verdict.to_dict()
    facts = json.loads((folder / history.FACTS).read_bytes())
    faults: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for name, count in found["faults"].items():
        what, _, result = name.partition(": ")
        (faults if result == "done" else missed)[what] += count
    rows = [
        ["calls", f"{found['calls']:,}", f"{facts['clients']} clients of {facts['threads']} threads"],
        ["right results", f"{found['outcomes'].get('OK', 0):,}", _listed(found["by_backend"])],
        ["calls that went to another kernel", f"{found['fallbacks']:,}", "and were right"],
        *(
            [name, f"{count:,}", "each near a fault that explains it" if name in checker.PROMISED else "not promised"]
            for name, count in sorted(found["outcomes"].items(), key=lambda item: -item[1])
            if name != "OK"
        ),
        ["open when their client was killed", f"{found['open_at_kill']:,}", "nobody waits for them"],
        ["faults done", f"{faults.total():,}", _listed(faults)],
        ["faults without a target", f"{missed.total():,}", "the process was just being replaced"],
        ["SIGKILL of the broker to BROKER_LOST", _times(found["broker_lost_s"]), "calls that were open then"],
        [
            "SIGKILL of the broker to a right result again",
            _times(found["broker_back_s"]),
            "with the starts in it",
        ],
        ["a call, right, waited for at once", _times(found["ok_s"]), "waits for workers that load are part of it"],
        ["broken promises", f"{sum(verdict.counts.values()):,}", _listed(verdict.counts) or "none"],
    ]
    minutes = facts["duration_s"] / 60
    command = f"lz bench chaos --seed {facts['seed']} --minutes {minutes:g} --clients {facts['clients']}"
    notes = [
        f"Times are p50 / p99 / largest. The load average after the run was {os.getloadavg()[0]:.1f}: other work had "
        "the machine, too, so that times are upper bounds."
    ]
    print(f"{command} --gap {facts['gap_s']:g}: {sum(verdict.counts.values())} broken promises")
    if not is_quick:
        save("chaos", "Chaos", {}, f"{command} --gap {facts['gap_s']:g}", ["figure", "value", "of"], rows, notes)
    return 1 if verdict.violations else 0


def _listed(counts: Counter[str] | dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _times(found: dict[str, float]) -> str:
    if not found["count"]:
        return "none"
    return f"{found['p50'] * 1e3:,.1f} / {found['p99'] * 1e3:,.0f} / {found['max'] * 1e3:,.0f} ms of {found['count']:,}"


if __name__ == "__main__":
    raise SystemExit(main())
