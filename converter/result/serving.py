"""The section of a model card that says which servers run the model."""

from __future__ import annotations

import shlex

from converter.result.converted import ConvertedRepository
from converter.scaling.scaling import Dynamic

SERVE = """\
## Serve

With vLLM and the plugin of ntk-convert, which has this model:

```
pip install 'ntk-convert[vllm]'
{command} {length}
```

Leave out `--trust-remote-code`. Without the plugin, vLLM cannot serve this model.

"""
ENCODER = """\
## Serve

{embeds}* text-embeddings-inference refuses the weights of this model. Never set `model_type` in config.json
  to `bert` so that it takes them: it has a JinaBERT of its own, which reads no scaling, so the model would
  run **unscaled**.
* vLLM cannot serve this model: {why}.

"""
EMBEDS = """\
* infinity runs this model through sentence-transformers: `--engine torch --no-bettertransformer`.
* text-embeddings-inference runs its ONNX graph, on a CPU:
  `ntk-convert export DIR --onnx-standalone --onnx-dtype fp32 --pooled`.
"""
REFUSED = "## Serve\n\nvLLM cannot serve this model: {why}.\n\n"
TRAINED = 2048
"""Tokens: the trained length of most ALiBi checkpoints, used if that of the model is not known."""
DYNAMIC_REACH = 4
"""A dynamic scaling has no longest length; the command gives this multiple of the trained length."""


def section(repository: ConvertedRepository, place: str, *, embeds: bool) -> str:
    """The section of an ALiBi model, Markdown.

    Args:
        repository: the converted model.
        place: folder or Hub id of the model.
        embeds: whether it is an encoder that makes vectors of texts.
    """
    why = refusal(repository)
    if not repository.decoder:
        return ENCODER.format(embeds=EMBEDS if embeds else "", why=why)
    if why:
        return REFUSED.format(why=why)
    return SERVE.format(command=command(place), length=length(repository))


def command(place: str, revision: str | None = None) -> str:
    """The command that serves the model, but for its last word.

    Args:
        place: folder or Hub id.
        revision: branch of the Hub id, if it is not the default one.
    """
    words = [place, *(["--revision", revision] if revision else [])]
    return f"vllm serve {shlex.join(words)} --max-model-len"


def refusal(repository: ConvertedRepository) -> str | None:
    """Why vLLM cannot serve the model; None if it can."""
    if not repository.decoder:
        return "the plugin of ntk-convert has no encoders"
    if not repository.has_logits:
        [name] = repository.config["architectures"]
        return f"the plugin of ntk-convert has `{repository.family.language_model}`, not `{name}`"
    scaling = repository.scaling
    if isinstance(scaling, Dynamic) and scaling.dynamic == "length":
        return (
            "its scaling is length-dynamic, so every new token changes the keys of all tokens before it. "
            "Convert the source with `--dynamic position` instead"
        )
    return None


def length(repository: ConvertedRepository) -> int:
    """A useful length of the context, in tokens; the model itself has no limit."""
    scaling = repository.scaling
    factor = DYNAMIC_REACH if isinstance(scaling, Dynamic) else scaling.factor_at(0)
    return round((repository.train_length or TRAINED) * factor)
