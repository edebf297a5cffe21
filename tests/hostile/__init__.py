"""Hostile sources: ``python -m tests.hostile`` makes many of them and converts each.

A case is a kind (``sources.KINDS``) and a number. Numbers below that of the examples are the examples; each
higher one is the seed of a random case.
"""
