"""What an ONNX graph needs: packages, and a model that a graph can be built of."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from converter.config import Config, SourceConfig, is_integer
from converter.errors import MissingPackage, UnsupportedModel, UsageError, option
from converter.families import Family
from converter.families.family import TASKS
from converter.model.alibi import AlibiModel
from converter.model.model import Model
from converter.onnx.options import BACKBONE, OnnxOptions
from converter.source.keys import check_vectors
from converter.source.sentence_transformers import MODULES, Pooling, read_pooling
from converter.source.source import Source

if TYPE_CHECKING:
    from converter.plan import Plan

PACKAGES = ("onnx", "onnx_ir", "onnxruntime")
OPTIMUM = "optimum-cli export onnx --model DIR"
INSTEAD = f"leave out {option.pooled}, and pool the hidden states in your own program"


def check_installed(options: OnnxOptions | None = None) -> None:
    """Raises ``MissingPackage``, or ``ProviderError`` for a provider of the options that is not there."""
    from importlib.util import find_spec

    missing = [name.replace("_", "-") for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingPackage(
            f"ONNX needs {' and '.join(missing)}: pip install {' '.join(missing)} (for CUDA, onnxruntime-gpu "
            "in place of onnxruntime)"
        )
    if options is not None and options.provider is not None and options.validate:
        from converter.onnx.session import check_available

        check_available(options.provider)


def check_exportable(plan: Plan, options: OnnxOptions) -> None:
    """Checks that ``export`` can write such a graph of a planned conversion, before hours of work.

    Raises what ``class_for`` and ``graph_pooling`` raise.
    """
    model = require_alibi(plan.model)
    class_for(options.computes, model.family, plan.files.config, last_logits=options.last_logits)
    if options.pooled:
        graph_pooling(plan.model.source, options.pooling)


def require_alibi(model: Model) -> AlibiModel:
    """The model, if it has ALiBi; else ``UnsupportedModel``, for there are graphs of no other."""
    if not isinstance(model, AlibiModel):
        raise UnsupportedModel(
            f"ONNX graphs are written for ALiBi models only, and {model.model_type!r} is rotary; convert it "
            f"without {option.onnx}, with {option.scale} (tracing would freeze a dynamic scaling), and "
            f"export it: {OPTIMUM}"
        )
    return model


def for_task(model: Model, task: str | None, *, last_logits: bool = False) -> AlibiModel:
    """The model as a graph sees it: its config names the class that computes the task."""
    alibi = require_alibi(model)
    named = class_for(task, alibi.family, alibi.result_config, last_logits=last_logits)
    config = {**alibi.result_config, "architectures": [named]}
    source_config = {**alibi.source_config, "architectures": [alibi.family.classes[named]]}
    return replace(alibi, config_json=config, source_config=SourceConfig(source_config))


def class_for(task: str | None, family: Family, config: Config, *, last_logits: bool = False) -> str:
    """The class of a converted model that computes a task; the config's own for None.

    A checkpoint stores the tensors of its own class, which verification checks. Those of the backbone are
    among them; any other head would have random weights.

    Raises ``UnsupportedModel`` for a config that names no class or several, without tensors for the task, or
    for a classifier that cannot find the end of a row; ``UsageError`` for logits of last tokens of what is
    not a language model.
    """
    architectures = config.get("architectures") or []
    if len(architectures) != 1:
        raise UnsupportedModel(f"architectures is {json.dumps(architectures)}; a graph is built of one class")
    own: str = architectures[0]
    start = f"Ntk{family.camel}"
    heads = [own.removeprefix(start), "Model"]
    classes = {TASKS[head]: f"{start}{head}" for head in heads if head in TASKS}
    if task is not None and task not in classes:
        raise UnsupportedModel(
            f"{option.onnx_task} {task} needs weights that this checkpoint ({own}) does not have; choose "
            f"{' or '.join(classes)}"
        )
    named = own if task is None else classes[task]
    if task is None and family.kind == "decoder" and named == f"{start}Model":
        original = json.dumps([family.language_model.removeprefix("Ntk")])
        raise UnsupportedModel(
            f"architectures names a model without a head ({own}); for a graph of its hidden states give "
            f"{option.onnx_task} {BACKBONE}; if it is a language model whose head is the embedding table, "
            f"convert the source with {option.overrides} 'architectures={original}'"
        )
    classifies = family.kind == "decoder" and named == f"{start}ForSequenceClassification"
    if classifies and not is_integer(config.get("pad_token_id")):
        raise UnsupportedModel(
            "config.json has no pad_token_id, by which a classifier finds the last token of a row; convert "
            f"the source with {option.overrides} pad_token_id=N"
        )
    if last_logits and not has_cache(named, family):
        raise UsageError(f"{option.last_logits} is for language models, and {named} is not one; leave it out")
    return named


def has_cache(named: str, family: Family) -> bool:
    return family.kind == "decoder" and named == family.language_model


def graph_pooling(source: Source, given: str | None) -> Pooling:
    """How the graph of a repository makes one vector of a text: as its files say, or else as was given.

    Raises what ``read_pooling`` and ``check_vectors`` raise, and ``UnsupportedModel`` without both.
    """
    try:
        found = read_pooling(source, given)
        check_vectors(source)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{option.pooled}: {error.message}; {INSTEAD}") from error
    if found is not None:
        return found
    if given is None:
        raise UnsupportedModel(
            f"{option.pooled}: the repository has no {MODULES} of sentence-transformers, which says how to "
            f"pool; add {option.pooling} mean (of all tokens, the usual one) or cls (the first token)"
        )
    return Pooling((given,), normalised=False)
