"""One thread at a time: transformers, and settings of the whole process, cannot be shared by two."""

import threading

ALONE = threading.RLock()
"""Held by the thread that imports a repository's code, loads a model or a tokenizer, or runs the checks."""
