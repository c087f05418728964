"""Which call's result lies at an address, against a map of single bytes."""

from __future__ import annotations

import random

from layerzero.client.traces.flow import MemoryMap


def test_the_newest_of_what_was_written_lies_there() -> None:
    """Ranges that overlap in every way, and memory that is given to something else."""
    rng = random.Random(0)
    for _ in range(50):
        found, plain = MemoryMap(), dict[int, int]()
        for call in range(40):
            start, nbytes = rng.randrange(100), rng.randrange(30)
            if rng.random() < 0.3:
                found.forget(start, nbytes)
                for at in range(start, start + nbytes):
                    plain.pop(at, None)
            else:
                found.write(start, nbytes, call, "out")
                plain.update(dict.fromkeys(range(start, start + nbytes), call))
            for at in range(-1, 131):
                one = found.find(at)
                assert (None if one is None else one.call) == plain.get(at)
