"""Faults at chosen points of a run, and what has to be true after each.

    hook.py        counts a run's file-system events and does something at one of them
    launcher.py    starts runs of the command line as forks of a process that has everything imported
    trial.py       the kinds of runs, one run with one fault, and what is checked after it
    campaign.py    many of them, as rows of a table

``python -m tests.faults`` runs the campaign and prints the table.
"""
