"""The model card (README.md) of a converted repository: its description, and what its owner wrote.

older.py     the card of what was converted, and what it lacks
facts.py     what a conversion knows of its result, and what it was made from
sections.py  describe: the card of a result, section by section
examples.py  the code and the commands in these sections
metadata.py  the front matter: how an older card's is read, and what of it is kept
update.py    changes to a card that exists, which keep its owner's text
"""
