"""Verification passes correct repositories and catches every kind of mistake."""

from __future__ import annotations

import logging
import logging.handlers
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from converter import SourceError, VerificationError, convert
from converter.result.converted import open_converted
from converter.verification import verify
from tests import tiny
from tests.conftest import edit_json
from tests.dealt import dealt
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
from tests.runners import LAYERS

Tensors = dict[str, torch.Tensor]


def run(folder: Path, source: Path) -> dict[str, Any]:
    return {check.name: check for check in verify(open_converted(folder), config_of(source))}


EVERY = [(scaling, HEADS[number % 3]) for number, scaling in enumerate((*SCALINGS, *FITTED))]


@pytest.mark.parametrize(("family", "case"), dealt(FAMILIES, EVERY, each=2), ids=str)
def test_right_repositories_pass(
    converted: Convert, tmp_path: Path, family: str, case: tuple[str, int]
) -> None:
    scaling, heads = case
    checks = run(converted(family, heads, scaling), tmp_path / "source")
    assert list(checks) == CHECKED
    skipped = [name for name, check in checks.items() if check.skipped]
    assert skipped == ([] if family in STOCK else ["stock model"])


@pytest.mark.parametrize(
    ("layer", "scaling"),
    dealt(LAYERS, ["ntk", "by-parts", "linear-length", "ntk-position", *FITTED, "by-parts-tempered"]),
)
def test_right_encoders_pass(converted: Convert, tmp_path: Path, layer: str, scaling: str) -> None:
    family, changes = LAYERS[layer]
    checks = run(converted(family, 12, scaling, **changes), tmp_path / "source")
    assert list(checks) == CHECKED
    assert [name for name, check in checks.items() if check.skipped] == ["stock model"]


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
    assert checks["stock model"].skipped == ignored_by_stock
    assert not ignored_by_stock or "stock transformers" in checks["stock model"].detail


