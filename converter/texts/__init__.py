"""The user's texts as tokens.

tokenizer.py   the tokenizer, loaded without its repository's code
windows.py     windows of text files, of DNA sequences too
"""
