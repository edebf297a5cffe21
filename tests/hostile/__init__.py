"""Sources that mean harm: ``python -m tests.hostile`` makes many and converts them.

    guard.py     what a run may do; an audit hook that records everything else
    source.py    a good source of a few bytes, from the configs in corpus/
    mutate.py    any JSON value or bytes, made worse
    kinds/       one module a kind of input: named examples, and as many random ones as there is time for
    case.py      one case through the command line, and what must hold after it
    worker.py    the process that runs cases, since an audit hook cannot be removed and a case may kill it
    report.py    workers, and the table of what was tried

A case is told by its kind, its name or number, and a seed; with them it is the same again.
"""
