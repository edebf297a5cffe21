"""What is converted, exported, evaluated and pushed: a checkpoint, a source or what this tool wrote of one.

model.py      Model: what every checkpoint has
alibi.py      with ALiBi: its slopes are scaled by modeling code that is copied into the result
rotary.py     with rotary positions: they are scaled by config.json alone
open.py       from a folder or a Hub id to a Model
overrides.py  the user's values for keys of a source's config.json
card_text.py  what a result's card says of its scaling
"""
