"""A page that converts a model: name it, say what it is for, see what changes, convert.

    PYTHONPATH=. python examples/space/app.py

On a computer of your own it takes folders and models of the Hub, and as a Space models of the Hub alone;
README.md beside this file says how to set up a Space. It reads these environment variables:

    NTK_MAX_GB   size of the largest result in GB; 8 on a Space, else any
    SPACE_ID     set by the Hub: the page is a Space
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shlex
import shutil
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder
from huggingface_hub import constants, try_to_load_from_cache
from shown import LENGTH, POSITION, STATIC, concave_reason, facts, pictures, reason, slider_effect, summary
from tqdm import tqdm

from converter import ConverterError, Inspection, convert, export, inspect, interrupts, push, supported

HERE = Path(__file__).parent
SPACE = "SPACE_ID" in os.environ
LIMIT = float(os.environ.get("NTK_MAX_GB", "8" if SPACE else "inf"))
CACHE = Path(get_upload_folder())
"""Of Gradio, which serves files from here without a copy; it may hold those of other programs."""
MEASURING = "docs/evaluation.md"
if SPACE:
    MEASURING = f"[{MEASURING}](https://huggingface.co/spaces/{os.environ['SPACE_ID']}/blob/main/{MEASURING})"
"""The page on measuring: on a Space a link to its copy, else the name in the clone."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
MODELS = (
    "bigscience/bloom-1b7",
    "mosaicml/mpt-7b",
    "tiiuae/falcon-rw-1b",
    "jinaai/jina-embeddings-v2-base-en",
)
METHODS = [
    ("concave: far keys, in all heads; near keys as trained", "concave"),
    ("by-parts: those that see far for the trained length", "by-parts"),
    ("ntk: the farther a head sees, the more", "ntk"),
    ("linear: all alike", "linear"),
]
GROWTHS = {"decoder": (POSITION, LENGTH, STATIC), "encoder": (LENGTH, STATIC), "rotary": (STATIC, LENGTH)}
"""What the factor can grow with, in each kind of model."""
LONGEST = 16
"""The longest input that the page offers, in trained lengths."""

TRACKED = gr.Progress(track_tqdm=True)
"""As a default, it makes Gradio show the tool's bars."""

FOLDER = CACHE / secrets.token_hex(16)
"""Of this process, with the folders of its pages; whoever ends the page deletes it."""
folders: dict[str, Path] = {}
"""Session of a page that was used -> its folder, whose name nobody can guess."""
closed: deque[str] = deque(maxlen=1000)
"""Sessions whose page was closed; what they still asked for is not begun."""


@dataclass(frozen=True, eq=False)  # Gradio hashes it, and an Inspection holds dicts
class Looked:
    """A model that was looked at."""

    name: str
    kind: str
    config: Path
    """A folder with its config.json."""
    given: int | None
    """The trained length that the visitor gave."""
    found: Inspection

    @property
    def trained(self) -> int:
        """The trained length in tokens; 1 while it is not known."""
        return self.found.train_length or 1

    def settings(self, method: str, growth: str, longest: float, onnx: bool) -> tuple[Any, ...]:
        """All that a result depends on, to compare; the longest input is of one factor for all only."""
        target = int(longest) if growth == STATIC else None
        return self.name, self.found.commit, self.given, method, growth, target, onnx

    def propose(self, *, exact: bool) -> tuple[str, str]:
        """The method and the growth for a model whose short inputs must, or need not, stay as they are."""
        method = "by-parts" if self.kind == "decoder" else "ntk"
        return method, STATIC if self.kind == "rotary" or not exact else GROWTHS[self.kind][0]

    def options(self, method: str, growth: str, longest: float) -> dict[str, Any]:
        """The scaling for inputs of up to ``longest`` tokens, as ``convert`` takes it."""
        more = {"train_length": self.given} if self.given else {}
        if method == "concave":
            if growth != POSITION:
                raise refusal("concave grows by position only; choose that, or another method")
            return {"method": method, **more}
        if growth == STATIC:
            return {"method": method, "target_length": int(longest), **more}
        return {"method": method, "dynamic": growth.removeprefix("by "), **more}

    @property
    def out(self) -> str:
        """The name of the result's folder."""
        return re.sub("[^A-Za-z0-9]+", "-", self.found.source.rpartition("/")[2]).strip("-")[:60] + "-ntk"


