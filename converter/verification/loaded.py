"""Checks the result as its users load it: with an Auto class, from a folder, beside the source's own model.

The other checks put tensors into classes. What goes wrong on the way from the files to a running model shows
here only: a head that gets no values, a config that leads elsewhere, a cache that ``generate`` does not fill.
Both folders are truncated, see ``truncated.py``.
"""

from __future__ import annotations

import math
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import DynamicCache, FalconPreTrainedModel, GenerationConfig, PretrainedConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from converter.config import Config
from converter.errors import ConverterError, VerificationError, reason
from converter.source.jsonfile import read_object
from converter.source.open import open_folder
from converter.source.source import CONFIG, VOCABULARIES
from converter.source.tokenizer import TOKENIZER_CONFIG, VOCABULARY_ENDS, our_class
from converter.verification.alone import ALONE
from converter.verification.check import Check, not_ours
from converter.verification.imported import ImportedRepository
from converter.verification.truncated import BLOCK, TruncatedCheckpoint

NAME = "loading"
LEFT = "that the layers compute what the source's code does was tested for the family, not with these weights"
"""What a check without the stock model leaves unverified."""
PADDING, NEW = 5, 4
"""Tokens: of padding in the second row, and generated."""
TOLERANCE, HALF_TOLERANCE = 1e-4, 3e-2
"""Largest difference, relative to the largest value, that rounding can explain: in float32, and in half."""
BETWEEN_DTYPES = 0.1
"""The same between half precision and float32: large values in a few channels cost all others bits."""
REDIRECTS = ("configuration_files", "transformers_weights")
"""Keys of config.json by which transformers reads other files than those of the usual names."""
TEXTS = (
    "The quick brown fox, 3.5 x 12!",
    "  def f(x):\n\treturn x\n\n",
    "Zażółć gęślą jaźń. 東京 🙂",
    "w5 w6",
)
REMOTE: Any = transformers.dynamic_module_utils
DYNAMIC: str = REMOTE.TRANSFORMERS_DYNAMIC_MODULE_NAME

Outputs = dict[str, torch.Tensor]


@torch.no_grad()
def check_loading(imported: ImportedRepository, source_config: Config, source: Path | None = None) -> Check:
    """Loads the first layers of the result, and of its source if transformers has a class for it.

    Raises ``VerificationError`` if it does not load, does not run, or is not what the checkpoint says.
    """
    part = TruncatedCheckpoint.of(imported)
    with tempfile.TemporaryDirectory(prefix="ntk-convert-") as place, own_modules(Path(place)):
        result, stock = (Path(place) / f"{name}_{uuid.uuid4().hex}" for name in ("result", "source"))
        result.mkdir()
        weights = part.write_result(result)
        ours = run_result(part, result, weights)
        stock.mkdir()
        compared = compare(part, ours, run_stock(part, source_config, stock, weights))
        tokens = compare_tokenizers(imported.model.folder, result, source)
    return Check(NAME, f"{part.which} loaded as users do: {compared}{tokens}")


def run_result(part: TruncatedCheckpoint, folder: Path, weights: Path) -> Outputs:
    """What the result computes; raises ``VerificationError`` for all that is wrong without its source."""
    imported, family = part.imported, part.imported.model.family
    config = imported.model.result_config
    [named] = config["architectures"]
    read, written = PretrainedConfig.get_config_dict(folder)[0], read_object(folder / CONFIG)
    redirects = " and ".join(key for key in REDIRECTS if key in config)
    remedy = f"; remove {redirects} from config.json" if redirects else ""
    changed = next((key for key in written if key not in read or read[key] != written[key]), None)
    if changed is not None:
        raise VerificationError(
            f"transformers reads another value of {changed!r} than config.json has{remedy}"
        )
    if config.get("auto_map") != family.auto_map:  # not tried, since it could name other code
        raise VerificationError(f"auto_map in config.json does not lead to {named}; convert the source again")
    with failing("the result does not load", remedy, folder):
        model, info = load_result(imported, folder, part.dtype)
    kind = type(model)
    if kind.__name__ != named or kind.__module__.partition(".")[0] != DYNAMIC:
        raise VerificationError(
            f"transformers loads {kind.__module__}.{kind.__name__} from the result, not its own "
            f"{named}{remedy}"
        )
    if (problem := fault(part, model, info, weights)) is not None:
        raise VerificationError(f"loaded with transformers {transformers.__version__}, {problem}{remedy}")
    with failing("the result does not run", remedy, folder):
        found = measure(part, model)
    states = float(found["hidden states"].abs().max())
    if not all(output.isfinite().all() for output in found.values()) or states == 0:
        raise VerificationError(f"with scale 1, the output of {part.which} is not a number: {cause(weights)}")
    if imported.model.has_cache:
        worst = difference(found["logits without a cache"], found["logits in decoding"])
        if not worst < tolerance(part):
            raise VerificationError(
                f"decoding with a cache, {named} differs from a pass without one by {worst:.2e} (relative; "
                f"at most {tolerance(part):g})"
            )
    check_default_dtype(part, folder, found, remedy)
    return found


