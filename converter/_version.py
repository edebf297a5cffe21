"""The version, in a file of its own so that everything can record it without importing the package's face."""

__version__ = "0.1.0"
