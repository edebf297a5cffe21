"""The layers of each family on vLLM's parallel layers, one module each, found by the family's name."""
