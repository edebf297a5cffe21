"""Pushing a converted repository to the Hub: what belongs to it, what the Hub holds, and one commit."""
