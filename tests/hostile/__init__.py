"""Hostile sources: ``python -m tests.hostile`` makes many of them and converts each.

    guard.py     an audit hook that records everything that a run must not do
    source.py    a valid source of a few bytes, from the configs in corpus/
    mutate.py    damages a JSON value or bytes at random
    kinds/       one module per kind of input: named examples, and as many random ones as time allows
    case.py      runs one case through the command line and checks its effects
    worker.py    the process that runs cases, because an audit hook cannot be removed and a case may crash
    report.py    starts the workers and makes the table of results

A case is identified by its kind, its name or number, and a seed, which together reproduce it.
"""
