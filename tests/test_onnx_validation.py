"""Validation: wrong graphs are caught, right ones pass, and the report says what was run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from converter.conversion import convert
from converter.errors import ProviderError, SourceError, ValidationError
from converter.onnx import coverage, opened_graph, reference, session, validate
from converter.onnx.export import export
from converter.onnx.options import OnnxOptions, Profile
from converter.onnx.report import TOLERANCES
from converter.result import manifest
from converter.result.converted import read_converted
from converter.result.manifest import MANIFEST
from tests import tiny
from tests.conftest import Pristine, Refused, RunCli, edit_json, fingerprint
from tests.dealt import dealt
from tests.messages import raises, says
from tests.onnx_graphs import PROFILES, TRAIN_LENGTH, Make, Plant, edit, exported, graphs_report, nodes_of

Mutation = Callable[[onnx.ModelProto], None]
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
REPORT = "onnx_validation.json"
PROMPTS = [f"prompt of {length}" for length in (16, TRAIN_LENGTH, 128)]
CHECKS = [
    *PROMPTS,
    "left padding",
    "right padding",
    "decoding",
    "chunked prefill",
    "past and present in one buffer",
    "provider",
]
"""Of the profile ort."""


# Graphs that are wrong in one place. The weights' layout stays right.


def find(model: onnx.ModelProto, op_type: str, part: str = "") -> onnx.NodeProto:
    """The first node of a kind whose name has a part."""
    return next(n for n in nodes_of(model.graph) if n.op_type == op_type and part in n.name)


def constant(shape: tuple[int, ...], change: Callable[[Any], None]) -> Mutation:
    """Changes float32 constants of a shape in place."""

    def mutate(model: onnx.ModelProto) -> None:
        found = 0
        for tensor in model.graph.initializer:
            inline = tensor.data_location != onnx.TensorProto.EXTERNAL
            if inline and tensor.data_type == onnx.TensorProto.FLOAT and tuple(tensor.dims) == shape:
                array = numpy_helper.to_array(tensor).copy()
                change(array)
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
                found += 1
        assert found

    return mutate


def slopes(heads: slice, factor: float) -> Mutation:
    """Of 4 heads."""

    def change(array: Any) -> None:
        array[..., heads] *= factor

    return constant((1, 1, 4), change)


def where(shape: tuple[int, ...], value: float, factor: float) -> Mutation:
    """Changes constants that have one value."""

    def change(array: Any) -> None:
        array *= np.where(np.abs(array - value) < 1e-6, np.float32(factor), np.float32(1))

    return constant(shape, change)


def attribute(op_type: str, part: str, name: str, value: Any) -> Mutation:
    return lambda model: set_attribute(find(model, op_type, part), name, value)


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    for place, attribute in enumerate(node.attribute):
        if attribute.name == name:
            del node.attribute[place]
            break
    node.attribute.append(onnx.helper.make_attribute(name, value))


def pass_on(node: onnx.NodeProto, value: int) -> None:
    """Makes a node an Identity of one of its inputs."""
    kept = node.input[value]
    del node.input[:]
    node.input.append(kept)
    node.op_type = "Identity"


def later_keys_are_seen(model: onnx.ModelProto) -> None:
    for node in nodes_of(model.graph):
        if node.op_type == "Where" and "/layers." in node.name:
            pass_on(node, 2)


def no_bias(model: onnx.ModelProto) -> None:
    del find(model, "Gemm", "/layers.1/").input[2]


def swapped_layers(model: onnx.ModelProto) -> None:
    first, second = (find(model, "Gemm", f"/layers.{n}/") for n in (0, 1))
    first.input[1], second.input[1] = second.input[1], first.input[1]


def relu(model: onnx.ModelProto) -> None:
    node = next(n for n in nodes_of(model.graph) if n.op_type in ("Gelu", "FastGelu"))
    node.op_type, node.domain = "Relu", ""
    del node.attribute[:]


def approximate_gelu(model: onnx.ModelProto) -> None:
    """What BLOOM has and Falcon does not: within 1e-3 of the exact one."""
    for node in nodes_of(model.graph):
        if node.op_type == "Gelu":
            node.domain = ""
            set_attribute(node, "approximate", "tanh")


def another_task(model: onnx.ModelProto) -> None:
    entry = model.metadata_props[0]
    entry.value = json.dumps({**json.loads(entry.value), "task": "feature-extraction"})


def invalid(model: onnx.ModelProto) -> None:
    find(model, "Gemm").op_type = "Gemmm"


def swapped(entry: str) -> Mutation:
    """Two tensors of the same shape change places in the file's pointers; one is too short."""

    def mutate(model: onnx.ModelProto) -> None:
        name = "transformer.h.{}.mlp.dense_h_to_4h.weight"
        pair = [t for t in model.graph.initializer if t.name in (name.format(0), name.format(1))]
        first, second = (next(e for e in t.external_data if e.key == entry) for t in pair)
        if entry == "length":
            first.value = str(int(first.value) - 4)
        else:
            first.value, second.value = second.value, first.value

    return mutate


