"""Injects faults at chosen points of a run, and checks what must be true afterwards.

    hook.py        counts a run's file-system events and acts at one of them
    launcher.py    starts runs of the command line as forks of a process that has imported everything
    trial.py       the kinds of runs; makes one run with one fault, and the checks after it
    campaign.py    many faults at many points, as rows of a table

``python -m tests.faults`` runs the campaign and prints the table.
"""
