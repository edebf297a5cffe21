"""Weights from the source into the repository.

transfer.py   all files, several at once, going on where an unfinished run stopped
files.py      one file: copied, or sharing the source's bytes
rewrite.py    one file as safetensors: from a .bin (pickles.py), or in another dtype
worker.py     rewriting in a process of its own, which a damaged file may crash
journal.py    which files are finished
"""
