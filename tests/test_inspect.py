"""What ``inspect`` prints, and how little it reads and imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from space.shown import facts

from converter import convert, inspect
from converter.scaling.scaling import Scaling
from converter.scaling.slopes import stock_slopes
from tests import tiny
from tests.conftest import MakeSource, Pristine, RunCli, edit_json, fingerprint
from tests.messages import Words, says
from tests.patched import load
from tests.reference.alibi import concave_penalties
from tests.tiny import rotary

ROOT = Path(__file__).parent.parent
HEAVY = {"numpy", "torch", "transformers", "huggingface_hub", "safetensors", "tokenizers", "yaml", "tqdm"}


@pytest.mark.parametrize("family", tiny.STOCK)
def test_what_a_checkpoint_is(pristine: Pristine, run: RunCli, family: str) -> None:
    source = pristine(family, num_heads=12)
    before = fingerprint(source)
    found = run("inspect", source, "--json")
    assert (found.code, found.err) == (0, "")
    assert found.out.count("\n") == 1
    values = found.json
    assert values["family"] == values["model_type"] == family
    shape = [values[key] for key in ("num_heads", "num_kv_heads", "head_dim", "num_layers")]
    assert shape == [12, 12, 8, 2]
    assert values["dtype"] == "F32"
    assert values["files"] == {"model.safetensors": (source / "model.safetensors").stat().st_size}
    assert values["converted"] is False
    assert values["alibi_scaling"] is None
    assert values["train_length"] is None
    assert values["slopes"]["stock"] == pytest.approx(stock_slopes(12))
    assert values["slopes"]["scaled"] is None
    assert fingerprint(source) == before


@pytest.mark.parametrize(
    ("words", "scaling", "at_length"),
    [
        ("--target-length 192 --train-length 64", Scaling("ntk", 3.0), None),
        ("--method ntk --dynamic length --train-length 64 --rate 1.5", Scaling("ntk", 3.0), 128),
        ("--scale 4 --method linear", Scaling("linear", 4.0), None),
    ],
)
def test_scaled_slopes_are_shown_beside_the_stock_ones(
    pristine: Pristine, run: RunCli, words: str, scaling: Scaling, at_length: int | None
) -> None:
    slopes = run("inspect", pristine("bloom", num_heads=12), "--json", *words.split()).json["slopes"]
    assert slopes["scaled"] == pytest.approx(scaling.slopes(stock_slopes(12)))
    assert (slopes["factor"], slopes["at_length"]) == (scaling.factor, at_length)


def test_a_concave_penalty_has_spans_and_no_slopes(pristine: Pristine, run: RunCli) -> None:
    """At twice the trained length; a head that does not reach 5 nats there has none."""
    words = [pristine("bloom", num_heads=12), "--method", "concave", "--train-length", "64"]
    table = run("inspect", *words, "--json").json["slopes"]
    assert (table["scaled"], table["factor"], table["at_length"]) == (None, 2.0, 128)
    for slope, span in zip(stock_slopes(12), table["spans"], strict=True):
        farthest = concave_penalties(slope, 128, 64, 8, np.array([127.0]))
        assert (span is None) == (farthest < 5)
        if span is not None:
            assert concave_penalties(slope, 128, 64, 8, np.array([span])) == pytest.approx([5.0])
    shown = run("inspect", *words).out
    assert "never" in shown
    assert "scaling         concave" in shown


@pytest.mark.parametrize(
    ("family", "options", "shown"),
    [
        ("bloom", {"train_length": 64}, {"type": "by-parts", "dynamic": "position"}),
        ("jina_bert", {"train_length": 64}, {"type": "ntk", "dynamic": "length"}),
        ("bloom", {}, {}),  # a conversion would ask for the trained length
        ("llama", {}, {}),
    ],
)
def test_the_default_conversion_is_shown(
    pristine: Pristine, tmp_path: Path, family: str, options: dict[str, Any], shown: dict[str, Any]
) -> None:
    source = pristine(family)
    found = inspect(source, **options)
    assert found.by_default == bool(shown)
    if not shown:
        assert found.alibi_scaling is None
        return
    result = convert(source, tmp_path / "out", dry_run=True, **options)
    assert result.scaling.to_json() == found.alibi_scaling
    assert found.alibi_scaling.items() >= shown.items()
    assert found.slopes.scaled != found.slopes.stock
    assert found.input_limit == result.input_limit


@pytest.mark.parametrize(
    ("name", "words", "remedy"),
    [
        ("bloom", "--target-length 256", "leave out --target-length"),
        ("converted", "--target-length 256", "give --dynamic position in place of --target-length"),
        # Who names a method, or its ramp, chose it.
        ("bloom", "--target-length 256 --method ntk", None),
        ("bloom", "--target-length 256 --ramp 0.2 0.5", None),
        ("bloom", "--scale 4", None),
        ("bloom", "", None),
        # Encoders and rotary models have no better default.
        ("jina_bert", "--target-length 256", None),
        ("llama", f"--target-length {2 * rotary.LENGTH}", None),
    ],
)
def test_a_note_on_one_factor_for_all_lengths(
    pristine: Pristine, run: RunCli, tmp_path: Path, name: str, words: str, remedy: str | None
) -> None:
    """It names the default, and changes nothing."""
    source = pristine("bloom" if name == "converted" else name)
    if name == "converted":
        convert(source, tmp_path / "converted", train_length=64, verify=False)
        source = tmp_path / "converted"
    options = words.split()
    if name != "llama":
        options += ["--train-length", "64"]
    out = ["--out", tmp_path / "out"]
    shown = run("inspect", source, *options, "--json")
    planned = run(source, *options, *out, "--dry-run", "--json")
    written = run(source, *options, *out, "--no-verify")
    for found in (shown, planned, written):
        assert found.code == 0
        assert found.err.count("--target-length") == (remedy or "").count("--target-length") + bool(remedy)
        if remedy is not None:
            [note] = [line for line in found.err.splitlines() if "--target-length" in line]
            says(note, "note: ", "one factor for all lengths", "ntk", remedy, "by-parts by position")
    recommended = shown.json["recommended"]
    if remedy is None:
        assert recommended is None
        return
    assert (recommended["type"], recommended["dynamic"]) == ("by-parts", "position")
    assert planned.json["alibi_scaling"] == {"type": "ntk", "factor": 4.0}
    assert "one factor for all" not in (tmp_path / "out/README.md").read_text(encoding="utf-8")


def test_a_converted_repository(pristine: Pristine, tmp_path: Path, run: RunCli) -> None:
    convert(pristine("bloom"), tmp_path / "out", scale=2.0, train_length=64, verify=False)
    values = run("inspect", tmp_path / "out", "--json").json
    assert values["converted"] is True
    assert (values["family"], values["model_type"]) == ("bloom", "ntk_bloom")
    assert values["alibi_scaling"] == {"type": "ntk", "factor": 2.0}
    assert values["train_length"] == 64
    assert values["train_length_origin"] == "recorded when it was converted"
    assert values["slopes"]["scaled"] == pytest.approx(Scaling("ntk", 2.0).slopes(stock_slopes(4)))


def test_a_config_without_weights(make_source: MakeSource, run: RunCli) -> None:
    source = make_source()
    (source / "model.safetensors").unlink()
    found = run("inspect", source, "--scale", "2")
    assert found.code == 0
    assert "none found" in found.out


# The trained length and where it comes from


def trained(name: Any, **changes: Any) -> dict[str, Any]:
    return {"_name_or_path": name, **changes}


BLOOM, STORYWRITER = "bigscience/bloom-1b7", "mosaicml/mpt-7b-storywriter"
JINA = "jinaai/jina-embeddings-v2-base-en"
SEQ_LENGTH = ("not known", "seq_length 4096")


@pytest.mark.parametrize(
    ("family", "changes", "given", "tokens", "origin"),
    [
        ("bloom", {"seq_length": 4096}, None, None, SEQ_LENGTH),
        ("bloom", {"seq_length": 4096}, 77, 77, "as given"),
        ("bloom", trained(BLOOM), None, 2048, "_name_or_path"),
        ("bloom", trained(BLOOM, seq_length=2048), None, 2048, "_name_or_path"),
        ("bloom", trained(BLOOM, seq_length=8192), None, 2048, "_name_or_path"),
        ("jina_bert", trained(JINA, max_position_embeddings=8192), None, 512, "_name_or_path"),
        ("bloom", trained("someone/else"), None, None, "not known"),
        ("bloom", trained(["bigscience/bloom"]), None, None, "not known"),
        ("mpt", {"max_seq_len": 8192}, None, None, ("not known", "max_seq_len 8192")),
        ("mpt", trained(STORYWRITER, max_seq_len=65536), None, 65536, STORYWRITER),
        ("falcon", trained("tiiuae/falcon-rw-1b"), None, 2048, "tiiuae/falcon-rw-1b"),
    ],
)
def test_trained_length(
    make_source: MakeSource, family: str, changes: Any, given: int | None, tokens: int | None, origin: Words
) -> None:
    found = inspect(make_source(family, changes), train_length=given)
    assert found.train_length == tokens
    says(found.train_length_origin, origin)


@pytest.mark.parametrize(("seq_length", "told"), [(None, False), (2048, False), (8192, True)])
def test_a_length_key_that_speaks_against_the_trained_length_is_told(
    make_source: MakeSource, tmp_path: Path, seq_length: int | None, told: bool
) -> None:
    source = make_source("bloom", trained(BLOOM, seq_length=seq_length))
    result = convert(source, tmp_path / "out", dry_run=True)
    assert result.train_length == 2048
    assert any("seq_length 8192" in note for note in result.notes) == told


def in_card(base_model: str) -> str:
    return f"---\nlicense: mit\nbase_model: {base_model}\n---\n# Mine\n"


@pytest.mark.parametrize(
    ("family", "changes", "card", "suggested"),
    [
        ("bloom", {}, in_card(BLOOM), 2048),
        ("bloom", {}, in_card(f"[{BLOOM}]"), 2048),
        ("jina_bert", {}, in_card(JINA), 512),
        # The length key speaks against the checkpoint that the config names.
        ("bloom", trained(BLOOM, seq_length=8192), in_card("bigscience/bloom-560m"), 2048),
        # A length that is known
        ("bloom", trained(BLOOM), in_card(BLOOM), None),
        # No single known checkpoint of the family
        ("bloom", {}, in_card(f"[{BLOOM}, bigscience/bloom-560m]"), None),
        ("bloom", {}, in_card(STORYWRITER), None),
        ("bloom", {}, in_card("ada/mine"), None),
        ("bloom", {}, in_card("{a: b}"), None),
        ("bloom", {}, in_card("[" * 100), None),
        ("bloom", {}, "# Mine\n", None),
        ("bloom", {}, None, None),
    ],
)
def test_the_trained_length_of_a_base_is_suggested_and_never_taken(
    make_source: MakeSource,
    run: RunCli,
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    card: str | None,
    suggested: int | None,
) -> None:
    source = make_source(family, changes)
    if card is not None:
        (source / "README.md").write_text(card, encoding="utf-8")
    shown, planned = run("inspect", source), run(source, "--out", tmp_path / "out", "--dry-run")
    found = inspect(source)
    assert found.train_length == (2048 if "_name_or_path" in changes else None)
    assert planned.code == (0 if found.train_length else 2)
    asked = facts(found, "decoder")
    if suggested is None:
        assert found.base is None
        assert "its base" not in shown.out + planned.out + planned.err
        assert ("its base was trained at" in asked) == (found.train_length is None)
        return
    assert found.base is not None
    assert found.base.tokens == suggested
    words = (f"its base {found.base.name}", f"--train-length {suggested}")
    [row] = [line for line in shown.out.splitlines() if line.startswith("trained length")]
    says(row, words)
    if found.train_length is None:
        says(planned.err, words)
        says(asked, f"say {suggested}")
    else:
        says(planned.out, words)


def test_a_card_that_leads_out_of_the_folder_suggests_nothing(
    make_source: MakeSource, tmp_path: Path
) -> None:
    source = make_source()
    (tmp_path / "elsewhere.md").write_text(in_card(BLOOM), encoding="utf-8")
    (source / "README.md").symlink_to(tmp_path / "elsewhere.md")
    assert inspect(source).base is None


def test_a_config_without_a_model_type(make_source: MakeSource, run: RunCli) -> None:
    """As DNABERT-2's is."""
    source = make_source("mosaic_bert", {"model_type": None})
    assert "family          mosaic_bert (model_type not given)" in run("inspect", source).out