ATTENTION = ("GroupQueryAttention", "/layers.1/")
MUTATIONS: dict[str, tuple[str, tuple[Profile, ...], Mutation]] = {
    "slope of one head": ("bloom", PROFILES, slopes(slice(1, 2), 1.01)),
    "slopes unscaled": ("mpt", PROFILES, slopes(slice(None), 2.0)),
    "padding channel zeroed": ("bloom", ("ort",), where((1,), 128 * tiny.HEAD_DIM**0.5, 0)),
    "padding is seen": ("falcon", ("portable",), lambda model: pass_on(find(model, "Where", "/alibi/"), 1)),
    "later keys are seen": ("mpt", ("portable",), later_keys_are_seen),
    "scale of the scores": ("bloom", ("ort",), attribute(*ATTENTION, "scale", 1.01 * tiny.HEAD_DIM**-0.5)),
    "scale of the queries": ("bloom", ("portable",), where((), tiny.HEAD_DIM**-0.5, 1.01)),
    "sliding window": ("falcon", ("ort",), attribute(*ATTENTION, "local_window_size", 40)),
    "epsilon": ("bloom", PROFILES, attribute("LayerNormalization", "", "epsilon", 1e-3)),
    "no bias": ("falcon", PROFILES, no_bias),
    "layers swapped": ("mpt", PROFILES, swapped_layers),
    "relu": ("bloom", PROFILES, relu),
    "approximate gelu": ("falcon", PROFILES, approximate_gelu),
    "invalid": ("bloom", PROFILES, invalid),
}
WRONG = [(name, profile) for name, (_, profiles, _) in MUTATIONS.items() for profile in profiles]


CUTS = {
    "operations": ("OPERATIONS", "first 2 of 4 layers"),
    "elements": ("ELEMENTS", "first 2 of 4 layers"),
    "logits": ("LOGITS", "first 64 of 97 tokens of the vocabulary"),
    "table": ("TABLE", "first 64 of 97 tokens of the vocabulary"),
}


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``cut(*kinds)``: makes tiny models too large."""
    return lambda *kinds: [monkeypatch.setattr(coverage, CUTS[kind][0], 1) for kind in kinds] and None


PART = ("operations", "logits")


@pytest.mark.parametrize(
    ("mutation", "profile", "kinds", "dtype"),
    [
        *((*wrong, (), None) for wrong in WRONG),
        *(
            (mutation, profile, PART, None)
            for mutation, profile in zip(
                ("slope of one head", "epsilon", "no bias", "layers swapped", "relu"),
                cycle(PROFILES),
                strict=False,
            )
        ),
        *(("slope of one head", profile, (), torch.bfloat16) for profile in PROFILES),
    ],
)
def test_a_graph_that_computes_something_else(
    repository: Make,
    plant: Plant,
    cut: Callable[..., None],
    mutation: str,
    profile: Profile,
    kinds: tuple[str, ...],
    dtype: torch.dtype | None,
) -> None:
    """A mistake of what builds graphs, which only running them tells."""
    family, _, mutate = MUTATIONS[mutation]
    folder = (
        repository("bloom", n_layer=4) if kinds else repository(family, **{"dtype": dtype} if dtype else {})
    )
    plant(mutate, ir.DataType.BFLOAT16 if dtype else None)
    exported(folder, profile)
    before = fingerprint(folder)
    cut(*kinds)
    report = graphs_report(folder)
    checks = ["load"] if mutation == "invalid" else CHECKS
    assert (report.failure or "").startswith(tuple(f"model.onnx: {name}: " for name in checks))
    assert "FAILED" in report.summary()
    failed = {check.name for check in report.graphs[0].providers[0].checks if not check.passed}
    if mutation.startswith("padding"):
        assert failed == {"left padding", "decoding"}  # the cases are not all alike
    assert fingerprint(folder) == before


FILES = {
    **{(family, profile): [] for family, profiles, _ in MUTATIONS.values() for profile in profiles},
    ("bloom", "ort"): [swapped("offset"), swapped("length")],
    ("bloom", "portable"): [swapped("location")],
    ("mosaic_bert", "ort"): [another_task, slopes(slice(None), 0.9)],
}
"""Family and profile -> what is changed in a graph's file."""
for name, profile in WRONG:
    FILES[MUTATIONS[name][0], profile].append(MUTATIONS[name][2])


