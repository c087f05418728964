"""What runs users' functions in a worker: their modules, their output, their answers (docs/functions.md)."""
