"""Verification passes correct repositories and catches every kind of mistake."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from converter import SourceError, UsageError, VerificationError, convert
from converter.result.converted import open_converted
from converter.verification import verify
from tests import tiny
from tests.conftest import edit_json
from tests.dealt import dealt
from tests.messages import Words, raises
from tests.patched import (
    CHECKED,
    FAMILIES,
    FITTED,
    HEADS,
    SCALINGS,
    STOCK,
    VARIANTS,
    Convert,
    Mistaken,
    config_of,
)
from tests.runners import LAYERS, expected
from tests.tiny.layout import Tensors, change_tensors


def run(folder: Path, source: Path) -> dict[str, Any]:
    """The checks of a folder, which stays as it is."""
    before = sorted(folder.iterdir())
    checks = verify(open_converted(folder), config_of(source), source)
    assert sorted(folder.iterdir()) == before
    return {check.name: check for check in checks}


def compared_with_stock(checks: dict[str, Any]) -> bool:
    return "not compared with the stock model" not in checks["loading"].detail


EVERY = [(scaling, HEADS[number % 3]) for number, scaling in enumerate((*SCALINGS, *FITTED))]


@pytest.mark.parametrize(("family", "case"), dealt(FAMILIES, EVERY, each=2), ids=str)
def test_right_repositories_pass(
    converted: Convert, tmp_path: Path, family: str, case: tuple[str, int]
) -> None:
    scaling, heads = case
    checks = run(converted(family, heads, scaling), tmp_path / "source")
    assert list(checks) == CHECKED
    assert not any(check.skipped for check in checks.values())
    assert compared_with_stock(checks) == (family in STOCK)


@pytest.mark.parametrize(
    ("layer", "scaling"),
    dealt(LAYERS, ["ntk", "by-parts", "linear-length", "ntk-position", *FITTED, "by-parts-tempered"]),
)
def test_right_encoders_pass(converted: Convert, tmp_path: Path, layer: str, scaling: str) -> None:
    family, changes = LAYERS[layer]
    checks = run(converted(family, 12, scaling, **changes), tmp_path / "source")
    assert list(checks) == CHECKED
    assert not compared_with_stock(checks)


@pytest.mark.parametrize(
    "variant", [name for name, (family, _) in VARIANTS.items() if family in STOCK and name != "bloom-untied"]
)
def test_options_pass_or_say_why_the_stock_model_is_no_measure(
    converted: Convert, tmp_path: Path, variant: str
) -> None:
    family, changes = VARIANTS[variant]
    checks = run(converted(family, 8, "ntk", **changes), tmp_path / "source")
    option = variant.removeprefix(f"{family.replace('_', '-')}-")
    ignored_by_stock = option in tiny.CHECKPOINTS[family].beyond_stock
    assert compared_with_stock(checks) != ignored_by_stock
    assert not ignored_by_stock or "stock transformers" in checks["loading"].detail


def large_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer counts as large: one is run, in the dtype in which it is stored."""
    monkeypatch.setattr("converter.verification.truncated.LARGEST_PAIR", 0)
    monkeypatch.setattr("converter.verification.truncated.LARGEST_FLOAT32", 0)
    monkeypatch.setattr("converter.verification.truncated.BLOCK", 1000)


HALF = [*dealt(STOCK, [torch.bfloat16, torch.float16], [False]), *((f, torch.bfloat16, True) for f in STOCK)]


@pytest.mark.parametrize(("family", "dtype", "large"), HALF)
def test_half_precision_checkpoints_pass(
    converted: Convert,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    dtype: torch.dtype,
    large: bool,
) -> None:
    if large:
        large_layers(monkeypatch)
    checks = run(converted(family, 12, "ntk", dtype=dtype), tmp_path / "source")
    precision = str(dtype).removeprefix("torch.") if large else "float32"
    assert f"in {precision}" in checks["loading"].detail
    assert f"the first {'layer' if large else '2 layers'} of 2" in checks["loading"].detail


