"""The model card (README.md) of a converted repository."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from converter._version import TESTED, __version__
from converter.config import Weights
from converter.families.family import TASKS
from converter.model.alibi import AlibiModel
from converter.model.model import Model
from converter.model.words import Words
from converter.source.hub import is_hub_id, is_repo_id
from converter.source.source import CARD, plain_text
from converter.source.tokenizer import Tokenizer

if TYPE_CHECKING:
    from converter.verification import Check

LARGEST_CARD, DEEPEST = 1 << 20, 50
"""A larger card (bytes), and front matter with more levels, is not read."""
FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
KEPT = (
    *("license", "license_name", "license_link", "language", "datasets", "metrics", "thumbnail"),
    *("pipeline_tag", "library_name", "base_model", "tags"),
)
"""Keys of a source's front matter that are kept: each a text or a list of texts."""
FALSE_TAGS = {
    # Files of other libraries, which are not copied.
    *("tf", "tensorflow", "jax", "flax", "keras", "tflite", "coreml", "onnx", "openvino", "gguf", "ggml"),
    *("mlx", "rust", "transformers.js"),
    # Servers that know the source's model type, logs of its training, and its results.
    *("text-generation-inference", "text-embeddings-inference", "endpoints_compatible"),
    *("tensorboard", "mteb", "model-index"),
    # Rotary models need no code; the tags of ALiBi models have it.
    "custom_code",
}
"""Tags of the source that do not hold for the converted model."""
LOCAL = re.compile(r"(?:^|[:\s])(?:file:|~?/[\w.]|\\\\\w|[A-Za-z]:[\\/]\w)")
"""Finds a path on the disk of the machine that wrote a card, which may be private."""
SENTENCES, SIMILARITY = "sentence-transformers", "sentence-similarity"
"""Names of the library and of its task on the Hub."""

BODY = """\
# {name}, {title}

This is [{source}]({link}) with its {scaled}.
{changed}.

| | |
|---|---|
| scaling | {scaling} |
| trained length | {train_length} |
{limit}| commit of the source | {commit} |
{picture}
## Load

{install}{load}

{notes}

{more}## How it was made

```
{command}
```

with ntk-convert {version}{tested}. Checked before it was written:

{checks}
"""
CODE_TESTED = " and transformers {2}. Its code was tested with transformers {0} to {1}"
USE = "## Use\n\n{code}\n\n"
LORA = """\
## Fine-tune

For LoRA, name the linear layers, because peft does not know this model type: `target_modules={names}`.
Save the fine-tuned model with `save_pretrained`, and run `ntk-convert DIR --out NEW` on its folder:
NEW keeps the scaling, is verified, and is ready for `ntk-convert push`.

"""
PICTURE = "scaling.png"
"""The picture that the card shows if it was drawn."""
SHOWN = "\n![{title}: stock beside scaled, head by head](" + PICTURE + ")\n"

TRUST = ", trust_remote_code=True"
FENCED = "```python\n{}\n```"
CLASSIFY = """\
from transformers import pipeline

classify = pipeline("{task}", model=model, tokenizer=tokenizer)
print(classify("A sentence."))"""
PAIR = '{"text": "A question?", "text_pair": "A text that answers it."}'
USES = {
    "text-generation": """\
inputs = tokenizer("Once upon a time", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=50)
print(tokenizer.decode(output[0], skip_special_tokens=True))""",
    "feature-extraction": """\
inputs = tokenizer("A sentence.", return_tensors="pt")
print(model(**inputs).last_hidden_state.shape)  # [texts, tokens, channels]""",
    "fill-mask": """\
from transformers import pipeline

fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
print(fill(f"Paris is the {tokenizer.mask_token} of France."))""",
    "text-classification": CLASSIFY,
    "token-classification": CLASSIFY,
}
"""Task -> code that follows the code that loads the model and its tokenizer."""
SENTENCE_ENCODER = "from sentence_transformers import SentenceTransformer"
EMBED = f"""\
{SENTENCE_ENCODER}

encoder = SentenceTransformer({{where}})
print(encoder.encode(["A sentence.", "Another one."]).shape)  # [texts, channels]"""
LOADED = re.compile(r"^model = \w+\.from_pretrained\((?P<place>(?P<quote>['\"]).*?(?P=quote))", re.MULTILINE)
"""The line of a card's code that names the model's place."""

