"""Random schedules of requests on ranks: the same tokens everywhere, and never a wait without an end.

`python -m tests.rank_schedules --help` is the command; README.md beside says what a fault is.
"""
