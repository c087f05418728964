"""`lz bench chaos`: load under random faults, its history, and the checker of that history (docs/reliability.md).

`run.py` starts clients (`load.py`, real processes), strikes by the schedule of a seed (`schedule.py`, `faults.py`) and
writes all of it down (`history.py`); `checker.py` knows nothing of the run but what was written.
"""