def check_default_dtype(part: TruncatedCheckpoint, folder: Path, expected: Outputs, remedy: str) -> None:
    """Raises ``VerificationError`` if the result fails in the dtype that it gets where a user gives none.

    Transformers 5 takes that of config.json or of the weights, and 4.57 takes float32. In half precision, a
    value may overflow, as in the stock model.
    """
    with failing("the result does not load", remedy, folder):
        model, _ = load_result(part.imported, folder, None)
    if model.dtype == part.dtype:
        return
    dtype = str(model.dtype).removeprefix("torch.")
    with failing(f"in {dtype}, which transformers chooses, the result does not run", remedy, folder):
        found = measure(part, model)
    most = TOLERANCE if min(part.dtype.itemsize, model.dtype.itemsize) >= 4 else BETWEEN_DTYPES
    for output, values in found.items():
        finite = values.isfinite()
        if not finite.any():
            continue
        worst = difference(expected[output][finite], values[finite])
        if not worst < most:
            raise VerificationError(
                f"in {dtype}, which transformers chooses, the {output} of {part.which} differ from those in "
                f"{str(part.dtype).removeprefix('torch.')} by {worst:.2e} (relative; at most {most:g})"
            )


def load(
    model_class: Any, folder: Path, dtype: torch.dtype | None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """A model from a folder, ready to run, and what transformers says about the loading.

    Without ``dtype``, transformers chooses it.
    """
    if dtype is not None:
        options["dtype"] = dtype
    model, info = model_class.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, **options
    )
    return model.eval(), info


def load_result(
    imported: ImportedRepository, folder: Path, dtype: torch.dtype | None
) -> tuple[Any, dict[str, Any]]:
    """``load`` for a repository's own folder or a truncated one, with its code; within ``own_modules``."""
    [named] = imported.model.result_config["architectures"]
    name = next(auto for auto, at in imported.model.family.auto_map.items() if at.endswith(f".{named}"))
    auto = getattr(transformers, name)
    return load(auto, folder, dtype, trust_remote_code=True)


def fault(part: TruncatedCheckpoint, model: Any, info: dict[str, Any], weights: Path) -> str | None:
    """What is wrong with the values of a loaded model; None if all are the checkpoint's."""
    imported, family = part.imported, part.imported.model.family
    ignored = imported.model.ignored_tensors
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        for name in sorted(map(str, info[kind])):
            if not ignored.search(name):
                return f"{name!r} is reported under {kind}"
    for name, tensor in model.state_dict(keep_vars=True).items():
        stored = imported.stored_name(name)
        if tensor.is_meta:
            return f"{name!r} has no values"
        if stored is None and name == family.head:
            stored = imported.stored_name(f"{family.base_prefix}.{family.embeddings}")
            if tensor is not model.get_input_embeddings().weight:
                return f"{name!r} is not tied to the embeddings"
        with safe_open(weights, framework="pt") as file:
            if stored is not None and not equal(tensor, file.get_tensor(stored)):
                return f"{name!r} has other values than the checkpoint's {stored!r}"
    lost = next((name for name, buffer in model.named_buffers() if buffer.is_meta), None)
    return None if lost is None else f"{lost!r} has no values"


