"""Environments exported, imported and collected."""
