"""Execution plans: a function's calls recorded once, with their data flow, and run as one. docs/plans.md."""
