"""Whole models of files, opened in a worker and kept there as objects (docs/models.md)."""
