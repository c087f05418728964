"""What happens to a plan, as events by category and level: kept, handed to `logging`, and given as JSON."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from layerzero.ipc.errors import InvalidArgument

CATEGORIES = ("phase", "passes", "choice", "memory", "links", "fallback", "runs")
LEVELS = ("off", "summary", "detailed", "full")
"""Each has what those before it have. Which event is of which level: `_LEVEL_OF`."""
MAX_EVENTS = 1024  # the last ones are kept
_LEVEL_OF = {
    "phase": 1, "choice": 1, "fallback": 1,
    "passes": 2, "memory": 2, "links": 2,
    "runs": 3,
}  # fmt: skip
_LOGGED_AS = {"fallback": logging.WARNING, "phase": logging.INFO, "choice": logging.INFO}  # DEBUG for others


@dataclass(frozen=True)
class PlanEvent:
    """`time_s` is of time.time(); `plan` the arguments' label; `facts` plain values."""

    time_s: float
    category: str
    plan: str
    message: str
    facts: Mapping[str, Any]


class Diagnostics:
    """Of one planned function. `levels`: of each category."""

    def __init__(self, levels: Mapping[str, int]) -> None:
        self._levels = levels
        self._events: deque[PlanEvent] = deque(maxlen=MAX_EVENTS)
        self._lock = threading.Lock()
        self._loggers = {name: logging.getLogger(f"layerzero.plan.{name}") for name in CATEGORIES}

    @classmethod
    def of(cls, asked: Any) -> Diagnostics:
        """`asked`: a level for all categories, or a map of categories to levels; others are "summary". Raises
        InvalidArgument."""
        named = dict.fromkeys(CATEGORIES, asked) if isinstance(asked, str) else asked
        if not isinstance(named, Mapping):
            raise InvalidArgument(f"diagnostics is {asked!r}; allowed: {', '.join(LEVELS)}, or a map of categories")
        for name, level in named.items():
            if name not in CATEGORIES or level not in LEVELS:
                where = f"diagnostics has {name!r}: {level!r}" if named is asked else f"diagnostics is {asked!r}"
                raise InvalidArgument(
                    f"{where}; allowed: levels {', '.join(LEVELS)}, of categories {', '.join(CATEGORIES)}"
                )
        return cls({name: LEVELS.index(named.get(name, "summary")) for name in CATEGORIES})

    def is_on(self, category: str) -> bool:
        return self._levels[category] >= _LEVEL_OF[category]

    def tell(self, category: str, plan: str, message: str, **facts: Any) -> None:
        """Note that something has happened, if it is wanted."""
        if not self.is_on(category):
            return
        with self._lock:
            self._events.append(PlanEvent(time.time(), category, plan, message, facts))
        self._loggers[category].log(
            _LOGGED_AS.get(category, logging.DEBUG), "%s: %s", plan, message, extra={"plan": plan, "facts": facts}
        )

    def events(self, category: str | None = None) -> list[PlanEvent]:
        """Those that are kept, the oldest first. Raises InvalidArgument for a category that there is not."""
        if category is not None and category not in CATEGORIES:
            raise InvalidArgument(f"category is {category!r}; allowed: {', '.join(CATEGORIES)}")
        with self._lock:
            return [event for event in self._events if category in (None, event.category)]


def to_json(events: list[PlanEvent]) -> str:
    """One object a line, as logs are read."""
    return "\n".join(json.dumps(asdict(event), default=str, sort_keys=True) for event in events)
