"""Rotary checkpoints: the method's sibling, a change of ``config.json`` alone.

    models.py       which model types, what their configs leave out, and what is refused by name
    frequencies.py  the formulas
    settings.py     base, dimension and length of a config, in every spelling; the scaled config

transformers computes rotary frequencies from the config for the types of ``models.py``, so a converted
checkpoint needs no code: it keeps its model_type and loads as its source does.
"""
