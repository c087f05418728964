"""Files that run inside the environment under test, by path: nothing else of ours is imported there."""

from pathlib import Path

CALLER = Path(__file__).resolve().with_name("lz_call.py")
