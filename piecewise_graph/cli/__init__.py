"""The command line, `python -m piecewise_graph`."""
