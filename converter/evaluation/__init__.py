"""Measures what a scaling does to a model: perplexity and retrieval, by length.

evaluate.py    evaluate(): measures models under one or several scalings
tune.py        tune(): an evaluation of fixed candidates; half of it chooses, the other half judges
fit.py         fit(): learns slopes from text and prompts; held_out.py keeps a part of these to judge them
descent.py     the descent of a fit, with all weights frozen, and when it stops
samples.py     batches of windows or of prompts with their answers
trainable.py   exponents with gradients in a loaded model, the loss, and the memory that both take
scalings.py    the scalings to measure
subject.py     opens a checkpoint once and applies one scaling after another
server.py      a model on an OpenAI-compatible server, and whether that scales
exam.py        the prompts, collections and windows for one model, and its answers
losses.py      windows of a text, their masked tokens, and the loss in them
runner.py      device, dtype and batches; generates text and computes losses with a loaded model
embeddings.py  embeds texts with a loaded encoder, and ranks documents
tasks/         the prompts, and which answers are right
statistics.py  confidence intervals, comparisons on the same items, and what they show
results.py     the measurements as JSON and tables
"""
