"""The command line, `lz`."""
