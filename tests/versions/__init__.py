"""Converted models on every release of transformers from 4.57.0: ``python -m tests.versions``.

environments.py  the versions, and an environment for each
models.py        tiny checkpoints: converts them once, with references in NumPy float64
save.py          sources as the newest and the oldest libraries save them
checks.py        what is checked of each model, and defects of transformers' own
worker.py        runs the checks in one environment
__main__.py      options, processes and the table of results
"""
