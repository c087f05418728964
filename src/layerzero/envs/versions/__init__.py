"""Versions of a backend beside the one that its manifest names: onnxruntime@1.16.3 (docs/versions.md)."""
