"""Measures what a scaling does to a model: perplexity and retrieval, by length.

evaluate.py    evaluate(): measures models under one or several scalings
trials.py      lists the scalings to try
subject.py     opens a checkpoint once and applies one scaling after another
exam.py        the prompts, collections and windows for one model, and its answers
runner.py      generates text and computes losses with a loaded model
embeddings.py  embeds texts with a loaded encoder, and ranks documents
pooling.py     how a repository makes one vector of a text
agreement.py   whether the neighbours of texts stay the same
hardware.py    device, dtype, batches
tasks/         the prompts, and which answers are right
perplexity.py  windows of a text, and the loss in them
masked.py      the masked tokens of these windows, and the loss of these
statistics.py  confidence intervals, and comparisons on the same items
results.py     the measurements as JSON, CSV and tables
settings.py    what results record about their run
tune.py        tune(): finds the scaling that serves a length best
search.py      its first half: chooses among candidates
candidates.py  the scalings that tune() tries
"""
