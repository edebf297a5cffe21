"""The small JSON files beside the config, and chat templates."""

# ruff: noqa: ARG001 -- every case gets a random generator, whether it uses it or not
from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile import mutate
from tests.hostile.source import CONFIGS, GENERATION_CONFIG, MODULES, TOKENIZER, TOKENIZER_CONFIG

FILES: dict[str, Any] = {
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "tokenizer.json": TOKENIZER,
    "generation_config.json": GENERATION_CONFIG,
    "modules.json": MODULES,
    "special_tokens_map.json": {"pad_token": "<pad>"},
}
POOL: list[tuple[str, Any]] = [
    ("auto_map", {"AutoTokenizer": ["tokenization_evil.Model", None]}),
    ("auto_map", {"AutoTokenizer": "nobody/evil--tokenization_evil.Model"}),
    ("auto_map", ["tokenization_evil.Model", None]),
    ("tokenizer_class", "BaichuanTokenizer"),
    ("chat_template", "{{ ''.__class__.__mro__ }}"),
    ("custom_generate", "evil"),
    ("type", "evil.Model"),
    ("path", "../outside"),
    ("path", "/etc"),
]


def file(name: str, value: Any) -> Any:
    """A file with JSON or raw content."""

    def make(folder: Path, rng: Random) -> None:
        (folder / name).write_bytes(value if isinstance(value, bytes) else mutate.dumps(value))

    return make


def pooling(folder: Path, rng: Random, path: Any = "1_Pooling") -> None:
    """A sentence encoder whose second module is in this folder."""
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text("{}")
    file("modules.json", [MODULES[0], {**MODULES[1], "path": path}])(folder, rng)


def module(path: Any) -> Any:
    return lambda folder, rng: pooling(folder, rng, path)


def linked_module(folder: Path, rng: Random) -> None:
    pooling(folder, rng)
    (folder / "1_Pooling/config.json").unlink()
    (folder / "1_Pooling/config.json").symlink_to("../../outside/secret.json")


def linked_folder(folder: Path, rng: Random) -> None:
    pooling(folder, rng, "2_Evil")
    (folder / "2_Evil").symlink_to("../outside")


def crowd(folder: Path, rng: Random) -> None:
    """A module's folder that contains very many files."""
    pooling(folder, rng)
    for number in range(3000):
        (folder / f"1_Pooling/{number}.bin").touch()


def template(folder: Path, rng: Random) -> None:
    (folder / "additional_chat_templates").mkdir()
    for name in ("evil.jinja", "a\nb.jinja", "-rf.jinja", "..jinja"):
        (folder / "additional_chat_templates" / name).write_text("{{ self.__init__.__globals__ }}")
    (folder / "chat_template.jinja").write_text("{% for i in range(10**9) %}x{% endfor %}")


def baichuan(folder: Path, rng: Random) -> None:
    """A tokenizer that our own code replaces, whose vocabulary is not a sentencepiece model."""
    file("config.json", CONFIGS["baichuan"])(folder, rng)
    file("tokenizer_config.json", {"tokenizer_class": "BaichuanTokenizer"})(folder, rng)
    (folder / "tokenizer.model").write_bytes(b"\xff" * 100)


EXAMPLES: dict[str, Any] = {
    **{f"{name} empty": file(name, b"") for name in FILES},
    **{f"{name} a text": file(name, "x") for name in FILES},
    **{f"{name} deep": file(name, b"[" * 100_000) for name in FILES},
    **{f"{name} large": file(name, b'{"a":"' + b"x" * (40 << 20) + b'"}') for name in FILES},
    **{f"{name} many values": file(name, b"[" + b"{}," * (5 << 20) + b"{}]") for name in FILES},
    "tokenizer code": file(
        "tokenizer_config.json", {"auto_map": {"AutoTokenizer": "tokenization_evil.Model"}}
    ),
    "tokenizer code elsewhere": file(
        "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["nobody/evil\n--x\x1b.Model", None]}}
    ),
    "tokenizer class a list": file("tokenizer_config.json", {"tokenizer_class": ["x"], "auto_map": [[]]}),
    "tokenizer our own": baichuan,
    "module ../": module("../outside"),
    "module absolute": module("/etc"),
    "module a number": module(1),
    "module .": module("."),
    "module ..": module(".."),
    "module with a null": module("a\x00b"),
    "module with a line break": module("a\nb"),
    "module of code": file("modules.json", [{**MODULES[1], "type": "evil.Model\n\x1b[2J"}]),
    "modules without end": file(
        "modules.json", [{"path": f"{number}", "type": "x"} for number in range(50_000)]
    ),
    "module's file a link": linked_module,
    "module's folder a link": linked_folder,
    "module's folder full": crowd,
    "chat templates": template,
}


def vary(folder: Path, rng: Random) -> None:
    pooling(folder, rng)
    family = rng.choice(("bloom", "baichuan", "llama", "jina_bert"))
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    (folder / "tokenizer.model").write_bytes(rng.randbytes(8))
    for name in rng.sample(sorted(FILES), 2):
        if rng.random() < 0.8:
            content = mutate.dumps(mutate.worse(FILES[name], rng, POOL))
        else:
            content = mutate.worse_bytes(mutate.dumps(FILES[name]), rng)
        (folder / name).write_bytes(content)