@pytest.mark.parametrize("family", [*FAMILIES, *tiny.ENCODERS])
def test_double_precision_checkpoints_pass_and_compute_what_they_do_by_default(
    converted: Convert, tmp_path: Path, family: str
) -> None:
    folder = converted(family, 4, dtype=torch.float64)
    if family in ("bloom", "baichuan", "jina_bert"):
        run(folder, tmp_path / "source")
    auto = AutoModelForMaskedLM if family in tiny.ENCODERS else AutoModelForCausalLM
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    assert model.dtype == (torch.float32 if OLD else torch.float64)
    ids = tiny.token_ids(2, 20)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)).logits.numpy()
    right = expected(folder, family, ids)
    assert np.abs(logits - right).max() < 1e-5 * np.abs(right).max()


def test_a_model_that_runs_in_float32_only_is_caught(
    converted: Convert, mistaken: Mistaken, tmp_path: Path
) -> None:
    if OLD:
        pytest.skip("transformers 4.57 loads every checkpoint as float32")
    mistaken("torch.promote_types(self.weight.dtype, torch.float32)", "torch.float32")
    folder = converted("baichuan", 4, dtype=torch.float64)
    with raises(VerificationError, "float64"):
        run(folder, tmp_path / "source")


@pytest.mark.parametrize("metadata", [None, []])
def test_an_index_that_transformers_cannot_load_is_caught(
    converted: Convert, tmp_path: Path, metadata: Any
) -> None:
    folder = converted("bloom", 4, sharded=True)
    edit_json(folder / "model.safetensors.index.json", {"metadata": metadata})
    with pytest.raises(VerificationError, match="the result does not load"):
        run(folder, tmp_path / "source")


