"""Train the small BLOOM checkpoints of the examples.

    python examples/train.py --task lines --heads 8 --out examples/tiny-bloom
    python examples/train.py --task text --heads 12 --seed 1 --out text-12-1
    python examples/train.py --task lines --bias-max 5 --out lines-8-0-max-5

The models are transformers' own `BloomForCausalLM`, trained on sequences of at most 256 tokens, so that
longer lengths are cheap to test. Training takes minutes on one core. There are two tasks: looking up values
in a list (`lines_task`), and predicting the next byte of Python source (`text_task`).

BLOOM's flattest slope is 2^-8. With `--bias-max` it is another power of two, and the model is saved as an MPT
(`as_mpt`), because the config of a BLOOM has no key for it. With `--falcon`, the bias is divided by
sqrt(head size), and the model is saved as a Falcon (`as_falcon`), which does so.

The lines need a special training: with all keys and few questions, plain AdamW stays on a plateau where the
model guesses among the values it has seen. Three things overcome that: many questions in each sequence
(`lines_task.training_batch`), a curriculum that starts with few keys and short sequences, and Muon on the
hidden matrices.

The same seed gives the same weights, bit for bit, on the same machine with the same versions.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from pathlib import Path
from typing import Any, Literal

import lines_task
import numpy as np
import text_task
import torch
import torch.nn.functional as F
import training
from lines_task import BOS, EOS, IGNORE, PAD, UNK
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm
from transformers import BloomConfig, BloomForCausalLM

from converter.scaling.slopes import stock_slopes

Task = Literal["lines", "text"]

TRAINED_LENGTH = 256
MUON_LEARNING_RATE = 0.02
ADAM_LEARNING_RATE = 3e-3
EMBEDDING_STD = 0.1  # the output layer shares the embeddings: at 0.02, its logits would start nearly flat

# The curriculum of the lines.
LINES_TOKENS_PER_STEP = 2048
FIRST_STAGE = (8, 32)  # records in a sequence, keys in use
RECORDS_GROWTH, KEYS_GROWTH = 1.6, 2.0
PASS_ACCURACY = 0.9
ACCURACY_MEMORY = 0.9  # weight of the past in the running average that decides about the next stage
DECAY_STEPS = 400  # after the last stage, the learning rates fall linearly to zero in this many steps
MAX_CURRICULUM_STEPS = 3000

# The text.
TEXT_SEQUENCES_PER_STEP = 16
TEXT_STEPS, TEXT_DECAY_STEPS = 180, 180

HIDDEN_SIZES = {("lines", 8): 64, ("lines", 12): 96, ("text", 8): 128, ("text", 12): 144}
LAYERS = {"lines": 2, "text": 3}


def config(task: Task, heads: int) -> dict[str, Any]:
    """The config.json, with the same keys as in a published BLOOM checkpoint."""
    return {
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["BloomForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "hidden_size": HIDDEN_SIZES[task, heads],
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "bloom",
        "n_head": heads,
        "n_layer": LAYERS[task],
        "pretraining_tp": 1,
        "seq_length": TRAINED_LENGTH,
        "slow_but_exact": False,
        "tie_word_embeddings": True,
        "unk_token_id": vocabulary(task).index(UNK),
        **_common(task),
    }


def mpt_config(task: Task, heads: int, bias_max: int) -> dict[str, Any]:
    """The config.json of a model that `as_mpt` made, with the keys of llm-foundry."""
    return {
        "architectures": ["MPTForCausalLM"],
        "attn_config": {"alibi": True, "alibi_bias_max": bias_max, "attn_type": "multihead_attention"},
        "d_model": HIDDEN_SIZES[task, heads],
        "expansion_ratio": 4,
        "max_seq_len": TRAINED_LENGTH,
        "model_type": "mpt",
        "n_heads": heads,
        "n_layers": LAYERS[task],
        "no_bias": False,
        "norm_type": "layernorm",
        "tie_word_embeddings": False,
        **_common(task),
    }


def falcon_config(task: Task, heads: int) -> dict[str, Any]:
    """The config.json of a model that `as_falcon` made, with the keys of Falcon-RW."""
    return {
        "activation": "gelu",
        "alibi": True,
        "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0,
        "bias": True,
        "hidden_dropout": 0.0,
        "hidden_size": HIDDEN_SIZES[task, heads],
        "layer_norm_epsilon": 1e-05,
        "model_type": "falcon",
        "multi_query": False,
        "new_decoder_architecture": False,
        "num_attention_heads": heads,
        "num_hidden_layers": LAYERS[task],
        "parallel_attn": False,
        "tie_word_embeddings": False,
        **_common(task),
    }


def _common(task: Task) -> dict[str, Any]:
    # `torch_dtype` is the spelling that both old and new versions of transformers read.
    return {**_ends(task), "torch_dtype": "float32", "use_cache": True, "vocab_size": len(vocabulary(task))}


def _ends(task: Task) -> dict[str, int]:
    tokens = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return {key: vocabulary(task).index(token) for key, token in tokens.items()}


def generation_config(task: Task) -> dict[str, Any]:
    """The defaults of `generate`."""
    return {**_ends(task), "max_new_tokens": 4 if task == "lines" else 100}  # an answer is one token and </s>


# Padding on the left, as in BLOOM's own tokenizer. `model_input_names` leaves out token types, which BLOOM
# does not take.
TOKENIZER_CONFIG = {
    "bos_token": BOS,
    "clean_up_tokenization_spaces": False,
    "eos_token": EOS,
    "model_input_names": ["input_ids", "attention_mask"],
    "pad_token": PAD,
    "padding_side": "left",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": UNK,
}


def vocabulary(task: Task) -> tuple[str, ...]:
    """The tokens, in the order of their ids."""
    return lines_task.VOCABULARY if task == "lines" else text_task.TOKENS


def build_tokenizer(task: Task) -> Tokenizer:
    """The tokenizer for the task's vocabulary."""
    return lines_task.build_tokenizer() if task == "lines" else text_task.build_tokenizer()


