"""The page in a browser: from a click to a model that loads, refusals, visitors, sizes and colours."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ui.conftest import LOGIN, MODEL, ROOT, Site, held, running, wait

ID = "ada/tiny-bloom"
EXAMPLE = "bigscience/bloom-1b7"
"""One of the page's examples; its name says its trained length."""
Visit = Callable[..., Any]


def look(page: Any, model: str = ID) -> None:
    """Looks at a model whose trained length the visitor has to say."""
    page.get_by_label("A Hub id").fill(model)
    page.get_by_label("A Hub id").press("Enter")
    page.locator(".facts", has_text=f"{model} at").wait_for()
    say(page, "256")
    page.locator("figure svg").first.wait_for()


def say(page: Any, length: str) -> None:
    """Says the trained length of the model that is on the page."""
    page.get_by_label("Trained length, in tokens").fill(length)
    page.get_by_role("button", name="Look").click()
    page.locator(".facts", has_text=f"{length} tokens").wait_for()


def test_from_a_click_to_a_model_that_loads(space: Site, visit: Visit, tmp_path: Path) -> None:
    page = visit(space)
    space.hub.requests.clear()
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("button", name="Logout").wait_for()
    look(page)
    facts = page.locator(".facts").inner_text()
    assert all(text in facts for text in ("bloom, decoder", "148 k", "594 kB", "256 tokens"))
    command = page.locator("#command textarea")
    assert command.input_value() == (
        f"ntk-convert {ID} --method by-parts --dynamic position --train-length 256 --out ./tiny-bloom-ntk"
    )

    drawn = page.locator("figure").first.inner_html()
    page.get_by_label("Longest input").first.fill("2048")
    page.get_by_label("Longest input").first.press("Enter")
    page.get_by_text("to 8 at 2,048 tokens").wait_for()
    wait(lambda: page.locator("figure").first.inner_html() != drawn)
    page.get_by_label("Short inputs must stay").uncheck()
    wait(lambda: "--target-length 2048" in command.input_value())
    assert "safetensors" not in str(space.hub.downloads())

    page.get_by_role("button", name="Convert").click()
    page.get_by_text("Converted and checked").wait_for()
    assert page.locator(".done li.passed").count() >= 4
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    with zipfile.ZipFile(io.BytesIO(Path(download.value.path()).read_bytes())) as archive:
        archive.extractall(tmp_path)
    _loads(tmp_path / "tiny-bloom-ntk")

    page.get_by_label("Name of a repository").fill("scaled")
    page.get_by_role("button", name="Push").click()
    said = page.get_by_text("files to ada/scaled").or_(page.get_by_test_id("toast-body"))
    said.wait_for()
    assert "Pushed" in said.inner_text()
    pushed = space.hub.files("ada/scaled")
    assert space.hub.repositories["ada/scaled"].private
    assert pushed["config.json"] == (tmp_path / "tiny-bloom-ntk" / "config.json").read_bytes()
    written = [request for request in space.hub.requests if request.method == "POST"]
    assert {request.token for request in written if request.host == "hub"} == {LOGIN}
    assert LOGIN not in space.log.read_text()


def test_it_starts_in_a_clone_by_the_command_of_its_readme(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "space" / "README.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^.*python examples/space/app\.py$", text, re.MULTILINE)
    with running(tmp_path, command.replace("python", f"exec {shlex.quote(sys.executable)}"), ROOT) as site:
        assert b"ntk-convert" in urllib.request.urlopen(site.url).read()


def _loads(folder: Path) -> None:
    """Loads the result as users do; its slopes are those that were chosen."""
    import torch
    from transformers import AutoModelForCausalLM

    scaling = json.loads((folder / "config.json").read_text())["alibi_scaling"]
    assert scaling == {"type": "by-parts", "factor": 8.0, "ramp": [32.0, 128.0]}
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    stock = AutoModelForCausalLM.from_pretrained(MODEL)
    tokens = torch.arange(4, 300)[None]
    found, expected = (each(tokens).logits[0] for each in (model, stock))
    assert type(model).__name__ == "NtkBloomForCausalLM"
    assert torch.isfinite(found).all()
    assert not torch.allclose(found[-1], expected[-1], atol=1e-3)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (str(MODEL), "give a Hub id"),
        ("../space/converter", "give a Hub id"),
        ("converter", "give a Hub id"),  # a folder beside the page, whose name could be a Hub id
        ("ada/none; touch /tmp/x", "give a Hub id"),
        ("ada/nothing", "RepositoryNotFoundError"),
        ("ada/learned", "positions"),
        ("ada/large", "0.001 GB"),
    ],
)
def test_refusals(space: Site, visit: Visit, tmp_path: Path, model: str, said: str) -> None:
    for name, change in (
        ("learned", {"model_type": "gpt2"}),
        ("large", {"_name_or_path": "bigscience/bloom"}),
    ):
        shutil.copytree(MODEL, tmp_path / name)
        config = json.loads((MODEL / "config.json").read_text()) | change
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        space.hub.commit(f"ada/{name}", tmp_path / name)
    with (tmp_path / "large" / "vocab.txt").open("wb") as file:
        file.truncate(2_000_000)
    page = visit(space)
    space.hub.requests.clear()
    page.get_by_label("A Hub id").fill(model)
    page.get_by_label("A Hub id").press("Enter")
    error = page.get_by_test_id("toast-body")
    error.wait_for()
    assert said in error.inner_text()
    assert not page.locator("figure").count()
    assert not [name for name in space.hub.downloads() if name.endswith("safetensors")]