@pytest.mark.parametrize(("graph", "mutations"), FILES.items(), ids=["-".join(each) for each in FILES])
def test_a_file_that_is_not_what_is_built(
    repository: Make,
    monkeypatch: pytest.MonkeyPatch,
    graph: tuple[str, Profile],
    mutations: list[Mutation],
) -> None:
    """It is not run."""
    monkeypatch.setattr(reference.Reference, "load", None)
    family, profile = graph
    folder = repository(family, sharded=profile == "portable")
    path = exported(folder, profile) / "model.onnx"
    right = path.read_bytes()
    for mutate in mutations:
        path.write_bytes(right)
        edit(path, mutate)
        assert re.match(r"model\.onnx: graph: the (node|tensor|output) ", graphs_report(folder).failure or "")


def test_export_leaves_nothing_of_a_wrong_graph(repository: Make, refused: Refused, plant: Plant) -> None:
    folder = repository("bloom", dtype=torch.float16)
    plant(MUTATIONS["epsilon"][2], ir.DataType.FLOAT)
    line = refused("export", folder)
    says(line, "model_fp32.onnx: prompt of 16", "largest difference", "no graph was written")


def test_weights_that_changed_in_place_are_caught_by_running(repository: Make) -> None:
    """A standalone graph has its own copy, which is then an old one."""
    folder = repository()
    export(folder, OnnxOptions(standalone=True, validate=False))
    assert graphs_report(folder).passed
    data = np.memmap(folder / "model.safetensors", np.float32, mode="r+", offset=0)
    data[-32:] += 1
    data.flush()
    assert (graphs_report(folder).failure or "").startswith("onnx/model.onnx: prompt of ")


# Damaged files


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("flips", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_flipped_bits_of_a_graph_end_in_one_line(repository: Make, flips: int) -> None:
    """Anywhere; and where text is no UTF-8 any more: in the description, and in names.

    onnxruntime writes the names of nodes into its profile.
    """
    folder = repository()
    graph = exported(folder) / "model.onnx"
    content = graph.read_bytes()
    random = np.random.default_rng(1)
    places = [(int(random.integers(len(content))), int(random.integers(8))) for _ in range(flips)]
    for part in (b"ntk_convert", b"/layers.0/GroupQueryAttention", b"/alibi/Cast"):
        places.append((content.index(part) + 1, 7))
    for at, bit in places:
        graph.write_bytes(content)
        flip(graph, at, bit)
        with pytest.raises((ValidationError, SourceError)) as error:
            if (failure := graphs_report(folder).failure) is not None:
                raise ValidationError(failure)
            manifest.compare(read_converted(folder))  # what changes no result changes the file
        assert "\n" not in str(error.value), (bit, at)


def test_all_graphs_are_validated(repository: Make) -> None:
    folder = repository(dtype=torch.float16)
    export(folder, OnnxOptions(standalone=True, validate=False))
    exported(folder)
    names = ["model.onnx", "model_fp32.onnx", "onnx/model_fp16.onnx"]
    right = (folder / names[1]).read_bytes()
    edit(folder / names[1], relu)
    report = graphs_report(folder)
    assert (report.failure or "").startswith("model_fp32.onnx: graph: ")
    assert [(graph.file, graph.passed) for graph in report.graphs] == list(
        zip(names, (True, False, True), strict=True)
    )
    (folder / names[1]).write_bytes(right)
    for name, kept in (("onnx/model_fp16.onnx_data", 100), ("onnx/model_fp16.onnx_data", 0), (names[0], 0)):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:kept])
        with raises(ValidationError, name.removesuffix("_data"), "not written by ntk-convert"):
            graphs_report(folder)
        (folder / name).write_bytes(content)
    (folder / "onnx/model_fp16.onnx_data").unlink()
    with raises(ValidationError, "model_fp16.onnx", "not written by ntk-convert", "damaged"):
        graphs_report(folder)