def build_model(
    task: Task, heads: int, seed: int, bias_max: int | None = None, *, falcon: bool = False
) -> BloomForCausalLM:
    """A fresh float32 model; the seed decides its weights.

    With `bias_max` or `falcon`, bias and GELU are those of an MPT or a Falcon.
    """
    torch.manual_seed(seed)
    model: Any = BloomForCausalLM(BloomConfig.from_dict(config(task, heads)))
    if bias_max is not None or falcon:
        slopes = torch.tensor(stock_slopes(heads, bias_max or 8))
        if falcon:
            slopes = slopes / math.sqrt(HIDDEN_SIZES[task, heads] // heads)

        def bias(mask: torch.Tensor, _: int, dtype: torch.dtype) -> torch.Tensor:
            rows, tokens = mask.shape
            each = slopes[:, None, None] * torch.arange(tokens)
            return each.repeat(rows, 1, 1).to(dtype)

        model.transformer.build_alibi_tensor = bias
        for layer in model.transformer.h:
            layer.mlp.gelu_impl = nn.GELU()
    nn.init.normal_(model.transformer.word_embeddings.weight, std=EMBEDDING_STD)
    model.train()
    trained: BloomForCausalLM = model
    return trained


def as_mpt(model: BloomForCausalLM) -> dict[str, torch.Tensor]:
    """The weights of an MPT that computes the same as a BLOOM with MPT's slopes and GELU.

    MPT does not normalise its embeddings, so they are stored normalised, and the head as it is. MPT stores
    all queries, then all keys, then all values; BLOOM stores the three of one head after the other.
    """
    trunk: Any = model.transformer
    heads = model.config.n_head
    weights = {"transformer.wte.weight": normalised(trunk), "lm_head.weight": trunk.word_embeddings.weight}

    def add(name: str, module: nn.Module) -> None:
        weights.update({f"transformer.{name}.{part}": value for part, value in module.named_parameters()})

    for number, layer in enumerate(trunk.h):
        block = f"blocks.{number}"
        add(f"{block}.norm_1", layer.input_layernorm)
        add(f"{block}.attn.Wqkv", layer.self_attention.query_key_value)
        add(f"{block}.attn.out_proj", layer.self_attention.dense)
        add(f"{block}.norm_2", layer.post_attention_layernorm)
        add(f"{block}.ffn.up_proj", layer.mlp.dense_h_to_4h)
        add(f"{block}.ffn.down_proj", layer.mlp.dense_4h_to_h)
        for part in ("weight", "bias"):
            name = f"transformer.{block}.attn.Wqkv.{part}"
            by_head = weights[name].unflatten(0, (heads, 3, -1))
            weights[name] = by_head.transpose(0, 1).flatten(0, 2)
    add("norm_f", trunk.ln_f)
    return {name: tensor.detach().contiguous() for name, tensor in weights.items()}


def as_falcon(model: BloomForCausalLM) -> dict[str, torch.Tensor]:
    """The weights of a Falcon that computes the same as a BLOOM with Falcon's bias and GELU.

    Falcon does not normalise its embeddings, so they are stored normalised, and the head as it is.
    """
    trunk: Any = model.transformer
    own = ("word_embeddings.weight", "word_embeddings_layernorm.")
    weights = {
        "transformer.word_embeddings.weight": normalised(trunk),
        "lm_head.weight": trunk.word_embeddings.weight,
        **{
            f"transformer.{name}": value
            for name, value in trunk.named_parameters()
            if not name.startswith(own)
        },
    }
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def normalised(trunk: Any) -> torch.Tensor:
    """The embeddings of a BLOOM as its layers get them."""
    found: torch.Tensor = trunk.word_embeddings_layernorm(trunk.word_embeddings.weight)
    return found


class Trainer:
    """A model with its optimisers, and the steps and tokens done."""

    def __init__(
        self, task: Task, heads: int, seed: int, bias_max: int | None = None, *, falcon: bool = False
    ) -> None:
        self.own_bias = bias_max is not None or falcon
        self.model = build_model(task, heads, seed, bias_max, falcon=falcon)
        layers = self.model.transformer.h
        self.optimizers = training.optimizers(self.model, layers, MUON_LEARNING_RATE, ADAM_LEARNING_RATE)
        self.rng = np.random.default_rng(seed)
        self.steps = self.tokens = 0

    def step(self, input_ids: lines_task.Ids, targets: lines_task.Ids) -> tuple[float, torch.Tensor]:
        """One update by a batch of a task; targets of `IGNORE` have no loss.

        Returns:
            The loss in nats per target, and whether each target was the model's likeliest token, as a bool
            tensor of shape [targets with a loss].
        """
        ids, wanted = torch.from_numpy(input_ids), torch.from_numpy(targets)
        # transformers would not ask for the bias of another model if there were no mask.
        mask = torch.ones_like(ids) if self.own_bias else None
        hidden = self.model.transformer(ids, attention_mask=mask, use_cache=False).last_hidden_state
        asked = wanted != IGNORE
        logits = self.model.lm_head(hidden[asked])  # computes logits only for targets with a loss
        loss = F.cross_entropy(logits, wanted[asked])

        training.step(self.model, self.optimizers, loss)
        self.steps += 1
        self.tokens += ids.numel()
        return loss.item(), logits.argmax(-1) == wanted[asked]


class Curriculum:
    """The difficulty of the next lines; it grows whenever the running accuracy passes `PASS_ACCURACY`."""

    def __init__(self) -> None:
        self.records, self.keys = FIRST_STAGE
        self.accuracy = 0.0
        self.last_records = TRAINED_LENGTH // lines_task.TOKENS_PER_LINE
        self.last_keys = len(lines_task.KEYS)

    def update(self, accuracy: float) -> bool:
        """Add the accuracy of one batch; returns whether the last stage has now been passed."""
        self.accuracy = ACCURACY_MEMORY * self.accuracy + (1 - ACCURACY_MEMORY) * accuracy
        if self.accuracy < PASS_ACCURACY:
            return False
        if (self.records, self.keys) == (self.last_records, self.last_keys):
            return True
        self.records = min(self.last_records, math.ceil(RECORDS_GROWTH * self.records))
        self.keys = min(self.last_keys, math.ceil(KEYS_GROWTH * self.keys))
        self.accuracy = 0.0
        return False


def train_on_lines(trainer: Trainer) -> None:
    """Train through the curriculum and the decay.

    Raises:
        RuntimeError: the last stage was not passed within `MAX_CURRICULUM_STEPS`.
    """
    curriculum = Curriculum()

    def step() -> tuple[float, float]:
        """Do one update; returns the loss and the accuracy of the answers."""
        input_ids, targets = lines_task.training_batch(
            trainer.rng,
            sequences=round(LINES_TOKENS_PER_STEP / (lines_task.TOKENS_PER_LINE * curriculum.records)),
            records=curriculum.records,
            active_keys=curriculum.keys,
        )
        loss, right = trainer.step(input_ids, targets)
        asked = targets[targets != IGNORE]
        return loss, right[torch.from_numpy(asked != lines_task.TOKEN_IDS[EOS])].float().mean().item()

    with tqdm(desc="curriculum", unit=" steps", disable=None) as progress:
        for _ in range(MAX_CURRICULUM_STEPS):
            loss, accuracy = step()
            passed = curriculum.update(accuracy)
            progress.set_postfix(records=curriculum.records, loss=f"{loss:.2f}", accuracy=f"{accuracy:.2f}")
            progress.update()
            if passed:
                break
        else:
            raise RuntimeError(
                f"still at {curriculum.records} records and {curriculum.keys} keys after "
                f"{MAX_CURRICULUM_STEPS} steps (accuracy {curriculum.accuracy:.2f}); try another --seed"
            )

    with tqdm(range(DECAY_STEPS), desc="decay", unit=" steps", disable=None) as decay:
        for done in decay:
            training.set_rates(trainer.optimizers, 1 - done / DECAY_STEPS)
            loss, accuracy = step()
            decay.set_postfix(loss=f"{loss:.2f}", accuracy=f"{accuracy:.2f}")


def train_on_text(trainer: Trainer, text: str) -> None:
    """Train for a fixed number of steps, on pieces drawn from the whole text."""
    ids = np.array(text_task.build_tokenizer().encode(text).ids)
    with tqdm(range(TEXT_STEPS + TEXT_DECAY_STEPS), unit=" steps", disable=None) as progress:
        for done in progress:
            training.set_rates(trainer.optimizers, 1 - max(0.0, (done - TEXT_STEPS) / TEXT_DECAY_STEPS))
            sizes = {"sequences": TEXT_SEQUENCES_PER_STEP, "length": TRAINED_LENGTH}
            loss, _ = trainer.step(*text_task.training_batch(trainer.rng, ids, **sizes))
            progress.set_postfix(bits_per_byte=f"{loss / math.log(2):.2f}")


def train(
    task: Task, heads: int, seed: int, bias_max: int | None = None, *, falcon: bool = False
) -> tuple[BloomForCausalLM, dict[str, Any]]:
    """Train a model; returns it, and the content of `training.json`, which is saved with the weights.

    Raises:
        RuntimeError: the model did not learn the lines.
    """
    started = time.process_time()
    trainer = Trainer(task, heads, seed, bias_max, falcon=falcon)
    sha256 = None
    if task == "lines":
        train_on_lines(trainer)
    else:
        text = text_task.read_corpus().training
        train_on_text(trainer, text)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
    seconds = round(time.process_time() - started)
    record: dict[str, Any] = {"task": task, "heads": heads, "seed": seed}
    record |= {"steps": trainer.steps, "tokens": trainer.tokens}
    record |= {"cpu_seconds": seconds, "bias_max": bias_max, "text_sha256": sha256}
    if falcon:
        record["falcon"] = True
    return trainer.model.eval(), record


def save(model: BloomForCausalLM, record: dict[str, Any], out: Path) -> None:
    """Write the checkpoint's files into `out`.

    The configuration files are written from the dicts above, since those of `save_pretrained` differ between
    versions of transformers.
    """
    task, heads, bias_max = (record[key] for key in ("task", "heads", "bias_max"))
    if record.get("falcon"):
        weights, settings = as_falcon(model), falcon_config(task, heads)
    elif bias_max is None:
        # lm_head shares storage with the embeddings; transformers ties them again when it loads the model.
        weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        settings = config(task, heads)
    else:
        weights = as_mpt(model)
        settings = mpt_config(task, heads, bias_max)
    training.write(
        out,
        weights,
        build_tokenizer(task),
        config=settings,
        generation_config=generation_config(task),
        tokenizer_config=TOKENIZER_CONFIG,
        training=record,
    )


def main() -> None:
    """Read the command line, train, save."""
    parser = training.parser("Train a small checkpoint.", LAYERS)
    parser.add_argument(
        "--bias-max", type=int, help="save an MPT whose flattest slope is 2^-bias_max, not a BLOOM"
    )
    parser.add_argument(
        "--falcon", action="store_true", help="divide the bias by sqrt(head size), and save a Falcon"
    )
    arguments = parser.parse_args()
    if arguments.falcon and arguments.bias_max is not None:
        parser.error("a Falcon has no --bias-max; drop one of them")
    training.prepare()
    try:
        model, record = train(
            arguments.task, arguments.heads, arguments.seed, arguments.bias_max, falcon=arguments.falcon
        )
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    save(model, record, arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
