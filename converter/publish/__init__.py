"""A converted repository to the Hub.

push.py         push(), from top to bottom
destination.py  a push as a conversion's last step
contents.py     what belongs to the repository, and whether it is right
target.py       the Hub's side: what is there, and a new commit
messages.py     what is said when the Hub does not take it
"""
