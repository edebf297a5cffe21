"""A model on an OpenAI-compatible server, which is measured as a loaded one is.

Prompts are sent as token ids of the model's own tokenizer. The model's config and tokenizer are read here,
its weights are not: a model that takes eight GPUs is measured from any machine. Whether the server scales,
which a table of right answers may not show, is checked with the local weights where they are small enough.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from converter.config import is_count
from converter.errors import (
    MissingPackage,
    ServerError,
    UnsupportedModel,
    UsageError,
    VerificationError,
    option,
)
from converter.evaluation.batches import IGNORE, Batch, next_tokens
from converter.evaluation.evaluated_model import about, open_evaluated_model, open_language_model
from converter.evaluation.runner import SHARE, choose, free_memory
from converter.formatting import bytes_text
from converter.model.alibi import AlibiModel
from converter.model.model import Model
from converter.model.open import read_model
from converter.progress import Advance
from converter.result.repository import own_code_only, small_files, write_repository
from converter.scaling.scaling import UNSCALED, Scaling
from converter.source.fetch import fetch
from converter.source.open import open_folder
from converter.source.source import CONFIG
from converter.source.tokenizer import TOKENIZER_CONFIG
from converter.source.weight_files import weight_files
from converter.texts import load_tokenizer
from converter.verification.imported import ImportedRepository

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from converter.model.open import SourceOptions

SECONDS, RETRIES = 600.0, 4
"""Of one request: the time limit, and how often the client repeats it after a failure that may pass."""
MOST_BYTES = 1 << 27
"""Of one answer, unpacked; the log-probabilities of a token take about 100."""
NEUTRAL = {"repetition_penalty": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
"""What servers take from generation_config.json unless a request says otherwise, as values without effect."""
SENT = ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_CUSTOM_HEADERS")
"""Variables of the environment that the client sends to a server."""
FEWEST_TOKENS, MOST_TOKENS = 16, 4096
"""Of the text that shows whether the server scales; the most where the trained length is not known."""
ROUNDING = 1e-4
"""Mean difference in nats between the scaled and the unscaled model below which rounding may hide it."""

Row = TypeVar("Row")
Answer = TypeVar("Answer")


@dataclass
class Served:
    """A model on a server; it has the members of ``EvaluatedModel`` that the benchmark of a decoder uses."""

    model: Model
    tokenizer: Any
    client: Any
    """OpenAI's."""
    url: str
    name: str
    """Of the model on the server."""
    context: int | None
    """Most tokens of a prompt and its answer, if the server tells it."""
    concurrency: int
    neutral: dict[str, float]
    scales: str = "not checked"
    mask: int | None = None

    def complete(
        self, _: Scaling, prompts: Sequence[Sequence[int]], max_new_tokens: int, advance: Advance = int
    ) -> list[str]:
        """Continues each prompt greedily, in the order of the prompts."""

        def ask(prompt: Sequence[int]) -> str:
            text = self._ask(prompt, max_tokens=max_new_tokens, extra_body=self.neutral).text
            if not isinstance(text, str):
                raise ServerError(f"the server at {self.url} gives no text; measure with another server")
            return text

        return self._each(ask, prompts, advance)

    def losses(self, _: Scaling, batch: Batch, advance: Advance = int) -> NDArray[np.float64]:
        """The negative log-likelihood of each target in nats; of a batch that ``next_tokens`` made."""

        def ask(ids: list[int]) -> NDArray[np.float64]:
            logprobs = self._ask(ids, max_tokens=1, echo=True, logprobs=0).logprobs
            found = logprobs.token_logprobs if logprobs else None
            found = found or []
            if len(found) < len(ids) or None in found[1 : len(ids)]:
                raise ServerError(
                    f"the server at {self.url} gives no log-probabilities of a prompt (`echo` with "
                    f"`logprobs`), which perplexity needs; drop {option.text}, or measure with "
                    "another server"
                )
            if not all(map(_is_logprob, found[1 : len(ids)])):
                raise ServerError(
                    f"the server at {self.url} gives invalid log-probabilities for a prompt: they must "
                    "be numbers up to 0; look at the server's log, or measure with another server"
                )
            return -np.array(found[1 : len(ids)], dtype=np.float64)

        result = np.zeros(batch.ids.shape)
        result[:, :-1] = self._each(ask, batch.ids.tolist(), advance)
        return np.where((batch.targets != IGNORE).numpy(), result, 0.0)

    def describe(self, _: Scaling) -> dict[str, Any]:
        return about(self.model) | {"server": {"url": self.url, "model": self.name, "scales": self.scales}}

    def check_room(self, tokens: int) -> None:
        """Raises ``UsageError`` for more tokens at once than the server takes."""
        if self.context is not None and tokens > self.context:
            raise UsageError(
                f"the server takes {self.context} tokens, and the longest prompt with its answer, or window "
                f"with one more token, has {tokens}; give shorter {option.lengths}, or serve with a longer "
                "context"
            )

    def check_scaling(
        self,
        ids: Sequence[int],
        folder: str | Path,
        say: Callable[[str], object],
        source: SourceOptions,
    ) -> None:
        """Sets ``scales``, by the losses of a text on the server and in the local model, if that fits.

        Raises ``VerificationError`` for a server that computes the unscaled model.
        """
        scaling, trained = self.model.scaling, self.model.trained.tokens
        start = 0
        if scaling.dynamic and trained:
            start = trained
        ids = ids[: 2 * trained if trained else MOST_TOKENS]
        weights = weight_files(self.model.source)
        size = sum(each or 0 for each in weights.values())
        hardware = choose("cpu", None, None)
        if not scaling.scaled:
            self.scales = "not asked to"
        elif len(ids) - start <= FEWEST_TOKENS:
            self.scales = f"not checked, since no text is longer than {start + FEWEST_TOKENS} tokens"
        elif not weights or not self.model.source.local:
            self.scales = "not checked, since the weights are not here"
        elif size > SHARE * free_memory(hardware.device):
            self.scales = "not checked, since the model does not fit into the memory here"
        else:
            say(f"checking whether the server scales, with the weights of {self.model.name} on the CPU here")
            batch = next_tokens(np.array([ids]))
            with open_evaluated_model(folder, hardware, **source) as local:
                here = [local.losses(each, batch)[0, start:-1] for each in (UNSCALED, scaling)]
            there = self.losses(scaling, batch)[0, start:-1]
            self.scales = self._verdict(share(there, *here))

    def _verdict(self, found: tuple[float, float] | None) -> str:
        if found is None:
            return "cannot tell, since the scaling changes the text's losses less than rounding does"
        middle, error = found
        where = f"its losses are {100 * middle:.0f} % of the way from the unscaled to the scaled model"
        if middle + 3 * error < 0.5:
            raise VerificationError(
                f"the server at {self.url} does not scale {self.name}: {where}; serve it with this package's "
                "plugin for vLLM, and without --hf-overrides"
            )
        return f"yes, {where}" if middle - 3 * error > 0.5 else f"cannot tell, {where}"

    def _each(self, ask: Callable[[Any], Answer], rows: Sequence[Row], advance: Advance) -> list[Answer]:
        """The answers to all rows, several at once."""
        answers = []
        # Its threads do not outlive the process: after Ctrl-C, nobody waits for a server that hangs.
        with ThreadPool(self.concurrency) as pool:
            for row, answer in zip(rows, pool.imap(ask, rows), strict=True):
                answers.append(answer)
                advance(len(row))  # type: ignore[arg-type]
        return answers

    def _ask(self, ids: Sequence[int], **options: Any) -> Any:
        with _explained(self.url, self.name):
            answer = self.client.completions.create(
                model=self.name, prompt=list(ids), temperature=0, **options
            )
            return answer.choices[0]


