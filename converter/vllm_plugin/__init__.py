"""A plugin with which vLLM serves converted decoders, without code from the repository.

vLLM finds it by the entry point in pyproject.toml, and calls ``register`` in each of its processes:

    versions.py       the versions of vLLM that it is written for
    registration.py   tells vLLM about configs and models
    checks.py         how large the heads are in the cache, what is refused, and what to do about it
    attention.py      ALiBi through a kernel's slopes or through folded channels; the projections around it
    layer.py          the layer and its MLP
    decoder.py        the backbone and the language model
    families/         the layers of each family
    templates/        the templates as a package: formulas and config classes are those of a repository

Nothing else in converter/ imports this package, and it imports vLLM only when vLLM calls it.
"""


def register() -> None:
    """Tells vLLM about the converted decoders; vLLM may call it more than once."""
    import vllm

    from converter.vllm_plugin.versions import is_supported, refuse_families

    # Other versions may lack what the other modules import.
    if not is_supported(vllm.__version__):
        refuse_families(vllm.__version__)
        return
    from converter.vllm_plugin.registration import register_families

    register_families()
