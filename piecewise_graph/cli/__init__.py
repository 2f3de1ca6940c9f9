"""The command line, `python -m piecewise_graph`: a file per command, their options (`arguments`), the models
that they load (`loading`).
"""
