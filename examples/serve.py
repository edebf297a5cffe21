"""`transformers serve` for a converted repository: `python examples/serve.py FOLDER --continuous-batching`.

The command itself does not load code from a repository: it looks for a model's class in transformers only.
So this script puts the class there, then runs the command with all its options. A Hub id works like a folder.
"""

from __future__ import annotations

import sys

import transformers
from transformers.cli.transformers import main
from transformers.dynamic_module_utils import get_class_from_dynamic_module


def register(repository: str) -> None:
    """Makes a converted decoder known to ``transformers serve``; this runs the repository's code."""
    config = transformers.AutoConfig.from_pretrained(repository, trust_remote_code=True)
    model_class = get_class_from_dynamic_module(config.auto_map["AutoModelForCausalLM"], repository)
    setattr(transformers, model_class.__name__, model_class)


if __name__ == "__main__":
    register(sys.argv[1])
    sys.argv[1:] = ["serve", *sys.argv[1:], "--trust-remote-code"]
    main()