SERVE = """\
## Serve

With vLLM and the plugin of ntk-convert, which has this model:

```
pip install .    # in a clone of ntk-convert, beside vLLM, which it leaves as it is
{command} {length}
```

Leave out `--trust-remote-code`. Without the plugin, vLLM cannot serve this model.

"""
ENCODER = """\
{vllm}
Other servers:

{embeds}* text-embeddings-inference refuses the weights of this model. Never set `model_type` in config.json
  to `bert` so that it takes them: it has a JinaBERT of its own, which reads no scaling, so the model would
  run **unscaled**.

"""
EMBEDS = """\
* infinity runs this model through sentence-transformers: `--engine torch --no-bettertransformer`.
* text-embeddings-inference runs its ONNX graph, on a CPU. In a copy of this repository, write it with
  `ntk-convert export . --onnx-standalone --onnx-dtype fp32 --pooled{pooling}`.
"""
REFUSED = "## Serve\n\nvLLM cannot serve this model: {why}.\n\n"
LENGTH_DYNAMIC = (
    "its scaling is length-dynamic, so every new token changes the keys of all tokens before it. Convert the "
    "source with `--dynamic position` instead"
)
TRAINED = 2048
"""Tokens: the trained length of most ALiBi checkpoints, used if that of the model is not known."""

SECTIONS = ("Load", "Use", "Serve", "Fine-tune", "How it was made")
"""Titles of the sections of ``BODY``."""
GRAPHS = "ONNX"
"""Title of the section that an export adds."""
ADDED = "Longer contexts"
"""Title of the section about the conversion in a card that somebody else wrote."""
OURS = re.compile(r"^with ntk-convert \S", re.MULTILINE)
"""Matches a line of every card that a conversion writes."""


@dataclass(frozen=True)
class Origin:
    """What a converted model was made from."""

    name: str
    base_model: str | None
    """Its Hub id; None if it is not known."""
    commit: str | None
    card: str = ""
    """Its model card, Markdown; empty if it has none."""


def read_origin(model: Model, base_model: str | None) -> Origin:
    """What a result is made from: the model, whose card, if any, was fetched, or what that was made from.

    ``base_model`` is what the user gave.
    """
    source, made = model.source, model.origin
    card = ""
    if CARD in source.files:
        with source.open(CARD) as file:
            content = file.read(LARGEST_CARD + 1)
        # The text of a converted repository's card is kept, and so are bytes that are not UTF-8.
        errors = "surrogateescape" if model.converted else "replace"
        card = content.decode(errors=errors) if len(content) <= LARGEST_CARD else ""
    root = made.source or source.root
    hub_id = (root if is_hub_id(root) else None) if model.converted else source.repo_id
    name = "/".join(filter(None, (root, made.subfolder)))
    return Origin(name, base_model or hub_id, made.commit, card)


