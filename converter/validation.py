"""``validate``: whether a converted repository is still as it was written, and still right.

``push`` runs the same checks, so far as it has not compared the files itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import ConverterError, SourceError, UnsupportedModel, ValidationError, VerificationError
from converter.model.model import Model
from converter.model.rotary import RotaryModel
from converter.onnx.files import STANDALONE, graphs_in
from converter.onnx.requirements import check_installed, require_alibi
from converter.result import manifest
from converter.result.converted import check_code, read_converted
from converter.source.keys import KEYS, refuse_or_drop_keys
from converter.source.library_files import GENERATE, is_read
from converter.source.sentence_transformers import TEMPLATES, module_folders
from converter.source.source import CONFIG

if TYPE_CHECKING:
    from converter.onnx.report import ValidationReport
    from converter.verification import Check

VERIFIED = {"alibi": ("tensors", "slopes", "paths", "loading"), "rotary": ("tensors", "frequencies")}
"""The names of what verification checks, in order."""
MARKS = {True: "ok", False: "FAILED", None: "not run"}


@dataclass(frozen=True)
class Outcome:
    name: str
    passed: bool | None
    """None if it was not run, since a check that it depends on failed."""
    detail: str

    def __str__(self) -> str:
        return f"{MARKS[self.passed]:8}{self.name}: {self.detail}"


@dataclass(frozen=True)
class Validation:
    path: Path
    outcomes: Sequence[Outcome]
    graphs: ValidationReport | None
    """The report on its ONNX graphs, if they were run."""
    notes: Sequence[str]
    """What the user should know, and is no failure."""
    seconds: float

    @property
    def failure(self) -> str | None:
        """The first check that failed, in one line; None if all passed."""
        return next((f"{each.name}: {each.detail}" for each in self.outcomes if each.passed is False), None)

    @property
    def passed(self) -> bool:
        return self.failure is None

    def check(self) -> None:
        """Raises ``ValidationError`` if a check failed."""
        if self.failure is not None:
            raise ValidationError(self.failure)

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "passed": self.passed,
            "checks": [vars(each) for each in self.outcomes],
            "graphs": None if self.graphs is None else self.graphs.to_json(),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


def validate(folder: str | Path, *, provider: str | None = None, progress: bool = False) -> Validation:
    """Checks a converted repository, whole, and changes nothing in it.

    In order: its files are those of its manifest, byte by byte; its code is this version's; config.json is
    what the tensors say; the slopes of the running model, and what ``from_pretrained`` gives, are right; each
    ONNX graph in the manifest gives what the model gives. A check that fails keeps those that depend on it
    from being run. Files that the manifest does not list and a library reads are refused if they have a key
    that a conversion refuses, and else named in ``notes``.

    Args:
        folder: a repository that a conversion wrote.
        provider: where graphs are run: ``cpu``; ``cuda``, which includes the CPU; None for the CPU and, if
            there is one, CUDA.
        progress: draw progress bars on stderr.

    Raises:
        SourceError, UnsupportedModel: not a converted repository, or its config.json is damaged.
        MissingPackage: it has graphs, and onnx, onnx-ir or onnxruntime is not installed.
        ProviderError: the execution provider is not available.
    """
    started = time.monotonic()
    model, report = read_converted(Path(folder)), None
    listed = listed_files(model)
    graphs = {name: path for name, path in graphs_in(model.folder).items() if name in listed}
    if graphs:
        check_installed()
    outcomes = [
        _tried("files", lambda: check_files(model, progress=progress)),
        _tried("code", lambda: check_safe_code(model)),
    ]
    passed: list[Check] = []
    names = ("config", *VERIFIED[model.positions])
    if outcomes[-1].passed:
        failed = _tried("", lambda: verify(model, passed, progress=progress))
        outcomes += [Outcome(each.name, True, each.detail) for each in passed]
        lacking = names[len(passed) :]
        outcomes += [Outcome(name, False, failed.detail) for name in lacking[:1]]
        outcomes += [Outcome(name, None, f"{lacking[0]} failed") for name in lacking[1:]]
    else:
        outcomes += [Outcome(name, None, "other code is not run") for name in names]
    if graphs and not outcomes[-1].passed:
        outcomes += [Outcome(name, None, "the model failed") for name in graphs]
    elif graphs:
        try:
            report = run_graphs(model, graphs, provider, progress=progress)
            outcomes += [Outcome(each.file, each.passed, str(each)) for each in report.graphs]
        except (ValidationError, UnsupportedModel) as error:
            outcomes.append(Outcome("graphs", False, str(error)))
    unlisted = unlisted_files(model, listed) if listed else []
    notes = [f"not written by the conversion, changes what loads: {', '.join(unlisted)}"] if unlisted else []
    return Validation(model.folder, outcomes, report, notes, time.monotonic() - started)


def _tried(name: str, work: Callable[[], object]) -> Outcome:
    """The outcome of a check that returns what it found, or raises an error of ours."""
    try:
        return Outcome(name, True, str(work()))
    except ConverterError as error:
        return Outcome(name, False, str(error))


def check_files(model: Model, *, progress: bool = False) -> str:
    """Checks that the listed files are as they were written, and that no file has a key that is refused.

    A library reads a file whoever wrote it, so all files of the folder are judged, listed or not.
    """
    found = manifest.compare(model, progress=progress)
    refuse_or_drop_keys(model.source, model.source.contents(KEYS), model.row_kinds)
    return f"all {len(found)} files in {manifest.MANIFEST} are as they were written"


def listed_files(model: Model) -> Collection[str]:
    """The files in the manifest; empty without one, and for a damaged one, which ``check_files`` tells."""
    try:
        return manifest.listed(model.source)
    except SourceError:
        return ()


def unlisted_files(model: Model, listed: Collection[str]) -> list[str]:
    """The files that a library reads in a converted repository, and that its manifest does not list."""
    source = model.source
    names = [*source.files, *source.inside(TEMPLATES), *source.inside(STANDALONE)]
    found = [name for name in names if is_read(name)]
    for folder in module_folders(source):
        found += source.inside(folder)
    return sorted(set(found) - set(listed))


def check_safe_code(model: Model) -> str:
    """Checks that a repository has this version's code, and that it names and holds no other that runs."""
    check_code(model.folder, model.templates)
    if (model.folder / GENERATE).exists():
        raise SourceError(
            f"{GENERATE} holds code that replaces generate, and loading the model runs it; remove that folder"
        )
    if not model.templates:
        return "it has none, and names none"
    return "it is this version's, and no file names other code"


