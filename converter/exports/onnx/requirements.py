"""What an ONNX graph needs: packages, and a model that a graph can be built of."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from converter.config import Config
from converter.errors import MissingPackage, UnsupportedModel
from converter.exports.onnx.choices import GraphOptions
from converter.exports.onnx.families import has_graph
from converter.families import Family
from converter.families.base import TASKS
from converter.recipes import AlibiRecipe, Recipe
from converter.rotary.settings import SCALING

if TYPE_CHECKING:
    from converter.result.converted import ConvertedRepository

PACKAGES = ("onnx", "onnx_ir", "onnxruntime")
OPTIMUM = "optimum-cli export onnx --model DIR"
"""The command that exports rotary models."""


def check_installed(options: GraphOptions | None = None) -> None:
    """Checks what can be known before anything is read.

    Args:
        options: of the export; None to check for the packages alone.

    Raises:
        MissingPackage: onnx, onnx-ir or onnxruntime is not installed.
        ProviderError: onnxruntime does not have the provider.
    """
    from importlib.util import find_spec

    missing = [name.replace("_", "-") for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingPackage(
            f"ONNX needs {' and '.join(missing)}: pip install {' '.join(missing)} (for CUDA, onnxruntime-gpu "
            "in place of onnxruntime)"
        )
    if options is not None and options.provider is not None and options.validate:
        from converter.exports.onnx.session import check_available

        check_available(options.provider)


def check_recipe(recipe: Recipe, config: Config, task: str | None) -> None:
    """Raises ``UnsupportedModel`` for a conversion, by its config, that no such graph can be built of."""
    if isinstance(recipe, AlibiRecipe):
        check_has_graph(config, recipe.family)
        class_for(task, config, recipe.family)
        return
    rope_scaling = config.get(SCALING)
    if rope_scaling and rope_scaling["type"] == "dynamic":
        raise UnsupportedModel(
            f"ONNX graphs are written for ALiBi models only, and {recipe.model_type!r} is rotary; tracing it "
            f"would freeze its dynamic scaling: convert it with --scale and use optimum: {OPTIMUM}"
        )
    raise UnsupportedModel(
        f"ONNX graphs are written for ALiBi models only, and {recipe.model_type!r} is rotary; convert it "
        f"without --onnx and export the result with optimum: {OPTIMUM}"
    )


def check_repository(repository: ConvertedRepository) -> None:
    """Raises ``UnsupportedModel`` for a converted repository that no graph can be built of."""
    recipe = repository.recipe
    if not isinstance(recipe, AlibiRecipe):
        raise UnsupportedModel(
            f"ONNX graphs are written for ALiBi models only, and {recipe.model_type!r} is rotary; with a "
            f"static scaling, export it with optimum: {OPTIMUM}"
        )
    check_has_graph(repository.config, recipe.family)


def check_has_graph(config: Config, family: Family) -> None:
    """Raises ``UnsupportedModel`` for the config of a converted repository that no graph can be built of."""
    if not has_graph(family.name):
        raise UnsupportedModel(f"there is no ONNX graph for the family {family.name} yet")
    named = config.get("architectures") or []
    if family.kind == "decoder" and named != [family.language_model]:
        words = f"architectures is {json.dumps(named)}; of decoders, only causal language models have a graph"
        if named == [f"Ntk{family.camel}Model"] and family.stock:
            original = json.dumps([family.language_model.removeprefix("Ntk")])
            remedy = f"convert the source with --set 'architectures={original}'"
            words += f"; if the head is the embedding table, {remedy}"
        raise UnsupportedModel(words)
    if len(named) != 1:
        raise UnsupportedModel(f"architectures is {json.dumps(named)}; a graph is built of one class")


def for_task(repository: ConvertedRepository, task: str | None) -> ConvertedRepository:
    """The repository as a graph sees it: its config names the class that computes the task.

    Raises:
        UnsupportedModel: see ``class_for``.
    """
    named = class_for(task, repository.config, repository.family)
    return replace(repository, config={**repository.config, "architectures": [named]})


def class_for(task: str | None, config: Config, family: Family) -> str:
    """The class of a converted model that computes a task; the config's own for None.

    A checkpoint stores the tensors of its own class, which verification checks. Those of the trunk are among
    them; any other head would have random weights.

    Raises:
        UnsupportedModel: the checkpoint has no tensors for the task.
    """
    own: str = config["architectures"][0]
    start = f"Ntk{family.camel}"
    if task is None:
        return own
    heads = [own.removeprefix(start), *(["Model"] if family.kind == "encoder" else [])]
    classes = {TASKS[head]: f"{start}{head}" for head in heads if head in TASKS}
    if task not in classes:
        raise UnsupportedModel(
            f"--onnx-task {task} needs weights that this checkpoint ({own}) does not have; choose "
            f"{' or '.join(classes)}"
        )
    return classes[task]
