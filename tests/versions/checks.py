"""What is checked of each model, on any version of transformers; it imports nothing else of the tests."""

from __future__ import annotations

import copy
import functools
import importlib
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

LENGTH, NEW = 24, 6
"""Tokens that are given, and that are generated."""
START, END, PAD = 1, 2, 3
CLASSES = {
    "decoder": "AutoModelForCausalLM",
    "encoder": "AutoModelForMaskedLM",
    "embedding": "AutoModel",
    "classifier": "AutoModelForSequenceClassification",
}


class Wrong(Exception):
    """A result that is not what it should be."""


def close(found: Any, right: Any, what: str = "logits", most: float = 1e-4) -> None:
    found, right = (torch.as_tensor(each).detach().double() for each in (found, right))
    if found.shape != right.shape:
        raise Wrong(f"{what}: shape {tuple(found.shape)} in place of {tuple(right.shape)}")
    error = float((found - right).abs().max() / right.abs().max())
    if not error < most:
        raise Wrong(f"{what}: wrong by {error:.0e} of the largest")


def same(found: Any, right: Any, what: str = "tokens") -> None:
    found, right = (each.tolist() if hasattr(each, "tolist") else each for each in (found, right))
    if found != right:
        raise Wrong(f"{what}: {found} in place of {right}")


class Case:
    """A converted model, and what is right for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with np.load(folder.with_suffix(".npz")) as stored:
            self.right: dict[str, Any] = dict(stored)
        self.kind = str(self.right["kind"])

    def __getattr__(self, name: str) -> Any:
        """What is stored, as a tensor."""
        return torch.from_numpy(self.right[name])

    @functools.cached_property
    def model(self) -> Any:
        return self.load()[0]

    @property
    def batch(self) -> dict[str, Any]:
        return {"input_ids": self.ids, "attention_mask": self.mask}

    def load(self, auto: str | None = None, place: object = None, **options: Any) -> tuple[Any, Any]:
        """A model, and which of its tensors the checkpoint lacks or has too many of."""
        model, info = getattr(transformers, auto or CLASSES[self.kind]).from_pretrained(
            place or self.folder,
            trust_remote_code=True,
            output_loading_info=True,
            **{"dtype": torch.float32, **options},
        )
        if getattr(model, "generation_config", None):
            model.generation_config.eos_token_id = None
        return model.eval(), {kind: names for kind, names in info.items() if names}

    def tokenizer(self, place: object = None) -> Any:
        return transformers.AutoTokenizer.from_pretrained(place or self.folder, trust_remote_code=True)

    def real(self, values: Any) -> Any:
        """Those of real tokens."""
        return values if self.kind == "classifier" else values[self.mask.bool()]

    @torch.no_grad()
    def computes(self, model: Any, most: float = 1e-4, **options: Any) -> Any:
        """Whether a model's output is right for padded rows; returns it."""
        output = model(**self.batch, **options)
        close(self.real(output[0]), self.real(self.padded), most=most)
        return output

    def generate(self, **options: Any) -> Any:
        """The whole rows, generated without sampling and without an end."""
        settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, "use_cache": True}
        return self.model.generate(**{**self.batch, **settings, **options})


def cache_of(output: Any) -> dict[str, Any]:
    """A cache under its name, which transformers 5.24 changed."""
    name = "cache" if output.get("cache") is not None else "past_key_values"
    return {name: output[name]}


# Loading


def load(case: Case) -> None:
    config = transformers.AutoConfig.from_pretrained(case.folder, trust_remote_code=True)
    same(config.alibi_scaling["dynamic"], "position", "alibi_scaling")
    model, info = case.load()
    if info:
        raise Wrong(f"loading: {info}")
    if meta := [name for name, value in model.named_parameters() if value.is_meta]:
        raise Wrong(f"no values: {', '.join(meta)}")
    if case.kind in ("decoder", "encoder") and not model.get_output_embeddings().weight.abs().sum() > 0:
        raise Wrong("the head has no values")


def hub(case: Case) -> None:
    """From the Hub that HF_ENDPOINT names."""
    case.computes(case.load(place=f"tests/{case.folder.name}")[0])


