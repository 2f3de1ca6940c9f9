"""Processes that run one model together, each with a part of its weights (tensor parallel).

`collectives` has the ops by which they exchange tensors inside of a forward, `exchange` how they decide
together what each of them would otherwise decide by itself, `decisions` what one decides at every step.
"""
