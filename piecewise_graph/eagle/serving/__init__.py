"""Requests over rounds: the engine, its scheduler, and the planner of draft shapes."""
