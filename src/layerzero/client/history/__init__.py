"""What a broker was seen to do, second by second, in a bounded file: docs/history.md."""