@pytest.mark.parametrize(
    ("way", "model", "length"),
    [
        ("typed", EXAMPLE, "2,048 tokens"),
        ("pasted", EXAMPLE, "2,048 tokens"),
        ("chosen", EXAMPLE, "2,048 tokens"),
        ("pasted", "ada/other", "not known"),
    ],
)
def test_a_length_is_of_the_model_that_it_was_typed_for(
    space: Site, visit: Visit, way: str, model: str, length: str
) -> None:
    space.hub.commit(model, MODEL)
    page = visit(space)
    look(page)
    box, command = page.get_by_label("A Hub id"), page.locator("#command textarea")
    if way == "chosen":
        page.get_by_role("button", name=model).click()
    elif way == "typed":
        box.fill("")
        box.press_sequentially(model)
        box.press("Enter")
    else:
        box.fill(model)
        box.press("Enter")
    facts = page.locator(".facts", has_text=f"{model} at")
    facts.wait_for()
    assert length in facts.inner_text()
    # There is no box of the command while the length is not known.
    wait(lambda: "256" not in command.evaluate_all("boxes => boxes.map(box => box.value).join()"))


def test_two_visitors(space: Site, visit: Visit) -> None:
    space.hub.requests.clear()
    first, second = visit(space), visit(space)
    look(first)
    look(second)
    with held(space.hub) as asked:
        first.get_by_role("button", name="Convert").click()
        wait(asked.is_set)
        second.get_by_role("button", name="Convert").click()
        second.get_by_text(re.compile("queue: 1/1")).wait_for()
    for page in (first, second):
        page.get_by_text("Converted and checked").wait_for()
    assert len(list(space.cache.glob("*/*/result/*.zip"))) == 2
    # Nobody signed in, so nobody's token was sent; HF_TOKEN is the owner's.
    assert {request.headers.get("authorization") for request in space.hub.requests} == {None}
    first.context.close()
    wait(lambda: len(list(space.cache.glob("*/*/result/*.zip"))) == 1)


def test_loading_the_page_again_meanwhile(space: Site, visit: Visit) -> None:
    page = visit(space)
    look(page)
    before = space.folders
    with held(space.hub) as asked:
        page.get_by_role("button", name="Convert").click()
        wait(asked.is_set)
        page.reload()
        page.get_by_label("A Hub id").wait_for()
    wait(lambda: not before & space.folders)
    look(page)
    page.get_by_role("button", name="Convert").click()
    page.get_by_text("Converted and checked").wait_for()
    assert not before & space.folders


@pytest.mark.parametrize("doing", ["looking", "converting"])
def test_a_page_that_is_terminated_leaves_no_folder(visit: Visit, tmp_path: Path, doing: str) -> None:
    command = f"exec {shlex.quote(sys.executable)} app.py"
    with running(tmp_path, command, ROOT / "examples" / "space", PYTHONPATH=str(ROOT)) as site:
        for page in (visit(site), visit(site)):
            look(page)
        if doing == "converting":
            page.get_by_role("button", name="Convert").click()
            page.get_by_text("downloading, converting, checking").wait_for()
        assert len(site.folders) == 2
    assert not [path for path in site.cache.iterdir() if len(path.name) == 32]


