"""One module for each family, found by the family's name.

The module has the name of the family (``Family.name``), and holds a ``Decoder`` or an ``Encoder`` whose name
is ``Family.camel``: ``mosaic_gpt.py`` holds ``MosaicGpt``.
"""
