"""What is built on calls: tune, solve, warm up, compile, dry run, readiness."""
