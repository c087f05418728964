"""The database of measured times."""
