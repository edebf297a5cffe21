"""Measures what a scaling does to a model: perplexity and retrieval, by length.

evaluate.py         evaluate(): measures models under one or several scalings
tune.py             tune(): scores fixed candidates; the validation half chooses, the test half judges
fit.py              fit(): learns slopes from text and prompts
scalings.py         the scalings to measure
benchmark.py        the prompts, collections and windows of a model, and its scores in them under a scaling
comparison.py       scores by scaling, task and length; compares those of a candidate with the baseline's
split.py            the parts of a benchmark: validation and test for tune; train, validation, test for fit
optimizer.py        fits the numbers, with all weights frozen, and stops by the validation part
paired_test.py      tests fitted slopes on the test part
evaluated_model.py  opens a checkpoint once and applies one scaling after another
server.py           a model on an OpenAI-compatible server, and whether that scales
tasks/              the prompts, and which answers are right
embeddings.py       embeds texts with a loaded encoder, and ranks documents
losses.py           pieces of windows, their masked tokens, and the loss in them
runner.py           device and dtype; generates text and computes losses with a loaded model, in batches
trainable.py        exponents with gradients in a loaded model, the loss, and the memory that both take
batches.py          batches of token rows, and what is predicted in them
statistics.py       confidence intervals, paired tests, and the power of a test
results.py          the measurements as JSON and tables
"""