def describe(
    repository: Model,
    *,
    origin: Origin,
    tokenizer: Tokenizer,
    sentence_encoder: bool | None,
    weights: Weights,
    rounded: bool,
    notes: Sequence[str],
    place: str,
    command: str,
    checks: Sequence[Check],
    picture: bool,
) -> str:
    """The card of a converted repository, Markdown; its examples load the model from ``place``."""
    import yaml

    scaling, words = repository.scaling, repository.words
    scaled = scaling.scaled
    limit = _input_limit(repository)
    embeds, pooling = sentence_encoder, ""
    if embeds is None:  # then sentence-transformers takes the mean of an encoder's hidden states
        bare = isinstance(repository, AlibiModel) and repository.head == "Model"
        embeds, pooling = bare and not repository.decoder, " --pooling mean"
    if weights == "original":
        kept = ["weights"] * (not rounded) + ["tokenizer"] * bool(tokenizer.here or tokenizer.elsewhere)
        same = ", ".join(kept).capitalize()
        differs = words.differs + ", and the weights' dtype" * rounded
        changed = (
            f"{f'{same} and tensor' if same else 'Tensor'} names are those of the source; only {differs}"
        )
    elif weights == "other":
        changed = "It was changed after that conversion, as by fine-tuning, so its weights are its own"
    else:
        changed = "It was saved and converted again, so its weights may be its own"
    one_label = len(repository.result_config.get("id2label") or ()) == 1
    use = _use(words, tokenizer, place, sentence_encoder=embeds, one_label=one_label)
    more = USE.format(code=use) if use else ""
    if isinstance(repository, AlibiModel):
        more += _serve(repository, place, EMBEDS.format(pooling=pooling) if embeds else "")
        more += LORA.format(names=json.dumps(repository.linear_layers))
    body = BODY.format(
        name=plain_text(origin.name),
        title=f"{scaling.method} {words.kind} scaling" if scaled else f"unscaled {words.kind}",
        source=plain_text(origin.name),
        link=f"https://huggingface.co/{origin.base_model}" if origin.base_model else "#how-it-was-made",
        scaled=words.scaled,
        changed=changed,
        scaling=scaling,
        train_length=f"{repository.trained.tokens} tokens" if repository.trained.tokens else "not known",
        limit="" if limit is None else f"| input limit | texts are cut after {limit} tokens |\n",
        commit=f"`{plain_text(origin.commit)}`" if origin.commit else "(local folder)",
        picture=SHOWN.format(title=words.kind) if picture else "",
        install=_install(tokenizer, sentences=bool(use and SENTENCE_ENCODER in use)) if words.code else "",
        load=_load(words, tokenizer, place),
        notes="\n\n".join([words.notes, *(f"{note[:1].upper()}{note[1:]}." for note in notes)]),
        more=more,
        command=command,
        version=__version__,
        tested=CODE_TESTED.format(*TESTED, version("transformers")) if words.code else "",
        checks="\n".join(f"- {check.name}: {'skipped, ' * check.skipped}{check.detail}" for check in checks)
        or "- nothing: `--no-verify` was given",
    )
    found = _metadata(origin, words, sentence_encoder, embeds=embeds, weights=weights)
    return f"---\n{yaml.safe_dump(found, sort_keys=False, allow_unicode=True)}---\n\n{body}"


def with_kept_text(fresh: str, card: str) -> str:
    """The card of a repository that is converted again, from what ``describe`` says and the older card.

    One that a conversion wrote is replaced, but keeps the sections that somebody added. Any other card
    keeps its text and gets the new one as a section. Sections about graphs, which are not copied, go.
    """
    card = without_section(card, GRAPHS)
    header, body = _split(card)
    new_header, new_body = _split(fresh)
    if not body.strip():
        return fresh
    if OURS.search(body) and f"\n## {ADDED}\n" not in body:
        for title, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", body, re.DOTALL | re.MULTILINE):
            fresh = fresh if title in SECTIONS else with_section(fresh, title, f"{text.strip()}\n")
        return fresh
    _, _, text = new_body.strip().partition("\n")  # without the title
    section = re.sub("^##", "###", text.strip(), flags=re.MULTILINE)
    # Front matter that cannot be read stays as it is.
    kept = header if header and not _front_matter(card) else new_header
    return kept + with_section(body, ADDED, f"{section}\n")


def with_section(card: str, title: str, text: str) -> str:
    """A card with one more section at its end, which replaces an older one of the same title."""
    rest = without_section(card, title).rstrip("\n")
    return f"{rest}\n\n## {title}\n\n{text}"


