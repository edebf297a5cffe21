"""A checkpoint that is evaluated: opened once, then scaled in one way after the other.

A source is converted first, into a temporary folder whose weights are links to the source's, and
verified; so what is measured is what a conversion gives. ALiBi models are loaded once and their slopes
changed. Rotary ones, whose scaling transformers reads when it builds the model, are converted and loaded for
each scaling.

No code of a checkpoint is run, converted or not, whatever its files say: models and tokenizers are
transformers' own, or imported from this tool's templates.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from converter import recipe as recipes
from converter.alibi import AlibiRecipe
from converter.card import auto_class
from converter.checkpoint import read_checkpoint
from converter.errors import SourceError, UnsupportedModel, UsageError
from converter.evaluation.hardware import Hardware
from converter.jsonfile import read_object
from converter.pipeline import convert
from converter.recipe import Recipe
from converter.repository import check_code, small_files
from converter.scaling import Request, Scaling
from converter.source import CONFIG, Source, open_source, plain_text
from converter.tokenizers import TEMPLATE, TOKENIZER_CONFIG, our_class, read_tokenizer
from converter.trained import TrainLength, resolve
from converter.verification.patched import Patched, templates

ARCHITECTURE = "AutoModelForCausalLM"


@dataclass
class Subject:
    """A checkpoint, and the one model of it that is loaded at a time."""

    name: str
    source: Source
    recipe: Recipe
    trained: TrainLength
    tokenizer: Any
    machine: Hardware
    work: Path
    """A temporary folder."""
    patched: Patched | None
    """The converted repository, with its code imported; None of rotary models, which need none."""
    _loaded: tuple[Scaling, Any] | None = field(default=None)
    _stock: tuple[float, ...] = ()
    _dtype: torch.dtype | str | None = None

    @property
    def own_scaling(self) -> Scaling:
        """What it is scaled by as it stands."""
        return self.recipe.own_scaling

    @property
    def hardware(self) -> Hardware:
        """How the model that is loaded may be used."""
        dynamic = self._loaded is not None and self._loaded[0].dynamic is not None
        if self.patched is None and dynamic:
            # transformers gives all rows of a batch the base that its longest needs.
            return replace(self.machine, batch_size=1)
        return self.machine

    def resolve(self, request: Request) -> Scaling:
        """The scaling that is asked for.

        Raises:
            UsageError: it needs the trained length, which is not known; or such a model cannot compute it.
        """
        scaling = resolve(request, self.trained, self.source, self.recipe.default_dynamic)
        if scaling != self.own_scaling:
            self.recipe.check_scaling(scaling)
            if self.patched is None and self.recipe.converted:
                raise UsageError(f"{self.name} is scaled already; give its source to try other scalings")
        return scaling

    def scaled(self, scaling: Scaling) -> Any:
        """The model under a scaling, in evaluation mode; the one before it is not to be used any more."""
        if self._loaded is not None and self._loaded[0] == scaling:
            return self._loaded[1]
        if self.patched is not None:
            model = self._loaded[1] if self._loaded else self._load_patched(self.patched)
            alibi = model.base_model.alibi
            model.base_model.alibi = type(alibi)(self._stock, scaling.to_json())
        else:
            self._loaded = None
            gc.collect()
            model = self._load_rotary(scaling)
        self._loaded = scaling, model
        return model

    def describe(self) -> dict[str, Any]:
        """What results say of the model."""
        assert self._loaded is not None
        model = self._loaded[1]
        return {
            "family": self.recipe.name,
            "commit": self.source.commit,
            "train_length": self.trained.tokens,
            "heads": self.recipe.geometry.num_heads,
            "layers": self.recipe.geometry.num_layers,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
        }

    def _load_patched(self, patched: Patched) -> Any:
        reference = patched.config["auto_map"].get(ARCHITECTURE)
        if reference is None:
            raise UnsupportedModel(f"{self.name} has no language model, which evaluation needs")
        model_class = getattr(patched.modeling, reference.partition(".")[2])
        config = patched.build_config(alibi_scaling=None)
        model = self._load(model_class, patched.folder, config=config)
        self._stock = tuple(model.base_model.alibi.slopes)
        return model

    def _load_rotary(self, scaling: Scaling) -> Any:
        number = len(list(self.work.iterdir()))
        folder = self.work / f"rotary-{number}"
        if self.recipe.converted:
            _link(self.source, folder)
            self.recipe.verify(folder, scaling)
        else:
            _convert(self.source, folder, scaling, self.trained.tokens)
        return self._load(AutoModelForCausalLM, folder, trust_remote_code=False)

    def _load(self, model_class: Any, folder: Path, **arguments: Any) -> Any:
        if self._dtype is None:  # once, so that all scalings have the same
            self._dtype = self.machine.dtype_of(read_checkpoint(folder).parameters)
        try:
            with quiet():
                model, found = model_class.from_pretrained(
                    folder,
                    dtype=self._dtype,
                    use_safetensors=True,
                    output_loading_info=True,
                    **arguments,
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # damaged weights raise what their reader happens to raise
            reason = str(error).partition("\n")[0]
            raise SourceError(f"{self.name} does not load ({type(error).__name__}: {reason})") from error
        if found["missing_keys"]:
            lacking = sorted(found["missing_keys"])[0]
            raise UnsupportedModel(
                f"{self.name} has no language model, which evaluation needs: {lacking} is not stored"
            )
        return model.to(self.machine.device).eval()


@contextlib.contextmanager
def open_subject(
    model: str | Path,
    hardware: Hardware,
    *,
    train_length: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    progress: bool = False,
) -> Iterator[Subject]:
    """Opens a checkpoint, stock or converted, for evaluation.

    Args:
        model: a local folder, or a Hub id.
        hardware: where it will run.
        train_length: trained length in tokens, where it is not known.
        revision, token, cache_dir: as for ``convert``.
        progress: draw progress bars on stderr.

    Raises:
        SourceError: the checkpoint is missing, unreadable or damaged, or has no tokenizer that loads.
        UnsupportedModel: it cannot be scaled, or is no causal language model.
        UsageError: a trained length that is none.
    """
    Request("none", train_length=train_length)
    source = open_source(str(model), revision=revision, token=token, cache_dir=cache_dir, progress=progress)
    config = source.config()
    recipe = recipes.of_checkpoint(config)
    if not recipe.decoder:
        raise UnsupportedModel(
            f"{source.name} is an encoder, which continues no text; evaluation is for causal language models"
        )
    if auto_class(config) not in (ARCHITECTURE, "AutoModel"):
        raise UnsupportedModel(
            f"{source.name} has no language model, which evaluation needs: config.json says "
            f"{plain_text(config['architectures'][0])}"
        )
    trained = recipe.trained_length(source, train_length)
    rotary = recipe.positions == "rotary"
    if not (recipe.converted or read_tokenizer(source, config, code=not rotary).here):
        raise SourceError(
            f"{source.name} has no tokenizer that runs without code of its own, and evaluation needs one"
        )
    source.fetch([CONFIG, *small_files(source.files), *source.weights()])
    with tempfile.TemporaryDirectory(prefix="ntk-convert-") as name, contextlib.ExitStack() as stack:
        work = Path(name)
        folder, patched = source.folder, None
        if isinstance(recipe, AlibiRecipe):
            if recipe.converted:
                source.fetch([*recipe.templates, *({TEMPLATE} & source.files.keys())])
                check_code(folder, config, recipe.templates)
            else:
                folder = work / "model"
                _convert(source, folder, Scaling("none"), trained.tokens, progress=progress)
            patched = stack.enter_context(Patched.load(folder, recipe.family))
        tokenizer = _load_tokenizer(folder, source.name, patched)
        subject = Subject(source.name, source, recipe, trained, tokenizer, hardware, work, patched)
        yield subject
        subject._loaded = None


def _convert(
    source: Source, folder: Path, scaling: Scaling, trained: int | None, *, progress: bool = False
) -> None:
    """A conversion of files that are here, which does not outlive the evaluation."""
    convert(
        source.folder,
        folder,
        method=scaling.method,
        scale=scaling.factor,
        dynamic=scaling.dynamic,
        rate=scaling.rate,
        train_length=trained,
        link="symbolic",
        progress=progress,
    )


def _link(source: Source, folder: Path) -> None:
    """The config and weights of a converted repository, and nothing else that it may hold."""
    folder.mkdir()
    for name in (CONFIG, *source.weights()):
        (folder / name).symlink_to((source.folder / name).resolve())


def _load_tokenizer(folder: Path, name: str, patched: Patched | None) -> Any:
    settings = folder / TOKENIZER_CONFIG
    try:
        ours = our_class(read_object(settings)) if settings.is_file() else None
        with quiet():
            if ours is not None:
                with templates() as load:
                    return getattr(load(TEMPLATE.removesuffix(".py")), ours).from_pretrained(folder)
            # With a config given, none is looked for, whose class transformers may not know.
            known = {} if patched is None else {"config": patched.build_config()}
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **known)
    except Exception as error:  # a damaged file raises what its reader happens to raise
        reason = str(error).partition("\n")[0]
        raise SourceError(
            f"the tokenizer of {name} does not load ({type(error).__name__}: {reason})"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No bars and warnings of transformers, which speak of temporary folders."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def release(device: torch.device) -> None:
    """Gives back what a model no longer used holds on an accelerator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