@pytest.mark.parametrize(("family", "dtype"), dealt(STOCK, [torch.bfloat16, torch.float16]))
def test_half_precision_checkpoints_pass(
    converted: Convert, tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    checks = run(converted(family, 12, "ntk", dtype=dtype), tmp_path / "source")
    assert "float32" in checks["stock model"].detail


def test_the_folder_is_left_as_it_was(converted: Convert, tmp_path: Path) -> None:
    folder = converted("bloom")
    before = sorted(path.name for path in folder.iterdir())
    run(folder, tmp_path / "source")
    assert sorted(path.name for path in folder.iterdir()) == before


WRONG_CODE = {
    # file, the correct code, the mistake that replaces it, the message
    "slopes-exponent": (
        "ntk_alibi.py",
        "return [(top - math.log(m)) / (top - bottom) for m in slopes]",
        "return [0.9 * (top - math.log(m)) / (top - bottom) for m in slopes]",
        "runs with slope",
    ),
    "not-scaled": (
        "ntk_alibi.py",
        "[m * factor**-t for m, t in zip(slopes, row, strict=True)]",
        "list(slopes)",
        "runs with slope",
    ),
    "lowest-digit": (
        "ntk_alibi.py",
        "positions % BASE / BASE]",
        "positions % BASE / 128]",
        "runs with slope",
    ),
    "padding-channel": ("ntk_alibi.py", "(~real) * PADDED_KEY", "real * 0.0", "fused attention differs"),
    "chunk-mask": (
        "ntk_plan.py",
        "queries in (1, cache.read)",
        "queries <= cache.read",
        "chunked attention differs",
    ),
    "decoding": (
        "ntk_attention.py",
        "value[:, :, : plan.key_length]",
        "value[:, :, : plan.key_length].roll(int(query.shape[2] == 1), 2)",
        "decoding attention differs",
    ),
    "cached-positions": (
        "ntk_plan.py",
        "slots = torch.arange(queries, device=hidden_states.device) + seen",
        "slots = torch.arange(queries, device=hidden_states.device)",
        "runs with slope",
    ),
    "cache": (
        "ntk_cache.py",
        "room[..., seen : seen + new, :] = states",
        "room[..., : seen + new, :][..., -new - (seen > 0) :, :][..., :new, :] = states",
        "runs with slope",
    ),
    "activation": ("modeling_ntk_bloom.py", 'approximate="tanh"', 'approximate="none"', "that of stock"),
    "layout": (
        "modeling_ntk_bloom.py",
        "query, key, value = (part",
        "key, query, value = (part",
        "that of stock",
    ),
    "extra-module": (
        "modeling_ntk_bloom.py",
        "        self.ln_f =",
        "        self.extra = nn.Linear(2, 2); self.ln_f =",
        "'transformer.extra.bias' is missing, and 1 more",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_CODE)
def test_wrong_code_is_caught(converted: Convert, mistaken: Mistaken, tmp_path: Path, mistake: str) -> None:
    *where, message = WRONG_CODE[mistake]
    mistaken(*where)
    folder = converted("bloom", 12, "ntk")
    with pytest.raises(VerificationError, match=message):
        run(folder, tmp_path / "source")


WRONG_SLOPE, FUSED, TILED = "runs with slope", "fused attention differs", "tiled attention differs"
WRONG_ENCODERS = {
    # file, the correct code, the mistake that replaces it, the scaling, the message
    "one-sided": (
        "ntk_symmetric.py",
        "(slots[:, None] - keys[None, :]).abs()",
        "(slots[:, None] - keys[None, :])",
        "ntk",
        WRONG_SLOPE,
    ),
    "rightwards-steeper": (
        "ntk_symmetric.py",
        "(slots[:, None] - keys[None, :]).abs()",
        "torch.where(keys > slots[:, None], 2, 1) * (slots[:, None] - keys[None, :]).abs()",
        "ntk",
        WRONG_SLOPE,
    ),
    "padding-counts": (
        "ntk_symmetric.py",
        "(real.cumsum(-1) - 1)",
        "(0 * real + 200)",
        "ntk-length",
        WRONG_SLOPE,
    ),
    "not-scaled": (
        "ntk_alibi.py",
        "[m * factor**-t for m, t in zip(slopes, row, strict=True)]",
        "list(slopes)",
        "ntk",
        WRONG_SLOPE,
    ),
    "other-layer's-slopes": (
        "ntk_encoder.py",
        "plans[index if len(plans) > 1 else 0]",
        "plans[0]",
        "fitted",
        WRONG_SLOPE,
    ),
    "temperatures-dropped": (
        "ntk_symmetric.py",
        "query = multiplied(query, plan.query_factors)",
        "pass",
        "fitted",
        "runs with queries",
    ),
    "other-layer's-temperatures": (
        "ntk_symmetric.py",
        "zip(slopes, each, strict=True)",
        "zip(slopes, reversed(each), strict=True)",
        "fitted",
        "runs with queries",
    ),
    "toeplitz-shifted": ("ntk_tiles.py", "(start - queries + 1)", "(start - queries)", "ntk", FUSED),
    "row-without-its-last-token": ("ntk_symmetric.py", "start + count)", "start + count - 1)", "ntk", FUSED),
    "row-without-its-padding": ("ntk_tiles.py", "scale, span.start)", "scale, 0)", "ntk", FUSED),
    "tile-shifted": ("ntk_tiles.py", "keys.start - queries.start", "keys.start", "ntk", TILED),
    "tile-of-other-heads": (
        "ntk_tiles.py",
        "key[:, heads, keys]",
        "key.flip(1)[:, heads, keys]",
        "ntk",
        TILED,
    ),
    "far-keys": ("ntk_tiles.py", "] * distances", "] * 100 * distances", "ntk", TILED),
    "only-earlier-keys": (
        "ntk_tiles.py",
        "lasts = torch.maximum(lasts.clamp(max=length), stops)",
        "lasts = stops.expand_as(firsts)",
        "ntk",
        TILED,
    ),
    "toeplitz-not-reversed": ("ntk_tiles.py", "reverse = query.flip(2)", "reverse = query", "ntk", FUSED),
    "padding-seen": (
        "ntk_symmetric.py",
        "(~real)[:, None, :, None]",
        "(real & False)[:, None, :, None]",
        "ntk",
        "training attention differs",
    ),
    "later-blocks-at-the-start": (
        "ntk_symmetric.py",
        "[attend(q, key, value, m, at) for q, m, at in blocks]",
        "[attend(q, key, value, m, slots[0][: len(at)]) for q, m, at in blocks]",
        "ntk-position",
        FUSED,
    ),
    "first-block-s-slopes": (
        "ntk_symmetric.py",
        "[attend(q, key, value, m, at) for q, m, at in blocks]",
        "[attend(q, key, value, own[0][..., : len(at)], at) for q, m, at in blocks]",
        "ntk-position",
        FUSED,
    ),
}


@pytest.mark.parametrize("mistake", WRONG_ENCODERS)
def test_wrong_code_of_encoders_is_caught(
    converted: Convert, mistaken: Mistaken, tmp_path: Path, mistake: str
) -> None:
    *where, scaling, message = WRONG_ENCODERS[mistake]
    mistaken(*where)
    folder = converted("mosaic_bert", 12, scaling)
    with pytest.raises(VerificationError, match=message):
        run(folder, tmp_path / "source")


WRONG_LAYERS = {
    # the correct code, the mistake that replaces it
    "the-first-s": ("self.layer_idx if len(plan.query_channels) > 1 else 0", "0"),
    "the-other-s": ("self.layer_idx if len(plan.query_channels) > 1", "1 - self.layer_idx if True"),
}


@pytest.mark.parametrize("scaling", FITTED)
@pytest.mark.parametrize("mistake", WRONG_LAYERS)
def test_slopes_of_another_layer_are_caught(
    converted: Convert, mistaken: Mistaken, tmp_path: Path, mistake: str, scaling: str
) -> None:
    mistaken("ntk_attention.py", *WRONG_LAYERS[mistake])
    folder = converted("bloom", 12, scaling)
    with pytest.raises(VerificationError, match=r"head \d+ of layer [01] runs with slope"):
        run(folder, tmp_path / "source")


WRONG_TEMPERATURES = {
    # the file, the correct code, the mistake that replaces it
    "dropped": ("ntk_attention.py", "query = multiplied(query, factors)", "pass"),
    "other-layer-s": ("ntk_attention.py", "plan.query_factors[row]", "plan.query_factors[1 - row]"),
    "other-head-s": (
        "ntk_attention.py",
        "multiplied(query, factors)",
        "multiplied(query, factors.roll(1, 1))",
    ),
    "divided": ("ntk_alibi.py", "query * factors[..., None]", "query / factors[..., None]"),
    "twice": ("ntk_alibi.py", "query * factors[..., None]", "query * factors[..., None] ** 2"),
    "of-the-bias-too": (
        "ntk_attention.py",
        "fold(query, channels)",
        "fold(query, channels) * factors[..., None]",
    ),
}


@pytest.mark.parametrize(("scaling", "mistake"), dealt(FITTED, WRONG_TEMPERATURES))
def test_wrong_temperatures_are_caught(
    converted: Convert, mistaken: Mistaken, tmp_path: Path, mistake: str, scaling: str
) -> None:
    mistaken(*WRONG_TEMPERATURES[mistake])
    folder = converted("bloom", 12, scaling)
    told = "slope" if mistake == "of-the-bias-too" else "queries"
    with pytest.raises(
        VerificationError, match=rf"head \d+ of layer [01] runs with {told} .* at \d+ tokens, not"
    ):
        run(folder, tmp_path / "source")


@pytest.mark.parametrize(
    ("family", "scaling", "mistake"),
    [
        ("falcon", "by-parts-tempered", "temperature * bool(t) for t"),
        ("bloom", "by-parts-position-tempered", "temperature * t * t for t"),
        ("mosaic_bert", "ntk-length-tempered", "temperature for t"),
    ],
)
def test_a_temperature_that_goes_to_other_heads_is_caught(
    converted: Convert, mistaken: Mistaken, tmp_path: Path, family: str, scaling: str, mistake: str
) -> None:
    mistaken("ntk_alibi.py", "temperature * t for t", mistake)
    folder = converted(family, 12, scaling)
    with pytest.raises(VerificationError, match=r"head \d+ runs with queries .* at \d+ tokens, not"):
        run(folder, tmp_path / "source")


@pytest.mark.parametrize("family", STOCK)
def test_matrices_of_large_layers_are_streamed(
    converted: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """With blocks of a few rows, so that a matrix has many."""
    monkeypatch.setattr("converter.verification.slice.LARGEST_LAYER", 0)
    monkeypatch.setattr("converter.verification.slice.BLOCK", 1000)
    folder = converted(family, 12, "ntk", dtype=torch.bfloat16)
    assert "float32" in run(folder, tmp_path / "source")["stock model"].detail


@pytest.mark.parametrize("mistake", ["activation", "layout"])
def test_wrong_code_of_large_layers_is_caught(
    converted: Convert, mistaken: Mistaken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    monkeypatch.setattr("converter.verification.slice.LARGEST_LAYER", 0)
    *where, message = WRONG_CODE[mistake]
    mistaken(*where)
    folder = converted("bloom", 12, "ntk")
    with pytest.raises(VerificationError, match=message):
        run(folder, tmp_path / "source")


SPAN = ("ntk_alibi.py", "math.log(5 / m)", "math.log(6 / m)")


@pytest.mark.parametrize(
    ("family", "scaling", "changes", "mistake"),
    [
        ("bloom", "ntk-length", {}, ("ntk_alibi.py", "self.rate * lengths.float()", "lengths.float()")),
        *((family, "by-parts", {}, SPAN) for family in ("bloom", "falcon")),
        ("mpt", "by-parts-length", {}, SPAN),
        (
            "mpt",
            "ntk",
            {"attn_config": {"alibi_bias_max": 16}},
            ("modeling_ntk_mpt.py", 'config.attn_config.get("alibi_bias_max", 8)', "8"),
        ),
        # The bias is counted twice.
        ("falcon", "ntk", {}, ("modeling_ntk_falcon.py", "slope * config.score_scale for", "slope for")),
    ],
    ids=str,
)
def test_wrong_slopes_are_caught(
    converted: Convert,
    mistaken: Mistaken,
    tmp_path: Path,
    family: str,
    scaling: str,
    changes: Any,
    mistake: Any,
) -> None:
    mistaken(*mistake)
    folder = converted(family, 12, scaling, **changes)
    with pytest.raises(VerificationError, match="runs with slope"):
        run(folder, tmp_path / "source")


def drop(tensors: Tensors) -> None:
    del tensors["transformer.h.1.mlp.dense_h_to_4h.bias"]


def add(tensors: Tensors) -> None:
    tensors["transformer.h.2.mlp.dense_h_to_4h.bias"] = torch.zeros(4)


def add_other(tensors: Tensors) -> None:
    tensors["transformer.h.1.mlp.more.bias"] = torch.zeros(4)


def reshape(tensors: Tensors) -> None:
    tensors["transformer.ln_f.weight"] = torch.zeros(5)


def store_twice(tensors: Tensors) -> None:
    tensors["ln_f.weight"] = tensors["transformer.ln_f.weight"] + 1


WRONG_TENSORS = {
    store_twice: r"'transformer\.ln_f\.weight' is stored twice",
    drop: "'transformer.h.1.mlp.dense_h_to_4h.bias' is missing",
    add: "config.json says 2 layers, but the weights have 3",
    add_other: "'transformer.h.1.mlp.more.bias' is left over",
    reshape: r"'transformer.ln_f.weight' has shape \[5\], not \[96\]",
}


@pytest.mark.parametrize("change", WRONG_TENSORS, ids=lambda change: change.__name__)
def test_wrong_tensors_are_caught_before_anything_is_written(tmp_path: Path, change: Any) -> None:
    """The source is wrong, so this runs the whole pipeline."""
    source = tiny.FACTORIES["bloom"](tmp_path / "source", 12)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerificationError, match=WRONG_TENSORS[change]):
        convert(source, tmp_path / "out", scale=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 5000},
        pytest.param({"scale": 1000, "method": "linear"}, marks=pytest.mark.slow),
        pytest.param({"dynamic": "length", "rate": 0.002, "train_length": 2048}, marks=pytest.mark.slow),
        {"dynamic": "position", "rate": 8, "train_length": 1_000_000},
    ],
    ids=str,
)
def test_extreme_scalings_pass(tmp_path: Path, options: dict[str, Any]) -> None:
    """Slopes of a millionth, and lengths at which a probe would take gigabytes."""
    source = tiny.FACTORIES["mpt"](tmp_path / "source", 12, attn_config={"alibi_bias_max": 16})
    assert convert(source, tmp_path / "out", **options).checks


def test_an_option_that_the_stock_class_refuses_skips_only_that_check(tmp_path: Path) -> None:
    """llm-foundry writes clip_qkv as an integer, which transformers 5 rejects."""
    source = tiny.FACTORIES["mpt"](tmp_path / "source", 4, attn_config={"clip_qkv": 6.0})
    options = {**config_of(source)["attn_config"], "clip_qkv": 6}
    edit_json(source / "config.json", {"attn_config": options})
    checks = convert(source, tmp_path / "out", scale=2).checks
    assert not any(check.skipped for check in checks[:3])


def test_a_head_listed_before_its_tied_embedding(tmp_path: Path) -> None:
    source = tiny.FACTORIES["bloom"](tmp_path / "source", 4, fmt="bin")
    state = torch.load(source / "pytorch_model.bin", weights_only=True)
    head = state.pop("lm_head.weight")
    torch.save({"lm_head.weight": head, **state}, source / "pytorch_model.bin")
    assert convert(source, tmp_path / "out", scale=2).checks


@pytest.mark.parametrize("key", ["initializer_range", "id2label"])
def test_a_value_that_no_model_can_have_is_one_line(tmp_path: Path, key: str) -> None:
    source = tiny.FACTORIES["bloom"](tmp_path / "source", 4)
    edit_json(source / "config.json", {key: "nonsense"})
    with pytest.raises(
        VerificationError, match=r"does not run with this config.json \(\w+Error: "
    ) as failure:
        convert(source, tmp_path / "out", scale=2)
    assert "\n" not in str(failure.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.0, "is not a number: the tensor 'transformer.word_embeddings.weight' holds zeros only"),
        (1e38, "has values up to"),
    ],
)
def test_weights_that_give_no_number_are_named(tmp_path: Path, factor: float, words: str) -> None:
    source = tiny.FACTORIES["bloom"](tmp_path / "source", 4)
    tensors = {name: tensor * factor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerificationError, match=words):
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
    [place] = [*source.glob("model.safetensors"), *source.glob("pytorch_model.bin")]
    tensors = load_file(place) if fmt == "safetensors" else torch.load(place)

    def save() -> None:
        if fmt == "bin":
            torch.save(tensors, place)
        else:
            save_file(tensors, place, metadata={"format": "pt"})

    # The buffer of a causal mask in half precision: -1e9 became -inf.
    tensors["transformer.blocks.0.attn.masked_bias"] = torch.tensor(-torch.inf)
    save()
    assert convert(source, tmp_path / "out", scale=2, **options).checks
    tensors[name][-1, -1] = -torch.inf
    save()
    with pytest.raises(SourceError, match=f"^the tensor {name!r} in {place.name} has values that are NaN"):
        convert(source, tmp_path / "refused", scale=2, **options)
    assert not (tmp_path / "refused").exists()
    assert not convert(source, tmp_path / "kept", scale=2, verify=False, **options).checks


