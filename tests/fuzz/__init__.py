"""Random programs, random sequences of calls, and every op of torch's `op_db`, each held against float64.

`python -m tests.fuzz --help` is the command; README.md beside says what a verdict means.
"""
