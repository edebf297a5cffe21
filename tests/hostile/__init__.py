"""Hostile sources: ``python -m tests.hostile`` makes many of them and converts each.

    sources.py   a valid source of a few bytes; for each kind of input, examples by hand and random changes
    pickles.py   the examples of pickles
    guard.py     an audit hook that records everything that a run must not do
    worker.py    the process that runs cases, because an audit hook cannot be removed and a case may crash
    outcomes.py  starts these processes and reads their results

A case is a kind and a number. Numbers below that of the examples are the examples; each higher one is the
seed of a random case.
"""
