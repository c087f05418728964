"""The commands of `lz env`."""