# What the model takes


@pytest.mark.parametrize(
    ("name", "words", "cached", "length"),
    [
        ("bloom", "--train-length 64", 4 * (8 + 8), 128),
        ("bloom", "--train-length 64 --target-length 96", 4 * (8 + 8), 96),
        ("bloom", "--train-length 64 --scale 4", 4 * (8 + 8), 256),
        ("bloom", "--scale 4", 4 * (8 + 8), None),
        ("llama", "--scale 4", 0, 4 * rotary.LENGTH),
        ("mosaic_bert", "--train-length 64", None, 128),
    ],
)
def test_memory_and_disk(
    pristine: Pristine, run: RunCli, name: str, words: str, cached: int | None, length: int | None
) -> None:
    values = run("inspect", source := pristine(name), "--json", *words.split()).json
    needs, heads = values["needs"], values["num_heads"]
    if name == "llama":
        cached = values["num_kv_heads"] * values["head_dim"]
    size = (source / "model.safetensors").stat().st_size
    assert needs["weights"] == {"F32": 4 * values["parameters"], "F16": 2 * values["parameters"]}
    assert needs["cache"] == (cached and 1000 * 2 * 2 * values["num_layers"] * cached)
    assert (needs["length"], needs["scores"]) == (length, length and 2 * heads * length**2)
    assert (needs["download"], needs["result"]) == (0, size)