def save(case: Case) -> None:
    """With its tokenizer and its code."""
    with tempfile.TemporaryDirectory() as temporary:
        saved = Path(temporary) / "saved"
        case.model.save_pretrained(saved)
        case.tokenizer().save_pretrained(saved)
        if lost := {file.name for file in case.folder.glob("*.py")} - {
            file.name for file in saved.glob("*.py")
        }:
            raise Wrong(f"code that was not saved: {sorted(lost)}")
        model, info = case.load(place=saved)
        if info:
            raise Wrong(f"loading what was saved: {info}")
        case.computes(model)


def tokens(case: Case) -> None:
    """Also after it was saved."""
    tokenizer = case.tokenizer()
    with tempfile.TemporaryDirectory() as saved:
        tokenizer.save_pretrained(saved)
        for each in (tokenizer, case.tokenizer(saved)):
            for number, text in enumerate(case.right["texts"].tolist()):
                same(each(text)["input_ids"], case.right[f"ids{number}"], f"ids of {text!r}")


def saved_tokenizer(case: Case) -> None:
    """Of sources that the newest and the oldest libraries saved: ids, special ids and keys."""
    for library in ("converted", "saved"):
        tokenizer = case.tokenizer(case.folder.parent.parent / library / case.folder.name)
        found = tokenizer("w20 w30 w10")
        same(sorted(found), ["attention_mask", "input_ids"], f"keys, {library}")
        same(found["input_ids"], [START, 20, 30, 10], f"ids, {library}")
        if 30 not in tokenizer.all_special_ids:
            raise Wrong(f"a further special token is lost, {library}")


# Numbers


def logits(case: Case) -> None:
    case.computes(case.model)
    if case.kind != "classifier":
        with torch.no_grad():
            close(case.model(case.plain)[0], case.logits, "without padding")


def eager(case: Case) -> None:
    """And its attention."""
    model, _ = case.load(attn_implementation="eager")
    found = case.computes(model, output_attentions=True).attentions
    same(len(found), model.config.num_hidden_layers, "layers")
    real = case.mask[:, None, :, None] * case.mask[:, None, None, :]
    close(found[0] * real, case.attentions * real, "attention")


def flex(case: Case) -> None:
    with torch.compiler.set_stance("force_eager"):  # compiled, it takes half a minute
        case.computes(case.load(attn_implementation="flex_attention")[0])


def half(case: Case) -> None:
    case.computes(case.load(dtype=torch.bfloat16)[0], most=0.1)


def packed(case: Case) -> None:
    """Documents in one row, of which each starts at position 0."""
    ids, at = case.plain[:1], 14
    positions = torch.cat([torch.arange(at), torch.arange(LENGTH - at)])[None]
    with torch.no_grad():
        found = case.model(ids, position_ids=positions, use_cache=False).logits
        apart = [case.model(part).logits for part in (ids[:, :at], ids[:, at:])]
    close(found, torch.cat(apart, dim=1))


def mask_4d(case: Case) -> None:
    seen = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    positions = torch.arange(LENGTH).expand(2, -1)
    with torch.no_grad():
        close(case.model(case.plain, attention_mask=seen, position_ids=positions).logits, case.logits)


def hidden_states(case: Case) -> Any:
    with torch.no_grad():
        return case.load("AutoModel")[0](**case.batch).last_hidden_state


def trunk(case: Case) -> None:
    close(case.real(hidden_states(case)), case.real(case.hidden), "hidden states")


def new_classifier(case: Case) -> None:
    model, info = case.load(CLASSES["classifier"], num_labels=3)
    made = [name for name in info.get("missing_keys", ()) if not re.search("score|classifier|pooler", name)]
    if made or "mismatched_keys" in info:
        raise Wrong(f"loading: {info}")
    with torch.no_grad():
        same(model(**case.batch).logits.shape, torch.Size([2, 3]), "shape")


# Generation


def step_by_step(case: Case) -> None:
    """First some tokens at once, then one at a time over a cache."""
    start = LENGTH - 6
    with torch.no_grad():
        output = case.model(case.plain[:, :start], use_cache=True)
        parts = [output.logits]
        for at in range(start, LENGTH):
            output = case.model(case.plain[:, at : at + 1], use_cache=True, **cache_of(output))
            parts.append(output.logits)
    close(torch.cat(parts, dim=1), case.logits)