def _is_logprob(value: Any) -> bool:
    """Whether it is a number up to 0, or above it by rounding; minus infinity is one, and NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value <= ROUNDING


def share(
    there: NDArray[np.float64], unscaled: NDArray[np.float64], scaled: NDArray[np.float64]
) -> tuple[float, float] | None:
    """How far losses are on the way from the unscaled model's (0) to the scaled one's (1), with its error.

    That is a regression through the origin: noise, such as that of half precision, is in the error. None if
    the two hardly differ.
    """
    way, gone = scaled - unscaled, there - unscaled
    if np.abs(way).mean() < ROUNDING:
        return None
    length = float(way @ way)
    middle = float(gone @ way) / length
    rest = gone - middle * way
    return middle, float(np.sqrt(rest @ rest / (len(way) - 1) / length))


@contextlib.contextmanager
def open_served(
    model: str | Path,
    server: str,
    name: str | None = None,
    concurrency: int | None = None,
    *,
    say: Callable[[str], object] = str,
    **options: Unpack[SourceOptions],
) -> Iterator[Served]:
    """Opens the small files of a checkpoint, and finds its model on a server; see ``evaluate``."""
    try:
        import openai
    except ImportError as error:
        raise MissingPackage(f"{option.server} needs OpenAI's client: pip install openai") from error
    concurrency = 4 if concurrency is None else concurrency
    if concurrency < 1:
        raise UsageError(f"{option.concurrency} {concurrency} is out of range; give at least 1")
    address, url = _addresses(server)
    opened = open_language_model(model, **options)
    if not opened.decoder:
        raise UnsupportedModel(
            f"{opened.name} is an encoder, and {option.server} is for models that complete text"
        )
    if sent := [each for each in SENT if os.environ.get(each)]:
        say(f"{' and '.join(sent)} of the environment: sent to {url}")
    key = os.environ.get("OPENAI_API_KEY") or "none"
    client = openai.OpenAI(
        base_url=address, api_key=key, timeout=SECONDS, max_retries=RETRIES, http_client=_http_client(url)
    )
    with contextlib.closing(client), tempfile.TemporaryDirectory(prefix="ntk-convert-") as work:
        name, context = _found(client, url, name, str(model))
        tokenizer = _tokenizer(opened, Path(work) / "model")
        stated = opened.source.object("generation_config.json")
        neutral = {key: value for key, value in NEUTRAL.items() if key in stated}
        yield Served(opened, tokenizer, client, url, name, context, concurrency, neutral)


def _addresses(server: str) -> tuple[str, str]:
    """The address to ask, and the same without a password, for people."""
    try:
        parts = urlsplit(server)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(
            f"{option.server} {server!r} is no address; give one such as http://localhost:8000/v1"
        )
    parts = parts._replace(path=parts.path.rstrip("/") or "/v1")
    shown = f"[{host}]" if ":" in host else host
    return parts.geturl(), parts._replace(netloc=f"{shown}:{port}" if port else shown, query="").geturl()


def _found(client: Any, url: str, name: str | None, path: str) -> tuple[str, int | None]:
    """The model to measure, by its name on the server, and its context in tokens if the server tells it."""
    with _explained(url, name or ""):
        served = {each.id: each for each in client.models.list().data}
    if name is None:
        wanted = [path] if path in served else list(served)
        if len(wanted) != 1:
            raise UsageError(f"the server at {url} has {_names(served)}; choose with {option.model_name}")
        name = wanted[0]
    if name not in served:
        raise UsageError(
            f"the server at {url} has no model {name!r}, but {_names(served)}; correct {option.model_name}"
        )
    context = getattr(served[name], "max_model_len", None)  # vLLM's
    return name, context if is_count(context) else None


def _http_client(url: str) -> Any:
    """A client that follows no redirect, and reads no endless answer.

    A redirect would send the prompts, and what the environment adds, to another host. Answers must not be
    packed, since a few bytes can become gigabytes.
    """
    import openai

    class Client(openai.DefaultHttpxClient):
        def send(self, request: Any, **options: Any) -> Any:
            ends, content = time.monotonic() + SECONDS, bytearray()
            request.headers["Accept-Encoding"] = "identity"
            response = super().send(request, **{**options, "stream": True})
            with contextlib.closing(response):
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise ServerError(f"the server at {url} compresses its answers, although asked not to")
                for part in response.iter_bytes():
                    content += part
                    if len(content) > MOST_BYTES:
                        raise ServerError(f"an answer of {url} has more than {bytes_text(MOST_BYTES)}")
                    if time.monotonic() > ends:
                        raise ServerError(
                            f"the server at {url} did not end its answer within {SECONDS:.0f} s; give a "
                            f"smaller {option.concurrency}, or look at the server's log"
                        )
            found, headers = bytes(content), response.headers
            return type(response)(response.status_code, headers=headers, content=found, request=request)

    return Client(follow_redirects=False)


def _names(served: Any) -> str:
    return ", ".join(sorted(map(str, served))) or "no model"


@contextlib.contextmanager
def _explained(url: str, name: str) -> Iterator[None]:
    import openai

    try:
        yield
    except openai.APITimeoutError as error:
        raise ServerError(
            f"the server at {url} gave no answer within {SECONDS:.0f} s, {RETRIES + 1} times; give a smaller "
            f"{option.concurrency}, or look at the server's log"
        ) from error
    except openai.APIConnectionError as error:
        if isinstance(error.__cause__, ServerError):
            raise error.__cause__ from error
        reason = error.__cause__ or error
        raise ServerError(
            f"no server answers at {url} ({reason}); start it, or correct {option.server}"
        ) from error
    except openai.AuthenticationError as error:
        raise ServerError(
            f"the server at {url} rejects the key; set the environment's OPENAI_API_KEY to one of its keys"
        ) from error
    except openai.APIStatusError as error:
        if target := error.response.headers.get("location"):
            raise ServerError(
                f"the server at {url} points elsewhere, to {target[:200]!r}, where nothing is sent; if "
                f"that is the right address, give it as {option.server}"
            ) from error
        said = error.body.get("message") if isinstance(error.body, dict) else None
        raise ServerError(
            f"the server at {url} rejects a request for {name or 'its models'} (HTTP {error.status_code}): "
            f"{said or error.message}"
        ) from error
    except (openai.APIError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise ServerError(
            f"what answers at {url} is no OpenAI-compatible server ({type(error).__name__}); its address "
            "usually ends in /v1"
        ) from error


def _tokenizer(model: Model, folder: Path) -> Any:
    """The model's tokenizer as its conversion has it, made of the small files alone."""
    source, tokenizer = model.source, model.tokenizer
    copied = [name for name in small_files(source.files) if not tokenizer.leaves_out(name)]
    fetch(source, [CONFIG, *copied])
    code = (*model.templates, *tokenizer.templates)
    config = model.make_result_config(UNSCALED, tokenizer, None)
    rewritten = {} if tokenizer.settings is None else {TOKENIZER_CONFIG: tokenizer.settings}
    contents = {**source.contents(name for name in copied if name.endswith(".json")), **rewritten}
    cleaned, _ = own_code_only({CONFIG: config, **contents}, code)
    config = cleaned.pop(CONFIG, config)
    rewritten |= cleaned
    folder.mkdir()
    write_repository(
        folder, config, code, source, [name for name in copied if name not in rewritten], rewritten
    )
    if not isinstance(model, AlibiModel):
        return load_tokenizer(folder, model.name, None)
    written = read_model(open_folder(folder))
    assert isinstance(written, AlibiModel)
    with ImportedRepository.load(written) as imported:
        return load_tokenizer(folder, model.name, imported)