def test_transformers_logs_nothing(tmp_path: Path) -> None:
    """It would print the whole config beside the error, once for each model that the checks build."""
    source = tiny.FACTORIES["bloom"](tmp_path / "source", 4)
    edit_json(source / "config.json", {"sub_configs": {"a": {}}})
    log, records = logging.getLogger("transformers"), logging.handlers.BufferingHandler(1000)
    log.addHandler(records)
    try:
        with suppress(VerificationError):  # version 4.57 takes the value
            convert(source, tmp_path / "out", scale=2)
    finally:
        log.removeHandler(records)
    assert records.buffer == []


def test_dead_buffers_of_old_checkpoints_are_no_failure(tmp_path: Path) -> None:
    source = tiny.FACTORIES["falcon"](tmp_path / "source", 4)
    tensors = load_file(source / "model.safetensors")
    tensors["transformer.h.0.self_attention.scale_mask_softmax.causal_mask"] = torch.ones(1, 1, 4, 4)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert convert(source, tmp_path / "out", scale=2).checks[0].name == "tensors"


@pytest.mark.parametrize("family", ["bloom", "mpt", "jais"])
def test_the_result_says_what_was_checked(family: str, tmp_path: Path) -> None:
    source = tiny.FACTORIES[family](tmp_path / "source", 4, prefix=family != "bloom")
    result = convert(source, tmp_path / "out", scale=2)
    assert [check.name for check in result.checks] == CHECKED
    card = (tmp_path / "out" / "README.md").read_text()
    for check in result.checks:
        assert check.detail in card
