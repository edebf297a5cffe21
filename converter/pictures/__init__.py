"""Pictures of what a scaling does, as PNG or SVG: of a model's heads, and of what was measured.

    plotting.py  plot(): all pictures of a model or of results, into a folder
    model.py     what the pictures of a model are drawn from
    per_head.py  slopes and attention span of every head; wavelengths of rotary pairs
    bias.py      the bias between queries and keys
    curves.py    scores and perplexity by length
    card.py      the picture in a converted repository's card
    style.py     colours, axes, legends, and a figure's bytes

Drawing takes matplotlib's objects and no pyplot, so that no window, no global figure and no setting of
the user's has a part in it: the same numbers give the same bytes.
"""
