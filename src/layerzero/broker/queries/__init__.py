"""Answers to `lz status`, `lz explain`, `lz doctor` and their like."""
