"""Rotary checkpoints, which are scaled through ``config.json`` alone.

    models.py    the supported model types, the defaults of their configs, and the rejected types
    settings.py  reads base, dimension and length from a config in every spelling; makes the scaled config

For the types in ``models.py``, transformers computes rotary frequencies from the config. A converted
checkpoint therefore needs no code: it keeps its model_type and loads as its source does. The formulas are
in ``converter.scaling.frequencies``.
"""
