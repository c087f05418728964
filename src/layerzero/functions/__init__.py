"""Functions of the user's in environments of their own: `lz.env` and `lz.isolated` (docs/functions.md)."""
