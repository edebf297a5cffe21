"""The user's texts as tokens.

fasta.py       DNA sequences as text
tokenizer.py   the tokenizer, loaded without its repository's code
windows.py     windows of text files
"""