CHANGED: dict[str, Callable[[Path], object]] = {
    "model-00002-of-00004.safetensors": lambda path: flip(path, -2),
    "model.safetensors.index.json": lambda path: edit_json(path, {"note": "mine"}),
    "config.json": lambda path: edit_json(path, {"note": "mine"}),
    "model.onnx": lambda path: edit(path, lambda model: setattr(model, "doc_string", "mine")),
    "onnx/model.onnx_data": lambda path: path.write_bytes(path.read_bytes() + b"more"),
}


def test_files_that_are_not_as_they_were_written(repository: Make, run: RunCli) -> None:
    """Graphs over changed weights still agree with torch, which reads them too."""
    folder = repository(sharded=True)
    exported(folder)
    export(folder, OnnxOptions(standalone=True, validate=False))
    (folder / "README.md").write_text("# Mine\n")  # may be edited
    assert run("validate", folder).code == 0
    for name, change in CHANGED.items():
        right = (folder / name).read_bytes()
        change(folder / name)
        with raises(SourceError, f"{name} is not as"):
            manifest.compare(read_converted(folder))
        (folder / name).write_bytes(right)
    exported(folder)
    edit(folder / "model.onnx", lambda model: setattr(model, "doc_string", "mine"))
    before, result = fingerprint(folder), run("validate", folder)
    assert (result.code, "\nFAILED  model.onnx: " in result.out or "FAILED  files: " in result.out) == (
        1,
        True,
    )
    assert fingerprint(folder) == before


def test_linked_weights_are_not_compared_and_a_manifest_is_needed(
    pristine: Pristine, run: RunCli, tmp_path: Path
) -> None:
    folder = convert(
        pristine("bloom"), tmp_path / "model", scale=2, train_length=TRAIN_LENGTH, link="hard", verify=False
    ).path
    exported(folder)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()  # the source keeps its own
    weights.write_bytes(content)
    flip(weights, -2)
    assert run("validate", folder).code == 0
    (folder / MANIFEST).unlink()
    says(run("validate", folder).out, "FAILED  files: ", f"no {MANIFEST}")


# The report


@pytest.mark.version
@pytest.mark.parametrize(("family", "profile"), list(zip(("bloom", "mpt"), PROFILES, strict=True)))
def test_the_report_of_a_right_graph(repository: Make, profile: Profile, family: str) -> None:
    folder = repository(family)
    path = exported(folder, profile) / "model.onnx"
    report = graphs_report(folder, "cpu").to_json()
    assert report["passed"] is True
    assert report["versions"].keys() == {"onnx", "onnxruntime", "torch", "transformers"}
    assert report["versions"]["onnxruntime"] == onnxruntime.__version__
    [graph] = report["graphs"]
    assert (graph["file"], graph["profile"], graph["dtype"]) == ("model.onnx", profile, "fp32")
    assert (graph["bytes"], graph["extent"]) == (path.stat().st_size, "the whole model")
    assert [(check["name"], check["passed"]) for check in graph["structure"]] == [("graph", True)]
    [place] = graph["providers"]
    assert (place["provider"], place["note"]) == ("cpu", None)
    assert TOLERANCES["fp32"] <= place["tolerance"] < 1e-3
    assert place["ran"].keys() == {CPU}
    if profile == "ort":
        assert place["ran"][CPU]["GroupQueryAttention"] == 2
    checks = [name for name in CHECKS if profile == "ort" or "buffer" not in name]
    assert [check["name"] for check in place["checks"]] == checks
    for check in place["checks"]:
        assert check["passed"] is True
        if check["name"] != "provider":
            assert 0 < check["difference"] < 1e-5
            assert f"(at most {place['tolerance']:.2g})" in check["detail"]


@pytest.mark.parametrize("profile", ["ort", "portable"])
def test_long_texts_of_a_trained_model_are_as_right_as_float32_lets_them(
    tmp_path: Path, profile: Profile
) -> None:
    """Its attention is peaked; at 2048 tokens, torch's logits differ by 1.1e-4 from those in float64."""
    folder = tmp_path / "out"
    convert(Path(__file__).parents[1] / "examples" / "tiny-bloom", folder, method="none", verify=False)
    exported(folder, profile)
    [graph] = graphs_report(folder, "cpu").graphs
    assert graph.passed, graph.failure
    assert "prompt of 2048" in [check.name for check in graph.providers[0].checks]


