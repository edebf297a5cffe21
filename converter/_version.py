"""The version, in a file of its own so that everything can record it without importing the package's face."""

__version__ = "0.2.0"
"""Changes with the templates, whose digest CHANGELOG.md lists; a test says which it is."""
TESTED = ("4.57.0", "5.24.0")
"""The oldest and the newest transformers on which ``make test-versions`` found every family right."""
