"""Messages of the control socket about pages of counters (ipc/shm/counter_page.py)."""

from __future__ import annotations

from typing import ClassVar

from layerzero.ipc.records import named_record
from layerzero.ipc.transport.message import Message


@named_record
class AddCounters(Message):
    """client -> broker, with its page of counters: once, if Welcome says `counts`. Answered by CountersAdded or
    Refused."""

    kind: ClassVar[str] = "add_counters"


@named_record
class CountersAdded(Message):
    """broker -> client: the page is read from now on."""

    kind: ClassVar[str] = "counters_added"
