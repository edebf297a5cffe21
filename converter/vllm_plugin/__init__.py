"""A plugin with which vLLM serves converted models, without code from the repository.

vLLM finds it by the entry point in pyproject.toml, and calls ``register`` in each of its processes:

    versions.py       the versions of vLLM that it is written for
    registration.py   tells vLLM about configs and models
    checks.py         how large the heads are in the cache, what is refused, and what to do about it
    model.py          a backbone with a head, and how its weights are loaded
    heads.py          embeddings, and classes of texts and of tokens
    attention.py      decoders: ALiBi through a kernel's slopes or folded channels; the projections around it
    layer.py          the layer of a decoder, and its MLP
    decoder.py        the backbone of a decoder, and the language model
    symmetric.py      encoders: attention of each text, or FlashAttention's own
    encoder.py        the backbone of an encoder, and the parts of its layers
    families/         the layers of each family
    templates/        the templates as a package: formulas and config classes are those of a repository

Nothing else in converter/ imports this package, and it imports vLLM only when vLLM calls it.
"""


def register() -> None:
    """Tells vLLM about the converted models; vLLM may call it more than once."""
    import vllm

    from converter.vllm_plugin.versions import is_supported, refuse_families

    # Other versions may lack what the other modules import.
    if not is_supported(vllm.__version__):
        refuse_families(vllm.__version__)
        return
    from converter.vllm_plugin.registration import register_families

    register_families()