@pytest.mark.parametrize(
    ("profile", "family", "changes"),
    [
        ("ort", "mpt", {}),
        ("portable", "mpt", {}),
        # Numbers that bfloat16 rounds: BTLM's factors, the lengths of Baichuan2's head, a limit.
        ("ort", "jais", {"mup_embeddings_scale": 14.6, "mup_output_alpha": 2.22, "mup_width_scale": 0.1}),
        ("portable", "baichuan", {}),
        ("ort", "mpt", {"attn_config": {"clip_qkv": 1.3}, "logit_scale": 0.3}),
    ],
)
def test_a_bfloat16_graph_runs_in_float32_on_the_cpu(
    repository: Make, profile: Profile, family: str, changes: dict[str, Any]
) -> None:
    folder = repository(family, dtype=torch.bfloat16, **changes)
    exported(folder, profile)
    report = graphs_report(folder)
    assert report.passed, report.failure
    native, widened = report.to_json()["graphs"]
    assert (native["file"], native["dtype"]) == ("model.onnx", "bf16")
    assert (widened["file"], widened["dtype"]) == ("model_fp32.onnx", "fp32")
    [place] = native["providers"]
    assert "in float32" in place["note"]
    assert "in float32" in report.summary()
    assert place["tolerance"] == widened["providers"][0]["tolerance"]
    assert widened["providers"][0]["note"] is None


LARGE = {"n_layer": 4, "dtype": torch.bfloat16, "tie_word_embeddings": False}
BACKBONE = "feature-extraction"


@pytest.mark.parametrize(
    ("family", "profile", "kinds", "model", "options"),
    [
        *(
            (family, profile, kinds, {tiny.CHECKPOINTS[family].layers: 4}, {})
            for family, profile, kinds in zip(
                tiny.FACTORIES,
                cycle(PROFILES),
                cycle([PART, ("operations",), ("elements", "table")]),
                strict=False,
            )
        ),
        ("bloom", "ort", PART, LARGE, {"last_logits": True}),
        ("bloom", "portable", PART, LARGE, {"dtype": "fp16"}),
        *(("bloom", profile, PART, LARGE, {"standalone": True}) for profile in PROFILES),
        ("bloom", "portable", PART, LARGE, {"dtype": "w8a8"}),
        ("mpt", "ort", PART, {"n_layers": 4}, {"dtype": "int4"}),
        *(
            (family, "ort", PART, {"head": head, "num_hidden_layers": 4}, {"task": task})
            for family in tiny.ENCODERS
            for head, task in (("MaskedLM", "fill-mask"), ("MaskedLM", BACKBONE), ("Model", BACKBONE))
        ),
    ],
)
def test_parts_of_right_graphs_pass(
    repository: Make,
    cut: Callable[..., None],
    family: str,
    profile: Profile,
    kinds: tuple[str, ...],
    model: dict[str, Any],
    options: dict[str, Any],
) -> None:
    folder = repository(family, **model)
    exported(folder, profile, **options)
    cut(*kinds)
    report = graphs_report(folder)
    assert report.passed, report.failure
    for graph in report.to_json()["graphs"]:
        for kind in kinds:  # without logits, the vocabulary need not be shorter
            assert (CUTS[kind][1] in graph["extent"]) == (options.get("task") != BACKBONE or kind != "logits")
        if profile == "ort" and family in tiny.FACTORIES:
            assert graph["providers"][0]["ran"][CPU]["GroupQueryAttention"] == 2


# Providers


@pytest.fixture
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime takes itself for the build for CUDA, whose libraries are not here."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "cuda_version", "13.0")


VERSION = onnxruntime.__version__
NO_CUDA = (
    f"onnxruntime-gpu {VERSION}",
    "CUDA 13",
    "Failed to load lib",
    f"pip install 'onnxruntime-gpu[cuda,cudnn]=={VERSION}'",
)


@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.usefixtures("gpu_build")
def test_cuda_whose_libraries_do_not_load(
    repository: Make, run: RunCli, refused: Refused, dtype: torch.dtype
) -> None:
    """Nothing is wrong with the graph, so it stays; who asked for CUDA gets an error, others a note."""
    folder = repository(dtype=dtype)
    exported(folder)
    before = fingerprint(folder)
    for command in ("validate", "export"):
        says(refused(command, folder, "--provider", "cuda"), NO_CUDA)
        assert fingerprint(folder) == before
    done = run("validate", folder, "--json")
    assert (done.code, done.err) == (0, "")
    says(done.json["graphs"]["note"], NO_CUDA)
    assert [place["provider"] for place in done.json["graphs"]["graphs"][0]["providers"]] == ["cpu"]


