"""Pushing a converted repository to the Hub.

push.py      push(), from top to bottom, and the checks before a conversion
options.py   where to, and how
contents.py  what belongs to the repository, and whether it is right
target.py    the Hub's side: what is there, and a new commit
messages.py  what is said when the Hub refuses
"""
