"""Where graphs run on CUDA."""
