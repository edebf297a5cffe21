"""The section of a model card that says how to serve the model with vLLM, or why vLLM cannot."""

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
REFUSED = "## Serve\n\nvLLM cannot serve this model: {why}.\n\n"
TRAINED = 2048
"""Tokens: the trained length of most ALiBi checkpoints, used if that of the model is not known."""
DYNAMIC_REACH = 4
"""A dynamic scaling has no longest length; the command gives this multiple of the trained length."""


def section(repository: ConvertedRepository, place: str) -> str:
    """The section on vLLM of an ALiBi model, Markdown.

    Args:
        repository: the converted model.
        place: folder or Hub id of the model.
    """
    if why := refusal(repository):
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
