"""Transfers the weights from the source into the repository.

transfer.py   transfers all files, several at once
files.py      copies one file, or links it to the source's
rewrite.py    rewrites one file as safetensors: from a .bin (pickles.py), or in another dtype
finite.py     finds NaN and infinities on the way
worker.py     rewrites a .bin file in a process of its own, so a damaged one cannot crash the run
"""
