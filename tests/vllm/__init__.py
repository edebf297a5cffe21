"""The vLLM plugin, in engines of vLLM on the CPU; ``make test-vllm`` runs these tests."""