Mistakes = dict[str, tuple[str, str]]
SLOPE, FUSED, TILED = "runs with a penalty", "fused attention differs", "tiled attention differs"
LAYER, QUERIES = r"head \d+ of layer [01] runs with", r"queries .* at \d+ tokens, not"
NOT_SCALED = {
    "not-scaled": ("[m * factor**-t for m, t in zip(slopes, row, strict=True)]", "list(slopes)"),
}
SPAN = {"span": ("math.log(5 / m)", "math.log(6 / m)")}
OTHER_LAYERS = {
    "the-first-layer's": ("row = self.layer_idx", "row = 0"),
    "the-other-layer's": ("row = self.layer_idx", "row = 1 - self.layer_idx"),
}
UNLIKE_STOCK = {
    "activation": ('approximate="tanh"', 'approximate="none"'),
    "layout": ("query, key, value = (part", "key, query, value = (part"),
}
DISTANCES = "(slots[:, None] - torch.arange(keys, device=slots.device)).abs()"
EVEN_BOUNDS = "bounds = torch.linspace(0, len(slots), len(begins) + 1).long()"
AFTER = "torch.arange(keys) > slots[:, None]"
WRONG_CODE: list[tuple[str, str, str, Mistakes]] = [
    # A checkpoint, its scaling, the message, and what gives it: the correct code, and what replaces it.
    (
        "bloom",
        "ntk",
        SLOPE,
        NOT_SCALED
        | {
            "exponent": (
                "(top - math.log(m)) / (top - bottom)",
                "0.9 * (top - math.log(m)) / (top - bottom)",
            ),
            "lowest-digit": ("positions % BASE / BASE", "positions % BASE / 128"),
            "cached-positions": ("new + seen, quantised", "new, quantised"),
            "cache": (
                "room[..., seen : seen + new, : states.shape[-1]] = states",
                "room[..., seen - (seen > 0) : seen - (seen > 0) + new, : states.shape[-1]] = states",
            ),
        },
    ),
    ("bloom", "ntk", FUSED, {"padding-channel": ("(~real) * PADDED_KEY", "real * 0.0")}),
    (
        "bloom",
        "ntk",
        "chunked attention differs",
        {"chunk-mask": ("queries == cache.keys", "queries <= cache.keys")},
    ),
    (
        "bloom",
        "ntk",
        "decoding attention differs",
        {
            "decoding": (
                "value[:, :, : plan.key_length]",
                "value[:, :, : plan.key_length].roll(int(len(plan.slots) == 1), 2)",
            )
        },
    ),
    ("bloom", "ntk", "those of stock", UNLIKE_STOCK),
    (
        "bloom",
        "ntk",
        "'transformer.extra.bias' is missing, and 1 more",
        {"extra-module": ("        self.ln_f =", "        self.extra = nn.Linear(2, 2); self.ln_f =")},
    ),
    ("bloom", "ntk-length", SLOPE, {"rate": ("self.rate * tokens.float()", "tokens.float()")}),
    ("bloom", "by-parts", SLOPE, SPAN),
    (
        "bloom",
        "concave",
        SLOPE,
        {
            "whole-line": ("(slopes - power * curves / tokens)", "(slopes + 0 * curves)"),
            "other-end": ("tokens / power)", "tokens / 2)"),
            "no-curve": ("return cache.keys <= alibi.train_length", "return True"),
            "curve-unscaled": ("alibi.power) / scaling", "alibi.power)"),
            "other-keys": ("(positions.to(wide) + 1)", "positions.to(wide)"),
        },
    ),
    ("falcon", "by-parts", SLOPE, SPAN),
    ("mpt", "by-parts-length", SLOPE, SPAN),
    (
        "mpt-bias-max-16",
        "ntk",
        SLOPE,
        {"bias-max": ('config.attn_config.get("alibi_bias_max", 8)', "8")},
    ),
    ("falcon", "ntk", SLOPE, {"bias-twice": ("slope * config.score_scale for", "slope for")}),
    *(("bloom", fitted, f"{LAYER} a penalty", OTHER_LAYERS) for fitted in FITTED),
    (
        "bloom",
        "fitted",
        f"{LAYER} {QUERIES}",
        {
            "temperatures-dropped": ("(query * factors[..., None])", "query"),
            "other-heads'-temperatures": (
                "query * factors[..., None]",
                "query * factors.roll(1, 1)[..., None]",
            ),
            "temperatures-twice": ("query * factors[..., None]", "query * factors[..., None] ** 2"),
        },
    ),
    (
        "bloom",
        "fitted-position",
        f"{LAYER} {QUERIES}",
        {
            "other-layer's-temperatures": ("plan.query_factors[row]", "plan.query_factors[1 - row]"),
            "temperatures-divided": ("query * factors[..., None]", "query / factors[..., None]"),
        },
    ),
    (
        "bloom",
        "fitted-position",
        rf"{LAYER} a penalty .* tokens, not",
        {
            "temperatures-of-the-bias-too": (
                "fold(query, channels)",
                "fold(query, channels) * factors[..., None]",
            )
        },
    ),
    *(
        (
            family,
            scaling,
            rf"head \d+ runs with {QUERIES}",
            {mistake: (right, mistake)},
        )
        for family, scaling, right, mistake in (
            ("falcon", "by-parts-tempered", "factor**u for u", "factor ** bool(u) for u"),
            ("bloom", "by-parts-position-tempered", "** temperatures", "** temperatures**2"),
            ("mosaic_bert", "ntk-length-tempered", "** temperatures", "** temperatures.ceil()"),
        )
    ),
    # Encoders
    (
        "mosaic_bert",
        "ntk",
        SLOPE,
        NOT_SCALED
        | {
            "one-sided": (DISTANCES, DISTANCES.removesuffix(".abs()")),
            "rightwards-steeper": (DISTANCES, f"{DISTANCES} * torch.where({AFTER}, 2, 1)"),
        },
    ),
    ("mosaic_bert", "ntk-length", SLOPE, {"padding-counts": ("(real.cumsum(-1) - 1)", "(0 * real + 200)")}),
    (
        "mosaic_bert",
        "fitted",
        SLOPE,
        {"other-layer's-slopes": ("in zip(plans, self", "in zip(plans[:1] * len(plans), self")},
    ),
    (
        "mosaic_bert",
        "fitted",
        "runs with queries",
        {
            "temperatures-dropped": ("if plan.query_factors is not None:", "if False:"),
            "other-layer's-temperatures": (
                "zip(slopes, factors, strict=True)",
                "zip(slopes, factors.flip(0), strict=True)",
            ),
        },
    ),
    (
        "mosaic_bert",
        "ntk",
        FUSED,
        {
            "toeplitz-shifted": ("(start - queries + 1)", "(start - queries)"),
            "toeplitz-not-reversed": ("reverse = query.flip(2)", "reverse = query"),
            "text-without-its-first-key": ("key[:, :, span]", "key[:, :, span].roll(1, 2)"),
            "text-in-other-places": (
                "0, slots, hidden_states[0]",
                "0, slots.flip(0), hidden_states[0]",
            ),
            "texts-of-one-length": ("bounds = F.pad(begins, (0, 1), value=len(slots))", EVEN_BOUNDS),
        },
    ),
    (
        "mosaic_bert",
        "ntk",
        TILED,
        {
            "tile-shifted": ("keys.start - queries.start", "keys.start"),
            "tile-of-other-heads": ("key[:, heads, keys]", "key.flip(1)[:, heads, keys]"),
            "far-keys": ("] * distances", "] * 100 * distances"),
            "only-earlier-keys": (
                "lasts = torch.maximum(lasts.clamp(max=length), stops)",
                "lasts = stops.expand_as(firsts)",
            ),
        },
    ),
    (
        "mosaic_bert",
        "ntk",
        "training attention differs",
        {"padding-seen": ("(~real)[:, None, :, None]", "(real & False)[:, None, :, None]")},
    ),
    (
        "mosaic_bert",
        "ntk-length",
        FUSED,
        {"first-text's-slopes": ("slopes[number, None]", "slopes[0, None]")},
    ),
    (
        "mosaic_bert",
        "ntk-position",
        FUSED,
        {
            "later-blocks-at-the-start": ("torch.arange(start, stop,", "torch.arange(stop - start,"),
            "first-block's-slopes": ("slopes[..., start:stop]", "slopes[..., : stop - start]"),
        },
    ),
]


