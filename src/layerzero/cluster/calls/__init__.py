"""Calls that another node of the cluster may serve: what that costs, when it is tried, and how it is told."""
