"""The version of this package, for handshakes and reports."""

__version__ = "0.1.0"
