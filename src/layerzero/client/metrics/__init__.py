"""The exporter: metrics of a broker by HTTP, from a process of its own (docs/metrics.md)."""
