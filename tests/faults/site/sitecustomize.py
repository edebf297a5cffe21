"""Found by the worker processes of a run through PYTHONPATH: they are watched too."""

from tests.faults import hook

hook.install_from_environment()
