"""A run's worker processes import this through PYTHONPATH, so the hook watches them too."""

from tests.faults import hook

hook.install_from_environment()
