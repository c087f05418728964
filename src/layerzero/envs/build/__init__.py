"""Environments as they are planned, resolved, built and found again."""
