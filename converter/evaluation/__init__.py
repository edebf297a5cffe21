"""Measures what a scaling does to a model: perplexity and retrieval, by length.

evaluate.py    evaluate(): measures models under one or several scalings
trials.py      lists the scalings to try
subject.py     opens a checkpoint once and applies one scaling after another
exam.py        the prompts and windows for one model, and its answers
runner.py      generates text and computes losses with a loaded model
hardware.py    device, dtype, batches
tasks/         the prompts, and which answers are right
perplexity.py  windows of a text, and the loss in them
statistics.py  confidence intervals, and comparisons on the same items
results.py     the measurements as JSON, CSV and tables
settings.py    what results record about their run
tune.py        tune(): finds the scaling that serves a length best
search.py      its first half: chooses among candidates
candidates.py  the scalings that tune() tries
"""
