"""The serving benchmark: `python -m piecewise_graph bench serving`, an engine under load in this process.

A file per stage, read in this order:

    options, settings  what the command line says (values); a setting is what an engine is asked for
    models             target, draft and speculator
    load               which requests arrive when
    drive              a loop of arrivals and steps, and when whose tokens came
    metrics            the field's columns, from those times
    turns              settings that take turns on one speculator, and the ratios between them
    trace              a Chrome trace of some steady steps
    report, plot       tables and a picture (table)
    command            puts it all together, and writes the results file (environment, errors)
"""