@pytest.mark.usefixtures("gpu_build")
def test_an_old_onnxruntime_is_not_asked_for_cuda(
    repository: Make, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.24 copies tensors around If and Loop, and 1.23 around more operators, in every layer."""
    monkeypatch.setattr(onnxruntime, "__version__", "1.24.4")
    line = refused("validate", exported(repository(dtype=torch.float16)), "--provider", "cuda")
    says(line, "onnxruntime-gpu 1.24.4", "install onnxruntime-gpu 1.25.0 or newer")


def test_a_silent_fall_back_is_an_error(repository: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class FallsBack(onnxruntime.InferenceSession):
        def __init__(self, model: Any, options: Any, *, providers: Any, **others: Any):
            # Products in TF32 differ by more than the limit for float32.
            assert providers == [(CUDA, {"use_tf32": "0"}), (CPU, {})]
            super().__init__(model, options, providers=[CPU], **others)

    graph = exported(repository(dtype=torch.float16)) / "model.onnx"
    monkeypatch.setattr(onnxruntime, "InferenceSession", FallsBack)
    with raises(ProviderError, CUDA, CPU):
        session.Session(graph, "cuda")


@pytest.mark.parametrize("profile", PROFILES)
def test_large_operators_that_ran_elsewhere_are_a_failure(
    repository: Make, monkeypatch: pytest.MonkeyPatch, profile: Profile
) -> None:
    """onnxruntime gives single operators to the CPU without a word."""

    class Elsewhere(session.Session):
        def __init__(self, model: Any, provider: str, **options: Any):
            assert provider in ("cpu", "cuda")
            super().__init__(model, "cpu", **options)

    folder = repository(dtype=torch.float16)
    exported(folder, profile)
    monkeypatch.setattr(opened_graph, "Session", Elsewhere)
    monkeypatch.setattr(validate, "check_available", lambda provider: None)
    report = graphs_report(folder, "cuda")
    operator = "GroupQueryAttention" if profile == "ort" else "MatMul"
    assert f"{operator} on {CPU}" in (report.failure or "")
    on_cpu, on_cuda = report.to_json()["graphs"][0]["providers"]
    assert all(check["passed"] for check in on_cpu["checks"])
    assert [check["name"] for check in on_cuda["checks"] if not check["passed"]] == ["provider"]


def test_float32_graphs_are_not_asked_of_cuda(
    repository: Make, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GroupQueryAttention has half precision only, and would silently run on the CPU."""
    folder = repository()
    exported(folder)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(validate, "check_available", lambda provider: None)
    [on_cpu] = graphs_report(folder).graphs[0].providers
    assert on_cpu.provider == "cpu"
    assert "--onnx-dtype fp16" in refused("validate", folder, "--provider", "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(
    not (CUDA in onnxruntime.get_available_providers() and torch.cuda.is_available()), reason="no CUDA"
)
@pytest.mark.parametrize(
    ("family", "profile", "dtype"),
    [
        *dealt(tiny.FACTORIES, ["ort"], ["fp16", "bf16"]),
        *dealt(tiny.FACTORIES, ["ort"], ["int8-fp16", "int4-fp16"]),
        *dealt(tiny.FACTORIES, ["portable"], ["fp32", "fp16", "int8", "int4"]),
        *dealt(tiny.ENCODERS, ["ort"], ["fp16", "bf16", "int8-fp16", "int4-fp16"]),
        *dealt(tiny.ENCODERS, ["portable"], ["fp32", "int8", "int4"]),
    ],
)
def test_graphs_on_cuda(repository: Make, family: str, profile: Profile, dtype: str) -> None:
    stored = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype.rpartition("-")[2], torch.float32)
    folder = repository(family, dtype=stored)
    exported(folder, profile, dtype=dtype)
    report = graphs_report(folder, "cuda")
    assert report.passed, report.failure
    [graph] = [graph for graph in report.graphs if graph.dtype == dtype]
    on_cpu, on_cuda = graph.providers
    assert (on_cpu.provider, on_cuda.provider) == ("cpu", "cuda")
    attentions = 2 if profile == "ort" and family in tiny.FACTORIES else 0
    assert on_cuda.ran[CUDA].get("GroupQueryAttention", 0) == attentions
    products = {"GroupQueryAttention", "Gemm", "MatMul", "FusedMatMul", "MatMulNBits"}
    assert not products & on_cuda.ran.get(CPU, {}).keys()
    assert on_cuda.tolerance >= TOLERANCES[dtype]
    assert on_cuda.note is None
