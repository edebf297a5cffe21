"""Transfers the weights from the source into the repository.

transfer.py   transfers all files; can resume an unfinished run
files.py      copies one file, or links it to the source's
rewrite.py    rewrites one file as safetensors: from a .bin (pickles.py), or in another dtype
finite.py     finds NaN and infinities on the way
worker.py     does files in separate processes, so a damaged file cannot crash the run
journal.py    records which files are finished
"""
