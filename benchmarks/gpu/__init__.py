"""What ``on_gpu.py`` runs: each part is a module with a function ``run(settings, document)``."""
