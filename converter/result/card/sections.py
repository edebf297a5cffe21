"""The card of a result, section by section."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import version

from converter._version import TESTED, __version__
from converter.model.alibi import AlibiModel
from converter.result.card.examples import install_command, load_code, serve_command, use_code
from converter.result.card.facts import Facts
from converter.result.card.metadata import describe_metadata, write_front_matter
from converter.source.source import plain_text

PICTURE = "scaling.png"
"""The picture that the card shows if it was drawn."""
SIGNATURE = "with ntk-convert"
"""Begins a line of every card that any version has written. update.py knows cards by it: do not change it."""
SERVE_WITH_VLLM = """\
With vLLM and the plugin of ntk-convert, which has this model:

```
pip install .    # in a clone of ntk-convert, beside vLLM, which it leaves as it is
{command} {length}
```

Leave out `--trust-remote-code`. Without the plugin, vLLM cannot serve this model."""
LENGTH_DYNAMIC = (
    "its scaling is length-dynamic, so every new token changes the keys of all tokens before it. Convert the "
    "source with `--dynamic position` instead"
)
DEFAULT_TRAINED_LENGTH = 2048
"""Tokens: the trained length of most ALiBi checkpoints, used if that of the model is not known."""
SERVE_EMBEDDINGS = """\
* infinity runs this model through sentence-transformers: `--engine torch --no-bettertransformer`.
* text-embeddings-inference runs its ONNX graph, on a CPU. In a copy of this repository, write it with
  `ntk-convert export . --onnx-standalone --onnx-dtype fp32 --pooled{pooling}`."""
NO_TEXT_EMBEDDINGS_INFERENCE = """\
* text-embeddings-inference refuses the weights of this model. Never set `model_type` in config.json
  to `bert` so that it takes them: it has a JinaBERT of its own, which reads no scaling, so the model would
  run **unscaled**."""
FINE_TUNE = """\
For LoRA, name the linear layers, because peft does not know this model type: `target_modules={names}`.
Save the fine-tuned model with `save_pretrained`, and run `ntk-convert DIR --out NEW` on its folder:
NEW keeps the scaling, is verified, and is ready for `ntk-convert push`."""


def describe(facts: Facts) -> str:
    """The card of a result, Markdown with front matter."""
    blocks = [_introduction(facts)]
    for title, write in SECTIONS.items():
        text = write(facts)
        if text is not None:
            blocks.append(f"## {title}\n\n{text}")
    body = "\n\n".join(blocks)
    return f"{write_front_matter(describe_metadata(facts))}\n{body}\n"


def _introduction(facts: Facts) -> str:
    origin, text, scaling = facts.origin, facts.card_text, facts.result.scaling
    name = plain_text(origin.name)
    if scaling.scaled:
        title = f"{scaling.method} {text.position_kind} scaling"
    else:
        title = f"unscaled {text.position_kind}"
    link = "#how-it-was-made"
    if origin.base_model:
        link = f"https://huggingface.co/{origin.base_model}"
    blocks = [
        f"# {name}, {title}",
        f"This is [{name}]({link}) with its {text.scaled_positions}.\n{_what_was_changed(facts)}",
    ]
    if text.explanation:
        blocks.append(text.explanation)
    blocks.append(_table(facts))
    if facts.picture:
        blocks.append(f"![{text.position_kind}: stock beside scaled, head by head]({PICTURE})")
    return "\n\n".join(blocks)


def _what_was_changed(facts: Facts) -> str:
    if facts.weights == "other":
        return "It was changed after that conversion, as by fine-tuning, so its weights are its own."
    if facts.weights == "unknown":
        return "It was saved and converted again, so its weights may be its own."
    differences = facts.card_text.differences
    same = []
    if facts.rounded:
        differences += ", and the weights' dtype"
    else:
        same.append("weights")
    if facts.has_tokenizer:
        same.append("tokenizer")
    names = f"{', '.join(same)} and tensor names" if same else "tensor names"
    return f"{names.capitalize()} are those of the source; only {differences}."


def _table(facts: Facts) -> str:
    trained, commit = facts.result.trained.tokens, facts.origin.commit
    rows = {
        "scaling": str(facts.result.scaling),
        "trained length": f"{trained} tokens" if trained else "not known",
    }
    if facts.input_limit is not None:
        rows["input limit"] = f"texts are cut after {facts.input_limit} tokens"
    rows["commit of the source"] = f"`{plain_text(commit)}`" if commit else "(local folder)"
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _load(facts: Facts) -> str:
    blocks = [load_code(facts), facts.card_text.loading_notes]
    if facts.card_text.has_code:
        blocks.insert(0, install_command(facts))
    blocks += [f"{note[:1].upper()}{note[1:]}." for note in facts.notes]
    return "\n\n".join(blocks)


def _serve(facts: Facts) -> str | None:
    """How servers run an ALiBi model; they run rotary models like any other."""
    if not isinstance(facts.result, AlibiModel):
        return None
    with_vllm = _serve_with_vllm(facts)
    if facts.result.decoder:
        return with_vllm
    others = [NO_TEXT_EMBEDDINGS_INFERENCE]
    if facts.makes_embeddings:
        pooling = " --pooling mean" if facts.sentence_encoder is None else ""
        others.insert(0, SERVE_EMBEDDINGS.format(pooling=pooling))
    return "\n\n".join([with_vllm, "Other servers:", "\n".join(others)])


def _serve_with_vllm(facts: Facts) -> str:
    result, scaling = facts.result, facts.result.scaling
    [architecture] = result.result_config["architectures"]
    if architecture.endswith("ForQuestionAnswering"):
        return f"vLLM cannot serve this model: the plugin of ntk-convert has no `{architecture}`."
    if result.decoder and scaling.dynamic == "length":
        return f"vLLM cannot serve this model: {LENGTH_DYNAMIC}."
    trained = result.trained.tokens or DEFAULT_TRAINED_LENGTH
    length = facts.input_limit or round(trained * scaling.reach)
    return SERVE_WITH_VLLM.format(command=serve_command(facts.place), length=length)


def _fine_tune(facts: Facts) -> str | None:
    """What peft has to be told of an ALiBi model."""
    if not isinstance(facts.result, AlibiModel):
        return None
    return FINE_TUNE.format(names=json.dumps(facts.result.linear_layers))


def _how_it_was_made(facts: Facts) -> str:
    made_with = f"{SIGNATURE} {__version__}"
    if facts.card_text.has_code:
        oldest, newest = TESTED
        made_with += (
            f" and transformers {version('transformers')}. "
            f"Its code was tested with transformers {oldest} to {newest}"
        )
    checks = [
        f"- {check.name}: {'skipped, ' if check.skipped else ''}{check.detail}" for check in facts.checks
    ]
    if not checks:
        checks = ["- nothing: `--no-verify` was given"]
    return "\n\n".join(
        [
            f"```\n{facts.command}\n```",
            f"{made_with}. Checked before it was written:",
            "\n".join(checks),
        ]
    )


SECTIONS: Mapping[str, Callable[[Facts], str | None]] = {
    "Load": _load,
    "Use": use_code,
    "Serve": _serve,
    "Fine-tune": _fine_tune,
    "How it was made": _how_it_was_made,
}
"""Title -> what writes the section's text; None for a model that does not need the section."""