@pytest.mark.parametrize(
    ("name", "scaling", "message", "before", "after"),
    [
        pytest.param(name, scaling, message, *mistake, id=f"{name}-{scaling}-{what}")
        for name, scaling, message, mistakes in WRONG_CODE
        for what, mistake in mistakes.items()
    ],
)
def test_wrong_code_is_caught(
    converted: Convert,
    mistaken: Mistaken,
    tmp_path: Path,
    name: str,
    scaling: str,
    message: str,
    before: str,
    after: str,
) -> None:
    mistaken(before, after)
    family, changes = VARIANTS.get(name, (name, {}))
    folder = converted(family, 12, scaling, **changes)
    with pytest.raises(VerificationError, match=message):
        run(folder, tmp_path / "source")


@pytest.mark.parametrize(
    ("mistake", "dtype"), [*((each, torch.float32) for each in UNLIKE_STOCK), ("layout", torch.bfloat16)]
)
def test_wrong_code_of_large_layers_is_caught(
    converted: Convert,
    mistaken: Mistaken,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mistake: str,
    dtype: torch.dtype,
) -> None:
    large_layers(monkeypatch)
    mistaken(*UNLIKE_STOCK[mistake])
    folder = converted("bloom", 12, "ntk", dtype=dtype)
    with pytest.raises(VerificationError, match="those of stock"):
        run(folder, tmp_path / "source")