def test_disk_cache_and_memory_are_what_is_told(pristine: Pristine, tmp_path: Path) -> None:
    told = inspect(pristine("bloom"), scale=2.0).needs
    convert(pristine("bloom"), tmp_path / "out", scale=2.0, verify=False)
    assert told.result == sum(each.stat().st_size for each in (tmp_path / "out").glob("*.safetensors"))
    model = load(tmp_path / "out", dtype=torch.float16)
    cache = model(torch.arange(50)[None] + 4, use_cache=True).past_key_values
    held = sum(
        each.nbytes for layer in cache.layers for each in (layer.keys[:, :, :50], layer.values[:, :, :50])
    )
    assert held * 20 == inspect(tmp_path / "out").needs.cache
    assert sum(each.nbytes for each in model.parameters()) == inspect(tmp_path / "out").needs.weights["F16"]


# What it costs


@pytest.mark.parametrize(
    "arguments",
    [
        ["families"],
        ["families", "--json"],
        ["convert", "--help"],
        ["complete"],
        ["inspect", "{source}", "--scale", "2"],
        ["{source}", "--scale", "2", "--out", "{source}-out", "--dry-run"],
    ],
)
def test_nothing_heavy_is_imported(pristine: Pristine, arguments: list[str]) -> None:
    """Nor when a word is completed, each time the Tab key is pressed."""
    source = pristine("bloom", fmt="bin", sharded=True)
    typed = {
        "_NTK_CONVERT_COMPLETE": "bash_complete",
        "COMP_WORDS": "ntk-convert convert b",
        "COMP_CWORD": "2",
    }
    code = (
        "import sys, converter.cli\n"
        "try: converter.cli.main()\n"
        f"finally: print(sorted({HEAVY} & sys.modules.keys()), file=sys.stderr)"
    )
    completes = arguments == ["complete"]
    words = [] if completes else [word.replace("{source}", str(source)) for word in arguments]
    result = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=os.environ | (typed if completes else {}),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert result.stderr == "[]\n"
    assert not completes or result.stdout == "dir,b\n"


def test_a_broken_scaling_in_a_converted_config(pristine: Pristine, tmp_path: Path, run: RunCli) -> None:
    convert(pristine("bloom"), tmp_path / "out", scale=2.0, verify=False)
    edit_json(tmp_path / "out/config.json", {"alibi_scaling": {"type": "yarn"}})
    found = run("inspect", tmp_path / "out")
    assert found.code == 1
    assert "alibi_scaling" in found.err
