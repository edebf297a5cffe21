"""Transfers the weights from the source into the repository.

transfer.py   transfers all files, several at once; can resume an unfinished run
files.py      copies one file, or links it to the source's
rewrite.py    rewrites one file as safetensors: from a .bin (pickles.py), or in another dtype
worker.py     rewrites in a separate process, so a damaged file cannot crash the run
journal.py    records which files are finished
"""