OLD = transformers.__version__.startswith("4.")
NOT_TIED = "    backbone_class = NtkBloomModel\n    _tied_weights_keys"
WRONG_LOADING: dict[str, tuple[str, Mistakes]] = {
    # What ``from_pretrained`` and ``generate`` make of code that the other checks find right.
    "'lm_head.weight'": {
        "tie-not-made": (NOT_TIED, NOT_TIED.replace("\n", "\n    tie_weights = lambda *_, **__: None\n", 1)),
        "tied-to-another": (
            '{"lm_head.weight": "transformer.word_embeddings.weight"}\n\n\nclass NtkBloom',
            '{"lm_head.weight": "transformer.word_embeddings_layernorm.weight"}\n\n\nclass NtkBloom',
        ),
    },
    "the result does not run": {
        "generate-fails": (
            "    def project(self",
            "    _validate_model_kwargs = None\n\n    def project(self",
        )
    },
    "cover the cached ones": {
        "cache-dropped": (
            "return self.base_model(",
            "return [inputs.pop(name, 0) for name in ('cache', 'past_key_values')] and self.base_model(",
        ),
    },
}


@pytest.mark.parametrize(
    ("message", "before", "after"),
    [
        pytest.param(message, *mistake, id=what)
        for message, mistakes in WRONG_LOADING.items()
        for what, mistake in mistakes.items()
    ],
)
def test_wrong_code_that_shows_when_it_is_loaded(
    converted: Convert, mistaken: Mistaken, tmp_path: Path, message: str, before: str, after: str
) -> None:
    if OLD and "layernorm" in after:
        pytest.skip("transformers 4.57 reads only the names of tied weights")
    mistaken(before, after)
    folder = converted("bloom", 4)
    with pytest.raises(VerificationError, match=message):
        run(folder, tmp_path / "source")


