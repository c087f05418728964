"""One file per kernel library. Each has `load() -> Loaded` and imports its library there and nowhere else."""
