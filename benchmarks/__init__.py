"""Scripts that train, measure and report; run them with `python -m benchmarks.NAME`."""