def verify(model: Model, passed: list[Check] | None = None, *, progress: bool = False) -> list[Check]:
    """Checks a converted repository with this version's code as its conversion did.

    ``passed`` gets each check that passes. Raises ``SourceError`` or ``VerificationError`` if one fails.
    """
    from converter.verification import Check
    from converter.verification import verify as check

    passed = [] if passed is None else passed
    if model.checkpoint.format != "safetensors":
        raise SourceError(f"the weights of {model.folder} are not safetensors files; convert it again")
    for key, value in model.tensor_settings.items():
        if model.result_config.get(key) != value:
            raise VerificationError(f"{CONFIG}: {key} is not what the weights say; convert it again")
    if isinstance(model, RotaryModel):
        model.check_record()
        passed.append(Check("config", f"{CONFIG} is what its record of the conversion says"))
    else:
        passed.append(Check("config", f"{CONFIG} is what the tensors say"))
    check(model, passed=passed, progress=progress)
    return passed


def run_graphs(
    model: Model, graphs: Mapping[str, Path], provider: str | None = None, *, progress: bool = False
) -> ValidationReport:
    """Runs ONNX graphs against the model; see ``onnx.validate.validate_graphs``."""
    from converter.onnx.validate import validate_graphs

    check_installed()
    return validate_graphs(require_alibi(model), graphs, provider, progress=progress)
