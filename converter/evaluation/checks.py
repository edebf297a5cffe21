"""What is wrong with an evaluation before any work: found by config.json, the options and tasks' files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from converter.errors import UnsupportedModel, UsageError, option
from converter.evaluation.tasks import EMBEDDED, TYPES, AnyTask
from converter.evaluation.tasks.task import Retrieval
from converter.model.alibi import AlibiModel
from converter.model.model import Model

LONGEST_PROMPT = 1 << 24
"""Most tokens in a prompt: building a longer one would take all memory."""


def trained_length_below(model: Model, target: int) -> int:
    """The trained length; raises ``UsageError`` unless the model can be scaled from it to the target."""
    trained = model.trained
    if target > LONGEST_PROMPT:
        raise UsageError(f"{option.target_length} {target} is out of range; give at most {LONGEST_PROMPT}")
    if trained.tokens is None:
        raise UsageError(f"the trained length of {model.name} is {trained.origin}; {trained.remedy}")
    if target <= trained.tokens:
        raise UsageError(
            f"{option.target_length} {target} is not above the trained length {trained.tokens}; nothing "
            "needs scaling"
        )
    return trained.tokens


def check_encoder_head(model: Model) -> None:
    """Raises ``UnsupportedModel`` for an encoder that neither embeds texts nor predicts masked tokens."""
    if model.decoder or not isinstance(model, AlibiModel):
        return
    if model.head not in ("Model", "ForMaskedLM"):
        raise UnsupportedModel(
            f"{model.name} neither embeds texts nor predicts masked tokens ({model.architecture}); "
            "evaluation needs one of them"
        )


def check_kinds(model: Model, tasks: Sequence[AnyTask], text: Sequence[Path]) -> None:
    """Raises ``UsageError`` for tasks that are for another kind of model, and for an encoder without any.

    A decoder without ``tasks`` and ``text`` gets the generated tasks.
    """
    if not model.decoder and not tasks and not text:
        options = " or ".join(TYPES[name].option for name in EMBEDDED)
        raise UsageError(
            f"{model.name} is an encoder: give {option.text}, or queries and documents with {options}"
        )
    for task in tasks:
        embeds = isinstance(task, Retrieval)
        if embeds and model.decoder:
            raise UsageError(
                f"the task {task.name} is for encoders, and {model.name} is not one; drop it, or give an "
                "encoder"
            )
        if not embeds and not model.decoder:
            raise UsageError(
                f"{model.name} is an encoder and generates no text, which the task {task.name} needs; choose "
                f"one of {', '.join(EMBEDDED)}"
            )


def check_prompt_lengths(task: AnyTask, lengths: Iterable[int], trained: int, target: int) -> None:
    """Raises ``UsageError`` unless a task has prompts beyond the trained length and up to the target.

    ``lengths`` are those of its prompts, in tokens.
    """
    found = sorted(set(lengths))
    if isinstance(task, Retrieval) and max(found) <= trained:
        raise UsageError(
            f"{task.name} has no document of more than {trained} tokens, the trained length, so no scaling "
            "would change anything; give longer documents"
        )
    if any(trained < length <= target for length in found):
        return
    remedy = f"give longer ones, or another {option.target_length}"
    longer = [length for length in found if length > target]
    if longer:
        remedy = f"give {option.target_length} {longer[0]} or more, or shorter prompts"
    raise UsageError(
        f"{task.name} has no prompts between the trained length {trained} and the target {target}, only of "
        f"{', '.join(map(str, found))} tokens; {remedy}"
    )