def generates(**options: Any) -> Callable[[Case], None]:
    """Whether these options give the likeliest tokens, as all of them should."""
    return lambda case: same(case.generate(**options), case.greedy)


def sampling(case: Case) -> None:
    rows = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        rows.append(case.generate(do_sample=True, top_k=20, use_cache=use_cache))
    same(*rows)


def beams(case: Case, **options: Any) -> Any:
    return case.generate(num_beams=3, **options)


def beam_search(case: Case) -> None:
    same(beams(case), case.beams)
    same(beams(case, use_cache=False), case.beams, "tokens without a cache")


def drafts(case: Case, **options: Any) -> None:
    """One row. Some versions need an end, and generate a token too many."""
    row = {"input_ids": case.plain[:1], "attention_mask": None, "eos_token_id": [END]}
    same(case.generate(**row, **options)[:, : LENGTH + NEW], case.generate(**row, use_cache=False))


def second_turn(case: Case) -> None:
    """What was generated and some more tokens, over the cache of the first turn."""
    first = case.generate(return_dict_in_generate=True)
    rows = torch.cat([first.sequences, case.plain[:, :4]], dim=1)
    mask = torch.cat([case.mask, torch.ones(2, NEW + 4, dtype=torch.long)], dim=1)
    turn = {"input_ids": rows, "attention_mask": mask}
    same(case.generate(**turn, **cache_of(first)), case.generate(**turn, use_cache=False))


def scores(case: Case) -> None:
    output = case.generate(return_dict_in_generate=True, output_scores=True, output_hidden_states=True)
    found = case.model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    close(found, case.scores, "scores")


def stop_strings(case: Case) -> None:
    """With a tokenizer whose tokens are letters, which transformers cannot do without here."""
    letters = {
        chr(ord("a") + at if at < 26 else 0x4E00 + at): at for at in range(case.model.config.vocab_size)
    }
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    plain.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain)
    row = case.greedy[0].tolist()
    last = row[LENGTH + 2]
    options = {"input_ids": case.ids[:1], "attention_mask": case.mask[:1]}
    found = case.generate(**options, tokenizer=tokenizer, stop_strings=[tokenizer.decode([last])])
    same(found[0], row[: row.index(last, LENGTH) + 1])


def continuous_batching(case: Case) -> None:
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=PAD
    )
    size, options = {"num_blocks": 16, "max_batch_tokens": 128}, {}
    if hasattr(transformers, "ContinuousBatchingConfig"):
        options["continuous_batching_config"] = transformers.ContinuousBatchingConfig(**size)
    else:
        settings.num_blocks, settings.max_batch_tokens = size.values()
    rows = [row[mask.bool()].tolist() for row, mask in zip(case.ids, case.mask, strict=True)]
    outputs = case.load()[0].generate_batch(rows, generation_config=settings, **options).values()
    if errors := {output.error for output in outputs} - {None}:
        raise Wrong(errors.pop())
    same(sorted(each.generated_tokens for each in outputs), sorted(case.greedy[:, LENGTH:].tolist()))


# Training


def gradient(case: Case, *, checkpoints: bool = False) -> Any:
    """The loss, and the norm of all gradients, without dropout."""
    model = case.load()[0].train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    if checkpoints:
        model.gradient_checkpointing_enable()
        same(model.is_gradient_checkpointing, True, "is_gradient_checkpointing")
    loss = model(**case.batch, labels=labels(case)).loss
    loss.backward()
    norms = [value.grad.norm() for value in model.parameters() if value.grad is not None]
    return torch.stack([loss.detach(), torch.stack(norms).norm()])


def labels(case: Case) -> Any:
    return torch.where(case.mask.bool(), case.ids, -100)


def training(case: Case) -> None:
    for checkpoints in (False, True):
        close(gradient(case, checkpoints=checkpoints), case.gradient, f"gradient, checkpoints {checkpoints}")


def trainer(case: Case) -> None:
    """Two steps of the Trainer change every weight."""
    model, rows = case.load()[0], {**case.batch, "labels": labels(case)}
    before = {name: value.clone() for name, value in model.named_parameters()}
    data = [{name: value[at] for name, value in rows.items()} for at in (0, 1, 0, 1)]
    settings = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_checkpointing": True}
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(folder, **settings)
        transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    if still := [name for name, value in model.named_parameters() if value.equal(before[name])]:
        raise Wrong(f"not trained: {', '.join(still)}")