def other_weights(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    edit_json(folder / "config.json", {"transformers_weights": "other.safetensors"})
    change_tensors(folder, lambda tensors: tensors["transformer.ln_f.bias"].add_(1))


def other_config(folder: Path) -> None:
    """As in a repository that has a config for each range of versions."""
    shutil.copy(folder.parent / "source/config.json", folder / "config.4.0.0.json")
    edit_json(folder / "config.json", {"configuration_files": ["config.4.0.0.json"]})


def keys(**changes: Any) -> Callable[[Path], None]:
    """Changes config.json of the result and of its source, from which a conversion copies its keys."""

    def change(folder: Path) -> None:
        for each in (folder, folder.parent / "source"):
            edit_json(each / "config.json", changes)

    return change


def mapped(auto_map: dict[str, str] | None) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", {"auto_map": auto_map})


def other_words(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["w5"], vocabulary["w6"] = vocabulary["w6"], vocabulary["w5"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


OWN_CONFIG = {"AutoConfig": "configuration_ntk_bloom.NtkBloomConfig"}
WRONG_FILES: dict[str, tuple[Callable[[Path], Any], Words]] = {
    "another config": (other_config, ("reads another", "remove configuration_files from config.json")),
    "other weights": (other_weights, "remove transformers_weights from config.json"),
    "weights that are not there": (
        keys(transformers_weights="other.safetensors"),
        ("does not load", "remove transformers_weights"),
    ),
    "no auto_map": (mapped(None), ("auto_map in config.json", "NtkBloomForCausalLM")),
    "another class in auto_map": (
        mapped({**OWN_CONFIG, "AutoModelForCausalLM": "modeling_ntk_bloom.NtkBloomModel"}),
        ("auto_map in config.json", "NtkBloomForCausalLM"),
    ),
    "a window": (keys(sliding_window=8, layer_types=["sliding_attention"] * 2), "remove sliding_window"),
    "a wide window": (keys(sliding_window=4096), "remove sliding_window"),
    "not causal": (keys(is_causal=False), "differ"),
    "a damaged tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        ("tokenizer", "does not load"),
    ),
    "another tokenizer": (other_words, ("tokenizer", "'w5 w6'")),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_files_that_load_as_something_else_are_caught(converted: Convert, tmp_path: Path, case: str) -> None:
    if OLD and case == "not causal":
        pytest.skip("transformers 4.57 does not read this key")
    change, words = WRONG_FILES[case]
    folder = converted("bloom", 4)
    change(folder)
    with raises(VerificationError, words) as raised:
        run(folder, tmp_path / "source")
    assert "\n" not in str(raised.value)


BIAS = "transformer.h.{}.mlp.dense_h_to_4h.bias"
NORM = "transformer.ln_f.weight"
WRONG_TENSORS: dict[str, tuple[Callable[[Tensors], Any], Words]] = {
    "stored twice": (
        lambda tensors: tensors.update({"ln_f.weight": tensors[NORM] + 1}),
        (f"'{NORM}'", "twice"),
    ),
    "dropped": (lambda tensors: tensors.pop(BIAS.format(1)), (f"'{BIAS.format(1)}'", "missing")),
    "of another layer": (
        lambda tensors: tensors.update({BIAS.format(2): torch.zeros(4)}),
        ("config.json says 2 layers", "have 3"),
    ),
    "added": (
        lambda tensors: tensors.update({"transformer.h.1.mlp.more.bias": torch.zeros(4)}),
        ("'transformer.h.1.mlp.more.bias'", "left over"),
    ),
    "reshaped": (
        lambda tensors: tensors.update({NORM: torch.zeros(5)}),
        (f"'{NORM}'", "[5]", "[96]"),
    ),
    "zeros": (
        lambda tensors: [tensor.zero_() for tensor in tensors.values()],
        ("not a number", "zeros only"),
    ),
    "huge": (lambda tensors: [tensor.mul_(1e38) for tensor in tensors.values()], "has values up to"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_wrong_tensors_are_caught_before_anything_is_written(tmp_path: Path, case: str) -> None:
    """The source is wrong, so this runs the whole pipeline."""
    change, words = WRONG_TENSORS[case]
    source = change_tensors(tiny.FACTORIES["bloom"](tmp_path / "source", 12), change)
    with raises(VerificationError, words):
        convert(source, tmp_path / "out", scale=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 800},
        pytest.param({"scale": 500, "method": "linear"}, marks=pytest.mark.slow),
        pytest.param({"dynamic": "length", "rate": 0.002, "train_length": 2048}, marks=pytest.mark.slow),
        pytest.param({"dynamic": "position", "rate": 8, "train_length": 1_000_000}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_extreme_scalings_pass(tmp_path: Path, options: dict[str, Any]) -> None:
    """Slopes of a millionth, and lengths at which a probe would take gigabytes."""
    source = tiny.FACTORIES["mpt"](tmp_path / "source", 12, attn_config={"alibi_bias_max": 16})
    assert convert(source, tmp_path / "out", **options).checks


MEASURED = r"largest relative deviation (\S+)$"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["falcon", "mosaic_bert"])
def test_every_factor_that_is_accepted_is_measured(tmp_path: Path, family: str) -> None:
    source = (tiny.FACTORIES | tiny.ENCODERS)[family](tmp_path / "source", 12)
    too_large: list[dict[str, Any]] = [{"scale": 1e9}, {"dynamic": "position", "rate": 1e9}]
    for options in too_large:
        with raises(UsageError, "1e+09", "give at most") as error:
            convert(source, tmp_path / "new", train_length=64, **options)
        largest = int(str(error.value).split()[-1])
        kind = next(reversed(options))
        assert largest > 1000
        for factor in (1000, largest):
            chosen = {**options, kind: factor}
            result = convert(source, tmp_path / "out", train_length=64, overwrite=True, **chosen)
            found = re.search(MEASURED, result.checks[1].detail)
            assert found
            assert float(found[1]) < 1e-3
        with pytest.raises(UsageError, match=f"give at most {largest}$"):
            convert(source, tmp_path / "other", train_length=64, **{**options, kind: largest + 1})


@pytest.mark.parametrize(("family", "factor"), [("bloom", 1e4), ("mpt", 1e5), ("jina_bert", 4e3)])
def test_a_mistake_of_one_percent_in_the_flattest_head(
    mistaken: Mistaken, tmp_path: Path, family: str, factor: float
) -> None:
    mistaken("[m * factor**-t for", "[m * factor**-t * (1.01 if t == 1 else 1) for")
    source = (tiny.FACTORIES | tiny.ENCODERS)[family](tmp_path / "source", 4)
    with pytest.raises(VerificationError, match="head 3 runs with a penalty"):
        convert(source, tmp_path / "out", scale=factor, train_length=64)


def test_slopes_that_are_flat_in_the_stock_model_are_no_reason(tmp_path: Path) -> None:
    source = tiny.FACTORIES["mpt"](tmp_path / "source", 4, attn_config={"alibi_bias_max": 40})
    assert convert(source, tmp_path / "out", scale=2).checks


def test_an_option_that_the_stock_class_refuses_skips_only_that_check(tmp_path: Path) -> None:
    """llm-foundry writes clip_qkv as an integer, which transformers 5 rejects."""
    source = tiny.FACTORIES["mpt"](tmp_path / "source", 4, attn_config={"clip_qkv": 6.0})
    options = {**config_of(source)["attn_config"], "clip_qkv": 6}
    edit_json(source / "config.json", {"attn_config": options})
    checks = convert(source, tmp_path / "out", scale=2).checks
    assert not any(check.skipped for check in checks[:3])


@pytest.mark.parametrize(
    ("name", "key", "words"),
    [
        ("bloom", "initializer_range", ("does not run", "config.json", "Error: ")),
        *((name, "id2label", "id2label") for name in (*FAMILIES, *tiny.ENCODERS)),
    ],
)
def test_a_value_that_no_model_can_have_is_one_line(
    tmp_path: Path, name: str, key: str, words: Words
) -> None:
    source = (tiny.FACTORIES | tiny.ENCODERS)[name](tmp_path / "source", 4)
    edit_json(source / "config.json", {key: "nonsense"})
    with raises((SourceError, VerificationError), words) as failure:
        convert(source, tmp_path / "out", scale=2)
    assert "\n" not in str(failure.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["mpt", "mosaic_bert"])
def test_a_version_that_lacks_something_is_no_fault_of_the_config(
    mistaken: Mistaken, tmp_path: Path, name: str
) -> None:
    slopes = "    slopes = [2.0 ** (-bias_max * i / whole) for i in range(1, whole + 1)]\n"
    mistaken(slopes, f"{slopes}    math.no_such_name\n")
    source = (tiny.FACTORIES | tiny.ENCODERS)[name](tmp_path / "source", 4)
    with raises(VerificationError, "AttributeError", "install another version of transformers"):
        convert(source, tmp_path / "out", scale=2)


def test_a_model_that_returns_tuples_is_verified_too(tmp_path: Path) -> None:
    source = tiny.FACTORIES["bloom"](tmp_path / "source", 4, return_dict=False)
    assert convert(source, tmp_path / "out", scale=2).checks


@pytest.mark.parametrize(
    ("fmt", "options"), [("safetensors", {}), ("bin", {}), ("safetensors", {"dtype": "bf16"})]
)
def test_weights_that_are_not_numbers_are_caught(
    tmp_path: Path, fmt: Literal["safetensors", "bin"], options: dict[str, Any]
) -> None:
    """Also in layers and of tokens that verification does not run."""
    source = tiny.FACTORIES["mpt"](tmp_path / "source", 4, n_layers=3, dtype=torch.float16, fmt=fmt)
    name = "transformer.blocks.2.ffn.up_proj.weight"
    # The buffer of a causal mask in half precision: -1e9 became -inf.
    mask = {"transformer.blocks.0.attn.masked_bias": torch.tensor(-torch.inf)}
    change_tensors(source, lambda tensors: tensors.update(mask))
    assert convert(source, tmp_path / "out", scale=2, **options).checks
    change_tensors(source, lambda tensors: tensors[name][-1, -1].fill_(-torch.inf))
    with raises(SourceError, repr(name), "NaN"):
        convert(source, tmp_path / "refused", scale=2, **options)
    assert not (tmp_path / "refused").exists()
    assert not convert(source, tmp_path / "kept", scale=2, verify=False, **options).checks
