"""What the core was told and what it did, as lines of JSON, and the same events again: docs/recording.md."""