def equal(tensor: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether they are the same numbers; a stored one is rounded if it is wider."""
    pairs = zip(*(each.detach().flatten().split(BLOCK) for each in (tensor, stored)), strict=True)
    return tensor.shape == stored.shape and all(torch.equal(a, b.to(a.dtype)) for a, b in pairs)


def measure(part: TruncatedCheckpoint, model: Any) -> Outputs:
    """What a model computes for the test's tokens, with and without padding, and decoding with a cache."""
    ids, found = part.ids, {}
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    for words, given, real in ((" with padding", mask, mask), ("", None, torch.ones_like(ids))):
        output = model(ids, attention_mask=given, output_hidden_states=True, return_dict=True)
        tensors = {"hidden states": output.hidden_states[-1]}
        tensors |= {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}
        if part.imported.model.has_cache and given is not None:
            found["logits in decoding"] = decode(model, ids, mask).float()
            found["logits without a cache"] = output.logits[:, -NEW - 1 : -1].float()
        for name, value in tensors.items():
            value = value[real.bool()] if value.shape[:2] == ids.shape else value
            found[name.replace("_", " ") + words] = value.float()
    return found


def decode(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The logits [rows, NEW, vocabulary] with which ``generate`` would choose the last of these tokens."""
    prompt = ids.shape[1] - NEW
    if any(DynamicCache(config=model.config).is_sliding):
        raise VerificationError(
            f"generate gives {type(model).__name__} a cache with a window, and attention has none; remove "
            "sliding_window and layer_types from config.json"
        )

    def force(seen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -math.inf).scatter(1, ids[:, seen.shape[1], None], 0.0)

    model.generation_config = GenerationConfig(
        max_new_tokens=NEW,
        do_sample=False,
        use_cache=True,
        pad_token_id=model.config.pad_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    output = model.generate(ids[:, :prompt], attention_mask=mask[:, :prompt], logits_processor=[force])
    cache = output.get("cache", output.get("past_key_values"))  # 5.24 shortened its name
    filled = 0 if cache is None else cache.get_seq_length()
    if filled != ids.shape[1] - 1:
        raise RuntimeError(f"generate leaves {filled} of {ids.shape[1] - 1} tokens in the cache")
    return torch.stack(output.logits, dim=1)


def run_stock(part: TruncatedCheckpoint, config: Config, folder: Path, weights: Path) -> Outputs | str:
    """What transformers' own class computes, or why it is no measure."""
    imported, family = part.imported, part.imported.model.family
    unfit = family.stock_unfit(config) if family.stock else "transformers has no class for this model"
    if unfit is not None:
        return unfit
    stock_class = getattr(transformers, f"{family.camel}{imported.model.head}")
    settings = {key: value for key, value in family.template_config(config).items() if key != "auto_map"}
    part.write_source(folder, {**settings, "model_type": stock_class.config_class.model_type}, weights)
    try:  # transformers 5 rejects types that older versions and other code accept
        model, info = load(stock_class, folder, part.dtype)
        problem = fault(part, model, info, weights)
        if isinstance(model, FalconPreTrainedModel):
            unround_bias(model.base_model)
        return measure(part, model) if problem is None else f"in transformers' own class {problem}"
    except ConverterError:
        raise
    except Exception as error:
        if not_ours(error):
            raise
        return f"transformers' own class does not run it ({reason(error)})"


def compare(part: TruncatedCheckpoint, ours: Outputs, stock: Outputs | str) -> str:
    """What the comparison found; raises ``VerificationError`` if it is a difference."""
    precision = str(part.dtype).removeprefix("torch.")
    checked = "all values are the checkpoint's, and decoding with a cache gives what a pass without one gives"
    if not part.imported.model.has_cache:
        checked = "all values are the checkpoint's"
    if isinstance(stock, str):
        return f"{checked}, in {precision}; not compared with the stock model, since {stock}; {LEFT}"
    name = f"{part.imported.model.family.camel}{part.imported.model.head}"
    differences = {output: difference(stock[output], ours[output]) for output in stock if output in ours}
    for output, worst in differences.items():
        if not worst < tolerance(part):
            raise VerificationError(
                f"with scale 1, the {output} of {part.which} differ from those of stock {name} "
                f"by {worst:.2e} (relative; at most {tolerance(part):g})"
            )
    return (
        f"{checked}; with scale 1, it computes what transformers' {name} does in {precision}; largest "
        f"relative difference {max(differences.values()):.1e}"
    )


def tolerance(part: TruncatedCheckpoint) -> float:
    return TOLERANCE if part.dtype.itemsize >= 4 else HALF_TOLERANCE


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest one, relative to the largest value; 0 where all are 0."""
    largest = (expected - found).abs().max()
    return float(largest / expected.abs().max()) if largest else 0.0


def cause(weights: Path) -> str:
    """The weight that most likely made an output NaN."""
    with safe_open(weights, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- it is no dict
        largest = {name: float(each.abs().max()) for name, each in tensors.items() if each.dim() > 1}
    zeros = [name for name, value in largest.items() if value == 0]
    name = zeros[0] if zeros else max(largest, key=lambda name: largest[name])
    what = "holds zeros only" if zeros else f"has values up to {largest[name]:.1e}"
    return f"the tensor {name!r} {what}; download the checkpoint again"


def compare_tokenizers(repository: Path, truncated: Path, source: Path | None) -> str:
    """Whether the result's tokenizer gives the source's ids; raises ``VerificationError`` if it does not.

    It is loaded from the truncated folder, which links its files. Empty if there is nothing to compare.
    """
    names = [path.name for path in repository.iterdir()]
    if source is None or not any(name in VOCABULARIES or name.endswith(VOCABULARY_ENDS) for name in names):
        return ""
    ours = token_ids(truncated, trust_remote_code=True)
    if isinstance(ours, ImportError):
        return f"; token ids not compared ({reason(ours)})"
    if our_class(open_folder(repository).object(TOKENIZER_CONFIG)) is not None and isinstance(ours, list):
        return "; token ids not compared: the source's tokenizer is its own code"
    theirs = token_ids(source, trust_remote_code=False)
    if isinstance(theirs, Exception):
        return f"; token ids not compared: the source's tokenizer does not load ({reason(theirs)})"
    if isinstance(ours, Exception):
        raise VerificationError(
            f"the result's tokenizer does not load ({reason(ours)}), and its source's does"
        )
    for text, mine, other in zip(TEXTS, ours, theirs, strict=True):
        if mine != other:
            raise VerificationError(
                f"the result's tokenizer gives {text!r} the ids {mine}, its source's {other}"
            )
    return "; the same token ids as the source's tokenizer"


def token_ids(folder: Path, *, trust_remote_code: bool) -> list[list[int]] | Exception:
    """The ids of ``TEXTS``, or why there are none."""
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        return [tokenizer(text, verbose=False)["input_ids"] for text in TEXTS]
    except Exception as error:  # a damaged file can raise anything
        if not_ours(error):
            raise
        return error


@contextmanager
def failing(what: str, remedy: str, folder: Path) -> Iterator[None]:
    """An error in this context is a ``VerificationError`` that begins with ``what``."""
    try:
        yield
    except ConverterError:
        raise
    except Exception as error:  # transformers, running a model, can raise anything
        if not_ours(error):
            raise
        why = reason(error).replace(str(folder), "its folder")
        raise VerificationError(
            f"{what} with transformers {transformers.__version__} ({why}){remedy}"
        ) from error


@contextmanager
def own_modules(folder: Path) -> Iterator[None]:
    """In this context, repositories' code is copied to and imported from ``folder``; nothing of it stays."""

    def dynamic() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == DYNAMIC]

    with ALONE:
        kept = {name: sys.modules.pop(name) for name in dynamic()}
        before = REMOTE.HF_MODULES_CACHE, sys.path[:], sys.dont_write_bytecode
        registered = [(classes, dict(classes)) for classes in registers()]
        REMOTE.HF_MODULES_CACHE, sys.dont_write_bytecode = str(folder), True
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            REMOTE.HF_MODULES_CACHE, sys.path[:], sys.dont_write_bytecode = before
            for name in dynamic():
                del sys.modules[name]
            sys.modules.update(kept)
            for classes, earlier in registered:
                classes.clear()
                classes.update(earlier)


def registers() -> list[dict[Any, Any]]:
    """Where the Auto classes keep the classes of repositories that were loaded."""
    auto: Any = transformers.models.auto
    modules = (auto.configuration_auto, auto.modeling_auto, auto.tokenization_auto)
    mappings = [mapping for module in modules for mapping in vars(module).values()]
    return [mapping._extra_content for mapping in mappings if hasattr(mapping, "_extra_content")]


def unround_bias(stock: Any) -> None:
    """Gives the layers of a stock Falcon its bias without the rounding to bfloat16 that it has in any dtype.

    Stock BLOOM has the same function without the rounding. ``stock`` is a backbone that computes attention
    with sdpa, for which the bias is part of the mask.
    """
    heads = stock.config.num_attention_heads
    scale = (stock.config.hidden_size // heads) ** -0.5

    def exact(_: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        mask = keywords["attention_mask"]  # [B, H, Q, K]
        hidden = mask == torch.finfo(mask.dtype).min
        real = (~hidden[:, 0, -1]).long()  # the last query sees every real key
        bias = build_alibi_tensor(real, heads, mask.dtype).view(len(mask), heads, 1, -1)
        return arguments, keywords | {"attention_mask": torch.where(hidden, mask, scale * bias)}

    for layer in stock.h:
        layer.register_forward_pre_hook(exact, with_kwargs=True)
