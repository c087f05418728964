"""The folder of a LayerZero backend. The broker reads blis.toml and what it names, and imports nothing."""