def without_section(card: str, title: str) -> str:
    return re.sub(rf"\n## {re.escape(title)}\n.*?(?=\n## |\Z)", "", card, flags=re.DOTALL)


def with_place(card: str, place: str, revision: str | None = None) -> str:
    """A conversion's card whose examples load the model from another folder or Hub id, or its branch."""
    found = LOADED.search(card) if OURS.search(card) else None
    if found is None:
        return card
    arguments = _literal(place) + (f", revision={_literal(revision)}" if revision else "")
    older = rf"\({re.escape(found['place'])}(?=[,)])"
    card = re.sub(older, lambda _: f"({arguments}", card)
    served = _serve_command(ast.literal_eval(found["place"]))
    return card.replace(f"\n{served} ", f"\n{_serve_command(place, revision)} ")


def by_hand(card: bytes) -> bool:
    """Whether a card has text, and none that a conversion wrote."""
    text = card.decode(errors="replace")
    return not OURS.search(text) and bool(_split(text)[1].strip())


def _front_matter(card: str) -> dict[str, Any]:
    """The front matter of a card; empty if it cannot be read, or could take a time or space without limit."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # results can be long, and Python takes seconds
    found, depth = FRONT_MATTER.match(card), 0
    try:
        matter = "" if found is None else found[1]
        for event in yaml.parse(matter, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST or isinstance(event, yaml.AliasEvent):
                return {}
        values = yaml.load(matter, loader)
    except Exception:  # PyYAML also raises errors that are not its own
        return {}
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def _metadata(
    origin: Origin, words: Words, sentence_encoder: bool | None, *, embeds: bool, weights: Weights
) -> dict[str, Any]:
    """The front matter: what still holds of the older card's, and what is known of this model."""
    found, own = _front_matter(origin.card), weights != "original"
    known = {key: _texts(found.get(key)) for key in KEPT}
    # The card of a model with other weights is its own, and may name a closer parent than the source.
    parents = [origin.base_model, _hub_ids(known["base_model"])]
    parent = next(filter(None, reversed(parents) if own else parents), None)
    of_sentences = sentence_encoder or (embeds and known["library_name"] == SENTENCES)
    tag = known["pipeline_tag"]
    # It may have another head now.
    if tag is None or (own and tag in (SIMILARITY, *TASKS.values())):
        tag = SIMILARITY if of_sentences else words.task
    tags = known["tags"] or []
    tags = [tags] if isinstance(tags, str) else tags
    # The Hub makes some tags from ``base_model``, and peft writes them for an adapter.
    kept = [tag for tag in tags if tag.lower() not in FALSE_TAGS and not tag.startswith("base_model:")]
    made = {
        "pipeline_tag": tag,
        "base_model": parent,
        "base_model_relation": "finetune" if weights == "other" and parent else None,
        "library_name": SENTENCES if of_sentences else "transformers",
        "tags": list(dict.fromkeys([*kept, *words.tags])),
    }
    if own:
        local = [key for key, value in found.items() if isinstance(value, str) and LOCAL.search(value)]
        stated = {key: value for key, value in found.items() if key not in local}
        known = {**stated, **known, "model_type": None, "new_version": None}
    others = {key: value for key, value in known.items() if key not in made}
    return {key: value for key, value in {**others, **made}.items() if value is not None}


def _texts(value: object) -> str | list[str] | None:
    """A text or a list of texts, without local paths, else None. YAML reads "no" (Norwegian) as False."""
    listed = ["no" if entry is False else entry for entry in (value if isinstance(value, list) else [value])]
    texts = [entry for entry in listed if isinstance(entry, str) and entry]
    if len(texts) < len(listed):
        return None
    texts = [text for text in texts if not LOCAL.search(text)]
    if not texts:
        return None
    return texts if isinstance(value, list) else texts[0]


