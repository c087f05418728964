"""The conflict matrix: which backends can share one environment and one process, and what happens when they must.

`engine.py` makes it; client/cli/matrix.py prints it.
"""
