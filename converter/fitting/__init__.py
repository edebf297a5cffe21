"""Fits slopes: learns the exponents of a ``fitted`` scaling by gradient descent, with all weights frozen.

trainable.py  exponents with gradients in a loaded model, the loss, and the memory that both take
samples.py    what is learned from: windows of text, or prompts with their answers
descent.py    the descent, and when it stops
"""