# Other programs


def pipeline(case: Case) -> None:
    task = "text-generation" if case.kind == "decoder" else "fill-mask"
    run = transformers.pipeline(task, model=str(case.folder), trust_remote_code=True, device="cpu")
    if case.kind == "encoder":
        same([each["token"] for each in run("w20 w21 w10 w23", top_k=3)], case.filled)
        return
    found = run("w20 w21 w10 w23", max_new_tokens=NEW, do_sample=False, eos_token_id=-1)[0]["generated_text"]
    right = case.tokenizer().decode(case.continued[0], skip_special_tokens=True)
    # Versions differ in the space after the prompt.
    same(found.replace(" ", ""), right.replace(" ", ""), "text")


def embeddings(case: Case) -> None:
    """By the model's own ``encode``, and in sentence-transformers, whose files old and new ones saved."""
    program = importlib.import_module("sentence_transformers").SentenceTransformer
    models = {"encode": case.model}
    for library in ("converted", "saved"):
        folder = case.folder.parent.parent / library / case.folder.name
        models[f"{library}, sentence-transformers"] = program(
            str(folder), trust_remote_code=True, device="cpu"
        )
    for name, model in models.items():
        close(model.encode(case.right["texts"].tolist()), case.embeddings, name)


@dataclass(frozen=True)
class Check:
    group: str
    """The table's column."""
    models: Sequence[str]
    """Kinds, or names, of the models that have it."""
    run: Callable[[Case], Any]

    def has(self, case: Case) -> bool:
        return not {case.kind, case.folder.name}.isdisjoint(self.models)


LANGUAGE = ["decoder", "encoder"]
NETWORK = list(CLASSES)
CHECKS = {
    "load": Check("load", NETWORK, load),
    "load from the Hub": Check("load", ["bloom", "jina_embedding"], hub),
    "save and load": Check("load", NETWORK, save),
    "tokenizer": Check("load", ["tokenizer"], tokens),
    "saved tokenizer": Check("load", NETWORK, saved_tokenizer),
    "logits": Check("compute", NETWORK, logits),
    "eager": Check("compute", [*LANGUAGE, "embedding"], eager),
    "flex_attention": Check("compute", ["decoder"], flex),
    "bf16": Check("compute", LANGUAGE, half),
    "packed rows": Check("compute", ["decoder"], packed),
    "4-D mask": Check("compute", ["decoder"], mask_4d),
    "AutoModel": Check("compute", LANGUAGE, trunk),
    "new classifier": Check("compute", LANGUAGE, new_classifier),
    "step by step": Check("generate", ["decoder"], step_by_step),
    "greedy": Check("generate", ["decoder"], generates()),
    "no cache": Check("generate", ["decoder"], generates(use_cache=False)),
    "static cache": Check("generate", ["decoder"], generates(cache_implementation="static")),
    "prefill in chunks": Check("generate", ["decoder"], generates(prefill_chunk_size=8)),
    "sampling": Check("generate", ["decoder"], sampling),
    "beams": Check("generate", ["decoder"], beam_search),
    "prompt lookup": Check("generate", ["decoder"], lambda case: drafts(case, prompt_lookup_num_tokens=3)),
    "assisted": Check(
        "generate", ["decoder"], lambda case: drafts(case, assistant_model=copy.deepcopy(case.model))
    ),
    "second turn": Check("generate", ["decoder"], second_turn),
    "scores": Check("generate", ["decoder"], scores),
    "stop_strings": Check("generate", ["decoder"], stop_strings),
    "continuous batching": Check("generate", ["decoder"], continuous_batching),
    "training": Check("train", LANGUAGE, training),
    "Trainer": Check("train", LANGUAGE, trainer),
    "pipeline": Check("other programs", LANGUAGE, pipeline),
    "embeddings": Check("other programs", ["embedding"], embeddings),
}
NEWEST = {
    "beams": Check("", ["decoder"], beams),
    "gradient": Check("", LANGUAGE, gradient),
    # The reference's are those after the norm, which is above Refact's trunk.
    "hidden": Check("", ["refact", "refact_first"], hidden_states),
}
"""What the references lack, and the newest version of transformers is asked for."""
