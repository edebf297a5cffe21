"""Pushing a converted repository to the Hub.

push.py      push(), from top to bottom, and the checks before a conversion
contents.py  what belongs to the repository, and whether it is right
hub.py       the Hub's side: what is there, one commit, and what is said when the Hub refuses
"""
