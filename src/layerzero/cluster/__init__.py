"""Nodes of a Ray cluster, each with a broker of its own (docs/cluster.md). Importing this does not import Ray."""