def _split(card: str) -> tuple[str, str]:
    """The front matter of a card, with the lines that enclose it, and the text after it."""
    found = FRONT_MATTER.match(card)
    end = 0 if found is None else found.end()
    return card[:end], card[end:]


def _hub_ids(names: str | list[str] | None) -> str | list[str] | None:
    """Hub ids as a card gives them; None if there are none, or names of folders among them."""
    listed = [names] if isinstance(names, str) else names or []
    return names if listed and all(map(is_repo_id, listed)) else None


def _install(tokenizer: Tokenizer, *, sentences: bool) -> str:
    """The command that installs what the card's code needs, beside torch."""
    packages = f"'transformers>={'.'.join(TESTED[0].split('.')[:2])}'"
    packages += " sentencepiece" * bool(tokenizer.ours) + " sentence-transformers" * sentences
    return f"```\npip install torch {packages}\n```\n\n"


def _load(words: Words, tokenizer: Tokenizer, place: str) -> str:
    """Code that loads the model and, if there is one, its tokenizer."""
    where = _where(words, place)
    has_tokenizer = tokenizer.here or tokenizer.elsewhere
    lines = [f"from transformers import {words.auto_class}{', AutoTokenizer' if has_tokenizer else ''}", ""]
    if has_tokenizer:
        elsewhere = f"{_literal(tokenizer.elsewhere)}{TRUST}" if tokenizer.elsewhere else where
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({elsewhere})")
    lines.append(f"model = {words.auto_class}.from_pretrained({where})")
    return FENCED.format("\n".join(lines))


def _use(
    words: Words, tokenizer: Tokenizer, place: str, *, sentence_encoder: bool, one_label: bool
) -> str | None:
    """Code that uses the model once, after ``_load``; None for a task or a tokenizer that it cannot show.

    A classifier with ``one_label`` is a reranker, which scores a pair of texts.
    """
    if sentence_encoder and tokenizer.here:
        return FENCED.format(EMBED.format(where=_where(words, place)))
    if words.task not in USES or not (tokenizer.here or tokenizer.elsewhere):
        return None
    code = USES[words.task].replace("{task}", words.task)
    return FENCED.format(code.replace('"A sentence."', PAIR) if one_label else code)


def _literal(text: str) -> str:
    """A text as it is written in Python, with double quotes where that needs no escapes."""
    return f'"{text}"' if text.isprintable() and not {'"', "\\"} & set(text) else repr(text)


def _where(words: Words, place: str) -> str:
    return _literal(place) + (TRUST if words.code else "")


def _input_limit(repository: Model) -> int | None:
    """The tokens after which programs cut a text of a scaled encoder."""
    return None if repository.decoder else repository.input_limit(repository.scaling)


def _serve(repository: Model, place: str, embeds: str) -> str:
    """The section about servers of an ALiBi model; ``embeds``: how to serve an encoder's vectors of texts."""
    vllm = _serve_with_vllm(repository, place)
    if repository.decoder:
        return vllm
    return ENCODER.format(vllm=vllm.rstrip("\n") + "\n", embeds=embeds)


def _serve_with_vllm(repository: Model, place: str) -> str:
    [name] = repository.result_config["architectures"]
    if name.endswith("ForQuestionAnswering"):
        return REFUSED.format(why=f"the plugin of ntk-convert has no `{name}`")
    scaling = repository.scaling
    if repository.decoder and scaling.dynamic == "length":
        return REFUSED.format(why=LENGTH_DYNAMIC)
    length = _input_limit(repository) or round((repository.trained.tokens or TRAINED) * scaling.reach)
    return SERVE.format(command=_serve_command(place), length=length)


def _serve_command(place: str, revision: str | None = None) -> str:
    """The command that serves the model, but for its last word."""
    words = [place, *(["--revision", revision] if revision else [])]
    return f"vllm serve {shlex.join(words)} --max-model-len"
