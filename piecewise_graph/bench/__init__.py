"""The serving benchmark: an engine under load, in this process. `cli/serving_command.py` is its command line.

In the order of a run:

    setting         what an engine is asked for, and how its values are read from text
    load            which requests arrive when
    drive           serves a load: arrivals, steps, times of tokens; settings take turns
    metrics         the field's columns from those times, and ratios between settings
    trace           a Chrome trace of some steady steps
    serving_report  tables, picture and results file
"""
