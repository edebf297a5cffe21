"""Pictures of what a scaling does, as PNG: of a model's heads, and of measured results.

    plotting.py   plot(): writes all pictures of a model or of results into a folder
    positions.py  the slopes or frequencies that the pictures of a model show
    per_head.py   slopes and attention span of every head, wavelengths of rotary pairs; the card's picture
    curves.py     scores and perplexity by length
    style.py      colours, axes, legends, and a figure's bytes

Drawing uses matplotlib's objects and not pyplot, so it opens no window and depends on no global figure and no
user setting: the same numbers give the same bytes.
"""