# Sessions and errors


def refusal(text: str) -> gr.Error:
    """An error that stays on the page until it is closed, and is not in the server's log."""
    return gr.Error(escape(text, quote=False), duration=None, print_exception=False)


def leave(request: gr.Request) -> None:
    """Deletes the folder of a page that was closed, or loaded again."""
    if request.session_hash is None:
        return
    closed.append(request.session_hash)
    folder = folders.pop(request.session_hash, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def session(request: gr.Request) -> Iterator[Path]:
    """The page's folder. The tool's errors become the page's; what a closed page still wrote is deleted."""
    name = request.session_hash
    if name is None or name in closed:
        raise refusal("this page is out of date; load it again")
    folder = folders.setdefault(name, FOLDER / secrets.token_hex(16))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except ConverterError as error:
        raise refusal(str(error)) from None
    except OSError as error:  # without its path, which is the page's secret
        raise refusal(f"the page cannot write this: {error.strerror}") from None
    finally:
        if name in closed:
            folders.pop(name, None)
            shutil.rmtree(folder, ignore_errors=True)


def access(folder: Path, login: gr.OAuthToken | None, commit: str | None = None) -> dict[str, Any]:
    """How the Hub is read: as the visitor, and into a cache that no other visitor reads."""
    return {"token": login.token if login else None, "cache_dir": folder / "hub", "revision": commit}


# What the page does


def look(
    typed: str,
    given: float | None,
    before: Looked | None,
    request: gr.Request,
    login: gr.OAuthToken | None,
) -> tuple[Any, ...]:
    """Describes a model, and sets the controls to what suits it.

    The length is of the model that was looked at before, whose box it is in; another model does without it.
    """
    with session(request) as folder:
        name = typed.strip().removeprefix("https://huggingface.co/").rstrip("/")
        if SPACE and (not HUB_ID.fullmatch(name) or Path(name).exists()):
            raise refusal("give a Hub id, such as bigscience/bloom-1b7; for a folder, run this page yourself")
        length = None
        if given and before is not None and before.name == name:
            length = int(given)
        found = inspect(name, train_length=length, **access(folder, login))
        config = Path(name)
        if found.commit is not None:
            # The config alone, so that the pictures ask the Hub nothing.
            config = Path(tempfile.mkdtemp(dir=folder))
            cached = try_to_load_from_cache(name, "config.json", folder / "hub", found.commit)
            shutil.copy(str(cached), config)
        kinds = {entry.name: entry.kind for entry in supported()}
        looked = Looked(name, "rotary" if found.rotary else kinds[found.family], config, length, found)
        method, growth = looked.propose(exact=True)
        if found.train_length is not None:
            check(looked, looked.options(method, growth, 4 * looked.trained), folder, login)
    unit, known, slopes = looked.trained, found.train_length is not None, found.slopes.stock
    return (
        looked,
        facts(found, looked.kind),
        gr.Number(value=length, visible=not known or length is not None),
        *[gr.Column(visible=known)] * 3,
        gr.Slider(2 * unit, LONGEST * unit, value=4 * unit, step=unit),
        gr.Checkbox(value=True, visible=looked.kind != "rotary"),
        method,
        gr.Radio(list(GROWTHS[looked.kind]), value=growth),
        gr.Slider(maximum=max(1, len(slopes) - 1), value=slopes.index(min(slopes)) if slopes else 0),
        gr.Checkbox(value=False, visible=looked.kind != "rotary"),
    )


def check(looked: Looked, options: dict[str, Any], folder: Path, login: gr.OAuthToken | None) -> None:
    """Refuses what cannot be converted or is too large, before its weights are downloaded."""
    where = access(folder, login, looked.found.commit)
    planned = convert(looked.name, folder / "plan", dry_run=True, **options, **where)
    size = sum(size or 0 for size in planned.files.values()) / 1e9
    if size > LIMIT:
        raise refusal(f"{looked.found.source} has {size:.1f} GB, and this page converts up to {LIMIT:g} GB")


def propose(looked: Looked | None, exact: bool) -> tuple[str, str]:
    """What to set if short inputs must, or need not, stay as they are."""
    return looked.propose(exact=exact) if looked else ("by-parts", POSITION)


def draw(
    looked: Looked | None, method: str, growth: str, longest: float, head: float, onnx: bool
) -> tuple[Any, ...]:
    """The reason for a scaling, its pictures, the command that does the same, and what the slider does."""
    if looked is None or looked.found.train_length is None:
        return "", "", "", gr.skip()
    try:
        # A factor that grows has this value at the longest input.
        factor = max(1.0, longest / looked.trained)
        how: dict[str, Any] = {"method": method, "train_length": looked.trained}
        if method != "concave":
            how["scale"] = factor
        table = inspect(looked.config, **how)
    except ConverterError as error:
        raise refusal(str(error)) from None
    options = looked.options(method, growth, longest).items()
    words = [word for name, value in options for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--out", f"./{looked.out}", *["--onnx"] * onnx]
    told = concave_reason(looked.trained) if method == "concave" else reason(looked.trained, growth, factor)
    return (
        told,
        pictures(table, longest, int(head)),
        shlex.join(["ntk-convert", looked.name, *words]),
        gr.Slider(info=slider_effect(growth)),
    )


def run(
    looked: Looked | None,
    method: str,
    growth: str,
    longest: float,
    onnx: bool,
    request: gr.Request,
    login: gr.OAuthToken | None,
    progress: gr.Progress = TRACKED,  # noqa: ARG001
) -> tuple[Any, ...]:
    """Converts the model into the page's folder, and packs the result."""
    with session(request) as folder:
        if looked is None:
            raise refusal("name a model and look at it first")
        options = looked.options(method, growth, longest)
        # These bars stay while those of the tool come and go.
        with tqdm(total=1, desc="reading the model"):
            check(looked, options, folder, login)
        shutil.rmtree(folder / "result", ignore_errors=True)
        out = folder / "result" / looked.out
        options |= access(folder, login, looked.found.commit)
        with tqdm(total=1, desc="downloading, converting, checking"):
            result = convert(looked.name, out, progress=True, **options)
            exported = export(out, progress=True) if onnx else None
        shutil.rmtree(folder / "hub", ignore_errors=True)  # the download, which is as large
        packed = out.with_suffix(".zip")
        with zipfile.ZipFile(packed, "w") as archive:
            for path in tqdm(sorted(path for path in out.rglob("*") if path.is_file()), "packing"):
                archive.write(path, path.relative_to(out.parent))
    button = gr.DownloadButton(f"Download {packed.name}", value=str(packed), visible=True)
    made = looked.settings(method, growth, longest, onnx)
    return made, summary(result, exported), button, str(out), gr.Column(visible=SPACE), looked.out, ""


def keep(
    made: tuple[Any, ...] | None,
    looked: Looked | None,
    method: str,
    growth: str,
    longest: float,
    onnx: bool,
) -> tuple[Any, ...]:
    """Takes a result off the page if it has another model or other settings than the page."""
    if made is None or looked is None or made == looked.settings(method, growth, longest, onnx):
        return (gr.skip(),) * 4
    return None, "", gr.DownloadButton(visible=False), gr.Column(visible=False)


def send(
    out: str,
    name: str,
    private: bool,
    request: gr.Request,
    profile: gr.OAuthProfile | None,
    login: gr.OAuthToken | None,
    progress: gr.Progress = TRACKED,  # noqa: ARG001
) -> str:
    """Pushes the result to a repository of the visitor's own."""
    with session(request):
        if profile is None or login is None:
            raise refusal("sign in first, at the top of the page; then convert again")
        repo_id = f"{profile.username}/{name.strip()}"
        pushed = push(out, repo_id, private=private, token=login.token, progress=True, verified=True)
    return f"Pushed {len(pushed.files)} files to [{pushed.repo}]({pushed.url})."


# The page

PURPOSE = "Makes models with ALiBi attention read longer inputs than they were trained on, without training."

MEASURE = f"Whether it helps a model shows when it is measured: {MEASURING} says how."


def page() -> gr.Blocks:
    """The page, and what its controls do."""
    with gr.Blocks(title="ntk-convert", analytics_enabled=False, fill_width=True) as demo:
        looked, made, out = gr.State(), gr.State(), gr.State()
        with gr.Row(equal_height=False):
            gr.Markdown("# ntk-convert")
            if SPACE:
                gr.LoginButton("Sign in", size="sm", min_width=130, scale=0)
        gr.Markdown(PURPOSE)
        with gr.Row(equal_height=False):
            with gr.Column(min_width=340):
                gr.Markdown("### 1. Which model?")
                hint = "A Hub id" if SPACE else "A Hub id, or a folder on this computer"
                typed = gr.Textbox(label=hint, placeholder=MODELS[0], max_length=200, submit_btn="Look")
                examples = gr.Examples([[name] for name in MODELS], typed, label="For example")
                about = gr.HTML()
                given = gr.Number(label="Trained length, in tokens", precision=0, minimum=1, visible=False)
                with gr.Column(visible=False) as purpose:
                    gr.Markdown("### 2. What is it for?")
                    longest = gr.Slider(label="Longest input, in tokens", minimum=2, maximum=16)
                    exact = gr.Checkbox(label="Short inputs must stay exactly as they are")
                    why = gr.Markdown()
                    with gr.Accordion("Choose it yourself", open=False):
                        method = gr.Radio(METHODS, value="by-parts", label="Heads that are scaled")
                        growth = gr.Radio(list(GROWTHS["decoder"]), value=POSITION, label="Factor")
            with gr.Column(visible=False, min_width=340) as changes:
                gr.Markdown("### What changes")
                drawing = gr.HTML()
                head = gr.Slider(0, 1, step=1, label="Head in the lower picture")
        with gr.Column(visible=False) as last:
            gr.Markdown(f"### 3. Convert\n\n{MEASURE}")
            command = gr.Textbox(label="On a command line", lines=1, buttons=["copy"], elem_id="command")
            onnx = gr.Checkbox(label="Add an ONNX graph")
            button = gr.Button("Convert", variant="primary")
            done = gr.HTML(elem_classes="done")
            ready = gr.DownloadButton(visible=False)
            with gr.Column(visible=False) as more:
                name = gr.Textbox(label="Name of a repository of yours on the Hub", max_length=96)
                private = gr.Checkbox(True, label="Private")
                pushing = gr.Button("Push")
                pushed = gr.Markdown()
        quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        shown: dict[str, Any] = {"api_visibility": "private", "concurrency_limit": 4}
        job: dict[str, Any] = {"api_visibility": "private", "concurrency_id": "job", "trigger_mode": "once"}
        demo.unload(leave)
        set_up = [looked, about, given, purpose, changes, last, longest, exact, method, growth, head, onnx]
        drawn = ([looked, method, growth, longest, head, onnx], [why, drawing, command, longest])
        made_from = [looked, method, growth, longest, onnx]
        kept = ([made, *made_from], [made, done, ready, more])
        for named in (typed.submit, given.submit, examples.load_input_event.success):
            looking = named(look, [typed, given, looked], set_up, show_progress_on=about, **shown)
            looking.success(draw, *drawn, **quiet).then(keep, *kept, **quiet)
        proposing = exact.input(propose, [looked, exact], [method, growth], **quiet)
        proposing.success(draw, *drawn, **quiet).then(keep, *kept, **quiet)
        controls = [each.input for each in (method, growth, longest, head, onnx)]
        drawing_again = gr.on(controls, draw, *drawn, trigger_mode="always_last", **quiet)
        drawing_again.then(keep, *kept, **quiet)
        results = [made, done, ready, out, more, name, pushed]
        converting = button.click(run, made_from, results, show_progress_on=done, **job)
        converting.then(keep, *kept, **quiet)  # of what was changed meanwhile
        pushing.click(send, [out, name, private], pushed, **job)
    return demo


if __name__ == "__main__":
    # On a Space, a visitor without a login is nobody, and not its owner.
    constants.HF_HUB_DISABLE_IMPLICIT_TOKEN |= SPACE
    theme = gr.themes.Soft(font=["system-ui", "sans-serif"])
    theme.input_border_width, theme.input_border_color = "1px", "*neutral_200"
    theme.checkbox_border_color = "*neutral_400"
    theme.block_info_text_color = "*neutral_600"
    interrupts.listen()  # SIGTERM and SIGHUP, too, then end the page as Ctrl-C does
    # When all threads have ended, so that none writes there again.
    atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
    # The page takes no files, but Gradio has a route for them, which anybody could fill the disk by.
    try:
        page().launch(
            max_file_size=0, theme=theme, css_paths=HERE / "style.css", footer_links=["gradio", "settings"]
        )
    finally:
        # A conversion that still runs then fails, and its thread ends.
        shutil.rmtree(FOLDER, ignore_errors=True)
