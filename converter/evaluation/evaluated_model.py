"""A checkpoint that is evaluated: opened once, then loaded with one scaling after another.

A checkpoint is first converted into a temporary folder whose weights are links to its own, and verified. So
the evaluation measures what a conversion gives, with this version's code. An ALiBi model is loaded once, and
its slopes are changed. A rotary model is converted and loaded for each scaling, since transformers reads the
scaling when it builds the model.

No code of a checkpoint is run, converted or not, whatever its files say: the classes of models and tokenizers
are transformers' own, or come from this tool's templates.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from converter.errors import SourceError, UnsupportedModel, UsageError, option, out_of_memory, reason
from converter.evaluation.batches import Batch
from converter.evaluation.checks import check_encoder_head
from converter.evaluation.embeddings import pooling_of
from converter.evaluation.results import OTHER_CODE
from converter.evaluation.runner import Hardware, complete, losses
from converter.families.templates import templates_folder
from converter.model.alibi import AlibiModel
from converter.model.card_text import auto_class
from converter.model.model import Model
from converter.model.open import open_model
from converter.plan import decide, write
from converter.progress import Advance
from converter.result.again import weights_of
from converter.result.repository import small_files
from converter.scaling.request import request_for
from converter.scaling.scaling import UNSCALED, Scaling
from converter.scaling.slopes import Slopes
from converter.source.checkpoint import read_checkpoint
from converter.source.fetch import fetch
from converter.source.open import open_folder
from converter.source.sentence_transformers import Pooling
from converter.source.source import CONFIG, plain_text
from converter.source.weight_files import check_weights, weight_files
from converter.texts import load_tokenizer
from converter.verification import unlogged, verify
from converter.verification.imported import ImportedRepository
from converter.weights.files import sha256

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from converter.model.open import SourceOptions

CAUSAL, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"


@dataclass
class EvaluatedModel:
    """A checkpoint, and its one model that is loaded at a time."""

    model: Model
    tokenizer: Any
    chosen_hardware: Hardware
    """As the user chose it; ``hardware`` is for the model that is loaded."""
    work: Path
    """A temporary folder."""
    imported: ImportedRepository | None
    """The converted repository with its code imported; None for rotary models, which need no code."""
    _loaded: tuple[Scaling, Any] | None = field(default=None)
    stock: Slopes = ()
    """Of an ALiBi model that has been loaded."""
    _dtype: torch.dtype | str | None = None

    @property
    def predicts_masked(self) -> bool:
        """Whether it is an encoder with a head that predicts masked tokens."""
        return self.imported is not None and auto_class(self.imported.model.result_config) == MASKED

    @property
    def mask(self) -> int | None:
        """The token id that masks a token for an encoder; None for a decoder, which predicts the next one."""
        if self.model.decoder:
            return None
        if not self.predicts_masked:
            raise UnsupportedModel(
                f"{self.model.name} has no head that predicts masked tokens, so a text cannot tell how well "
                f"it reads; drop {option.text}"
            )
        mask = self.tokenizer.mask_token_id
        if mask is None:
            raise UsageError(f"the tokenizer of {self.model.name} has no token that masks others")
        return int(mask)

    @property
    def pooling(self) -> Pooling:
        """How an encoder's repository makes one vector of a text; see ``pooling_of``."""
        assert self.imported is not None
        return pooling_of(open_folder(self.imported.model.folder))

    @property
    def hardware(self) -> Hardware:
        """How to run the model that is loaded."""
        dynamic = self._loaded is not None and self._loaded[0].dynamic
        if self.imported is None and dynamic:
            # transformers gives all rows of a batch the base for the longest row.
            return replace(self.chosen_hardware, batch_size=1)
        return self.chosen_hardware

    @cached_property
    def baseline(self) -> Scaling:
        """What other scalings are compared with: none, or the one that the model was tuned with."""
        if not self.model.converted:
            return UNSCALED
        if weights_of(self.model, self.digests) == "original":
            return UNSCALED
        return self.model.scaling

    @cached_property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of the weight files of a converted model, which are read once; empty for a source."""
        if not self.model.converted:
            return {}
        return {name: sha256(self.model.folder / name) for name in weight_files(self.model.source)}

    def scaled(self, scaling: Scaling) -> Any:
        """The model under a scaling, in evaluation mode; do not use an earlier one after this call."""
        if self._loaded is not None and self._loaded[0] == scaling:
            return self._loaded[1]
        if self.imported is not None:
            model = self._loaded[1] if self._loaded else self._load_imported(self.imported)
            alibi = model.base_model.alibi
            layers = self.model.geometry.num_layers
            model.config.alibi_scaling = scaling.to_json()  # from which caches know the size of heads
            model.base_model.alibi = type(alibi)(self.stock, scaling.to_json(), layers)
        else:
            self._loaded = None  # freed before the next one is loaded
            model = self._load_rotary(scaling)
        self._loaded = scaling, model
        return model

    def check_float16(self, scalings: Sequence[Scaling], tokens: int) -> None:
        """Raises ``UsageError`` if float16 does not hold a concave penalty for texts of so many tokens."""
        held = [scaling.float16_length for scaling in scalings if scaling.float16_length is not None]
        if not held or tokens <= min(held):
            return
        if self.scaled(self.baseline).dtype == torch.float16:
            raise UsageError(
                f"float16 holds a concave penalty for up to {min(held)} tokens of this model, and there are "
                f"texts of {tokens}; give {option.dtype} bf16"
            )

    @property
    def other_code(self) -> bool:
        """Whether it is a converted repository with other code than is measured: this version's."""
        source, templates = self.model.source, templates_folder()
        names = [name for name in self.model.templates if name in source.files]
        return any(source.read(name) != (templates / name).read_bytes() for name in names)

    def complete(
        self, scaling: Scaling, prompts: Sequence[Sequence[int]], max_new_tokens: int, advance: Advance = int
    ) -> list[str]:
        """Continues each prompt greedily under a scaling."""
        model = self.scaled(scaling)
        return complete(model, self.tokenizer, self.hardware, prompts, max_new_tokens, advance)

    def losses(self, scaling: Scaling, batch: Batch, advance: Advance = int) -> NDArray[np.float64]:
        """The negative log-likelihood of each target under a scaling; see ``runner.losses``."""
        model = self.scaled(scaling)
        return losses(model, self.hardware, batch, advance)

    def describe(self, scaling: Scaling) -> dict[str, Any]:
        model = self.scaled(scaling)
        devices = set(getattr(model, "hf_device_map", {"": model.device}).values())
        found = about(self.model)
        if self.other_code:
            found["code"] = OTHER_CODE
        found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        found["dtype"] = str(model.dtype).removeprefix("torch.")
        found["device"] = ", ".join(sorted(map(str, devices)))
        if self.predicts_masked:
            found["predicts"] = "masked tokens"
        return found

    def _load_imported(self, imported: ImportedRepository) -> Any:
        named = imported.model.result_config["auto_map"]
        if not self.model.decoder:
            model_class = imported.architecture
        elif CAUSAL in named:
            model_class = getattr(imported.modeling, named[CAUSAL].partition(".")[2])
        else:
            raise UnsupportedModel(f"{self.model.name} has no language model, which evaluation needs")
        config = imported.build_config(alibi_scaling=None)
        model = self._load(model_class, imported.model.folder, config=config)
        self.stock = tuple(model.base_model.alibi.slopes[0])
        return model

    def _load_rotary(self, scaling: Scaling) -> Any:
        folder = self.work / f"rotary-{len(list(self.work.iterdir()))}"
        _convert(self.model, folder, scaling, known=self.digests)
        return self._load(AutoModelForCausalLM, folder, trust_remote_code=False)

    def _load(self, model_class: Any, folder: Path, **arguments: Any) -> Any:
        if self._dtype is None:  # chosen once, so all scalings use the same dtype
            self._dtype = self.chosen_hardware.dtype_of(read_checkpoint(folder).parameters)
        if self.chosen_hardware.spread:
            arguments |= {"device_map": "auto", "offload_folder": self.work / "offload"}
        try:
            with unlogged():
                model, found = model_class.from_pretrained(
                    folder, dtype=self._dtype, use_safetensors=True, output_loading_info=True, **arguments
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # damaged weights can raise anything
            if out_of_memory(error):
                raise
            raise SourceError(f"{self.model.name} does not load ({reason(error)})") from error
        if found["missing_keys"]:
            lacking = min(found["missing_keys"])
            if not self.model.decoder:
                raise SourceError(f"{self.model.name} lacks the tensor {lacking}; download it again")
            raise UnsupportedModel(
                f"{self.model.name} has no language model, which evaluation needs: {lacking} is not stored"
            )
        return model.eval() if self.chosen_hardware.spread else model.to(self.chosen_hardware.device).eval()


def about(model: Model) -> dict[str, Any]:
    """What results record about a model, wherever it runs."""
    found = {
        "family": model.kind,
        "commit": model.source.commit,
        "train_length": model.trained.tokens,
        "heads": model.geometry.num_heads,
        "layers": model.geometry.num_layers,
        "vocabulary": model.config_json.get("vocab_size"),
    }
    if model.overrides:
        found["set"] = dict(model.overrides)
    return found


def open_language_model(
    model: str | Path, *, progress: bool = False, **options: Unpack[SourceOptions]
) -> Model:
    """Opens a checkpoint whose config and tokenizer evaluation can use, or an encoder."""
    opened = open_model(model, progress=progress, **options)
    source, config = opened.source, opened.config_json
    if opened.decoder and auto_class(config) not in (CAUSAL, "AutoModel"):
        raise UnsupportedModel(
            f"{source.name} has no language model, which evaluation needs: config.json says "
            f"{plain_text(config['architectures'][0])}"
        )
    if not opened.tokenizer.here:
        raise SourceError(
            f"{source.name} has no tokenizer that loads without remote code, and evaluation needs one"
        )
    return opened


@contextlib.contextmanager
def open_evaluated_model(
    model: str | Path,
    hardware: Hardware,
    *,
    check: Callable[[Model], object] = bool,
    progress: bool = False,
    **options: Unpack[SourceOptions],
) -> Iterator[EvaluatedModel]:
    """Opens a checkpoint, stock or converted, for evaluation; see ``evaluate`` for what it raises.

    ``check`` is called before the weights are downloaded and verified. It raises for what is wrong with the
    evaluation.
    """
    opened = open_language_model(model, progress=progress, **options)
    check_encoder_head(opened)
    check(opened)
    source = opened.source
    fetch(source, [CONFIG, *small_files(source.files), *weight_files(source)])
    if not isinstance(opened, AlibiModel):
        check_weights(source, weight_files(source))  # else the conversion does
    with tempfile.TemporaryDirectory(prefix="ntk-convert-") as name, contextlib.ExitStack() as stack:
        work = Path(name)
        folder, imported = source.folder, None
        if isinstance(opened, AlibiModel):
            folder = work / "model"
            repository = _convert(opened, folder, UNSCALED, progress=progress)
            assert isinstance(repository, AlibiModel)
            imported = stack.enter_context(ImportedRepository.load(repository))
        tokenizer = load_tokenizer(folder, source.name, imported)
        evaluated = EvaluatedModel(opened, tokenizer, hardware, work, imported)
        try:
            yield evaluated
        except torch.OutOfMemoryError as error:
            raise UsageError(
                "the device does not have enough memory; give shorter lengths, a smaller "
                f"{option.batch_size}, or {option.device} auto or cpu"
            ) from error
        finally:
            evaluated._loaded = None
            if hardware.device.type == "cuda":
                torch.cuda.empty_cache()


def _convert(
    model: Model, folder: Path, scaling: Scaling, *, known: Mapping[str, str] = {}, progress: bool = False
) -> Model:
    """Converts local files and verifies the result, which does not outlive the evaluation."""
    plan = decide(model, request_for(scaling, model.trained.tokens), link="symbolic")
    if not isinstance(model, AlibiModel):  # converted for each scaling, and compared when it was opened
        plan = replace(plan, weights=plan.weights.without_digests())
    fetch(model.source, plan.wanted)
    folder.mkdir()
    repository = write(plan, folder, known=known, progress=progress).model
    verify(repository, model.source_config, model.source.folder, progress=progress)
    return repository
