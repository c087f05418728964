"""Calls of users' functions in environments of their own: values and frames, as they cross (docs/functions.md)."""
