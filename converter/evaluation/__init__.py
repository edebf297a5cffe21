"""What a scaling does to a model: perplexity and retrieval, by length.

evaluate.py    evaluate(), from top to bottom
trials.py      which scalings are tried
subject.py     a checkpoint, opened once and scaled in one way after the other
exam.py        what one model is asked, and its answers
runner.py      text and losses out of a model
hardware.py    device, dtype, batches
tasks/         what is asked, and what counts as right
perplexity.py  windows of a text, and the loss in them
statistics.py  confidence intervals, and comparisons on the same items
results.py     what was measured: JSON, CSV, tables
settings.py    what results say of their run; files.py: results as files
tune.py        tune(): the scaling that serves a length best
search.py      its first half, the choice
candidates.py  what it tries
"""