CHANGES: dict[str, Callable[[Any], object]] = {
    "method": lambda page: page.get_by_label("linear: all alike").check(),
    "growth": lambda page: page.get_by_label("by length").check(),
    "purpose": lambda page: page.get_by_label("Short inputs must stay").uncheck(),
    "graph": lambda page: page.get_by_label("Add an ONNX graph").check(),
    "length": lambda page: say(page, "512"),
    "model": lambda page: look(page, "ada/other"),
}
"""What a visitor changes, each of which makes another result."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_result_has_the_model_and_the_settings_that_are_on_the_page(
    space: Site, visit: Visit, change: str
) -> None:
    space.hub.commit("ada/other", MODEL)
    page = visit(space)
    look(page)
    page.get_by_text("Choose it yourself").click()
    page.get_by_role("button", name="Convert").click()
    result, download = page.get_by_text("Converted and checked"), page.get_by_role("button", name="Download")
    download.wait_for()
    said = page.locator(".block.done").inner_text()
    assert all(text in said for text in (f"{ID} at ", "by-parts by position", "256 tokens"))
    page.get_by_label("Longest input").first.fill("2048")  # of the pictures only, and the page says so
    page.get_by_label("Longest input").first.press("Enter")
    page.get_by_text("to 8 at 2,048 tokens").wait_for()
    page.get_by_label("Head in the lower picture").first.fill("3")
    page.get_by_label("Head in the lower picture").first.press("Enter")
    page.get_by_text("Bias of head 3").wait_for()
    assert page.get_by_text("Changes only the pictures").is_visible()
    assert result.is_visible()
    assert download.is_visible()
    CHANGES[change](page)
    result.wait_for(state="hidden")
    download.wait_for(state="hidden")


WATCH = """
const look = () => { window.converted ||= document.body.textContent.includes("Converted and checked") }
new MutationObserver(look).observe(document.body, {subtree: true, childList: true, characterData: true})
"""
"""Sets ``converted`` once the page has a result, however shortly."""


def test_a_result_whose_settings_changed_meanwhile_is_not_shown(space: Site, visit: Visit) -> None:
    page = visit(space)
    look(page)
    command = page.locator("#command textarea")
    with held(space.hub) as asked:
        page.get_by_role("button", name="Convert").click()
        wait(asked.is_set)
        page.get_by_label("Short inputs must stay").uncheck()
        wait(lambda: "--target-length 1024" in command.input_value())
        page.evaluate(WATCH)
    page.wait_for_function("window.converted")
    page.get_by_text("Converted and checked").wait_for(state="hidden")
    page.get_by_role("button", name="Download").wait_for(state="hidden")


CUT = """
[...document.querySelectorAll("textarea, input")]
    .filter(box => box.offsetParent && ["textarea", "text"].includes(box.type))
    .filter(box => box.scrollHeight > box.clientHeight + 2 || box.scrollWidth > box.clientWidth)
    .map(box => box.value)
"""
"""The texts that have no room in their boxes."""


def test_a_phone_cuts_no_text(space: Site, visit: Visit) -> None:
    name = "ada/a-model-whose-name-takes-more-than-a-line-on-a-phone-1b"
    space.hub.commit(name, MODEL)
    page = visit(space, viewport={"width": 390, "height": 844})
    look(page, name)
    page.get_by_text("Choose it yourself").click()
    page.get_by_role("button", name="Convert").click()
    page.get_by_role("button", name="Download").wait_for()
    for choice in ("linear: all alike", "by length", "one factor for all"):
        page.get_by_label(choice).check()
        page.get_by_role("button", name="Download").wait_for(state="hidden")
        assert page.evaluate(CUT) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_heads_have_numbers_and_the_page_on_measuring_is_linked(space: Site, visit: Visit) -> None:
    page = visit(space)
    look(page)
    texts = page.locator("figure").first.locator("text").all_text_contents()
    assert texts[texts.index("head") :] == ["head", *map(str, range(8))]
    name = "docs/evaluation.md"
    linked = page.get_by_role("link", name=name).get_attribute("href")
    assert linked == f"https://huggingface.co/spaces/owner/page/blob/main/{name}"
    assert (ROOT / name).is_file()
    assert "hf upload USER/ntk-convert docs " in (ROOT / "examples/space/README.md").read_text()


SHADE = "element => getComputedStyle(element).{}.match(/[\\d.]+/g).slice(0, 3).map(Number)"
"""Red, green and blue of a colour, from 0 to 255."""


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_sizes_and_colours(space: Site, visit: Visit, width: int, colours: str) -> None:
    page = visit(space, viewport={"width": width, "height": 800}, color_scheme=colours)
    look(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = sum(page.eval_on_selector("body", SHADE.format("backgroundColor")))
    text = sum(page.eval_on_selector("svg text", SHADE.format("fill")))
    assert abs(ground - text) > 400
    assert (ground < text) == (colours == "dark")


def test_nobody_can_leave_a_file(space: Site) -> None:
    """Gradio has a route for files, though this page takes none."""
    boundary = "b0undary"
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
    request = urllib.request.Request(
        f"{space.url}/gradio_api/upload",
        data=f"{part}{'x' * 1000}\r\n--{boundary}--\r\n".encode(),
        headers={"Content-Type": f"multipart/form-data; boundary={boundary}"},
    )
    wait(lambda: not space.folders)  # of the pages before
    before = {*space.cache.rglob("*")}
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 413
    assert {*space.cache.rglob("*")} == before
