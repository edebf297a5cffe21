"""Train the small BLOOM checkpoint in `examples/tiny-bloom` on the `lines` retrieval task.

    python examples/train_tiny_bloom.py --out examples/tiny-bloom

The model is transformers' own `BloomForCausalLM`, two layers of eight heads, trained on sequences of
at most 256 tokens, so that lengths beyond the trained one are cheap to try. Minutes on one core.

Why it is trained the way it is: with all keys and few questions, plain AdamW stays on a plateau where
the model guesses among the values it has seen. Three things take it off: many questions in each
sequence (`lines_task.training_batch`), a curriculum that starts with few keys and short sequences,
and Muon on the hidden matrices.

The same seed gives the same weights, bit for bit, on the same machine with the same versions.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import lines_task as task
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save as to_safetensors
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import nn
from tqdm import tqdm
from transformers import BloomConfig, BloomForCausalLM

TRAINED_LENGTH = 256
TOKENS_PER_STEP = 2048
MUON_LEARNING_RATE = 0.02
ADAM_LEARNING_RATE = 3e-3
CLIP_NORM = 1.0
EMBEDDING_STD = 0.1  # the embeddings are the output layer too: at 0.02 its logits would start nearly flat

FIRST_STAGE = (8, 32)  # records in a sequence, keys in use
RECORDS_GROWTH, KEYS_GROWTH = 1.6, 2.0
PASS_ACCURACY = 0.9
ACCURACY_MEMORY = 0.9  # of the running average that decides about the next stage
DECAY_STEPS = 400  # after the last stage is passed, the learning rates fall linearly to zero
MAX_CURRICULUM_STEPS = 3000

# What config.json of a published BLOOM checkpoint holds. `torch_dtype` is the spelling that old and
# new versions of transformers both read.
CONFIG = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["BloomForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": task.TOKEN_IDS[task.BOS],
    "eos_token_id": task.TOKEN_IDS[task.EOS],
    "hidden_dropout": 0.0,
    "hidden_size": 64,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "bloom",
    "n_head": 8,
    "n_layer": 2,
    "pad_token_id": task.TOKEN_IDS[task.PAD],
    "pretraining_tp": 1,
    "seq_length": TRAINED_LENGTH,
    "slow_but_exact": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "unk_token_id": task.TOKEN_IDS[task.UNK],
    "use_cache": True,
    "vocab_size": len(task.VOCABULARY),
}
GENERATION_CONFIG = {
    "bos_token_id": task.TOKEN_IDS[task.BOS],
    "eos_token_id": task.TOKEN_IDS[task.EOS],
    "max_new_tokens": 4,  # an answer is one token and </s>
    "pad_token_id": task.TOKEN_IDS[task.PAD],
}
# Left padding as in BLOOM's own tokenizer. BLOOM takes no token types, hence `model_input_names`.
TOKENIZER_CONFIG = {
    "bos_token": task.BOS,
    "clean_up_tokenization_spaces": False,
    "eos_token": task.EOS,
    "model_input_names": ["input_ids", "attention_mask"],
    "pad_token": task.PAD,
    "padding_side": "left",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": task.UNK,
}


def orthogonalise(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Move the singular values of `matrix` (2-d, float) towards 1 and keep its singular vectors.

    Newton-Schulz iteration with the quintic x -> a x + b x^3 + c x^5 and the coefficients published
    for Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), which trade exactness (the
    values end up within about 0.7 to 1.2) for few steps. A polynomial in X X^T and X never needs the
    singular value decomposition itself.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # the smaller of the two Gram matrices
    x = x / (x.norm() + 1e-7)  # the iteration converges from singular values of at most 1
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised: every direction of a matrix moves by the same amount.

    For 2-d hidden matrices only. With a tall matrix the update grows by sqrt(rows / columns), so
    that one learning rate serves all shapes.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "Muon evaluates no closure"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"].lerp_(parameter.grad, 1 - group["momentum"])
                nesterov = parameter.grad.lerp(average, group["momentum"])
                rows, columns = parameter.shape
                scale = math.sqrt(max(1.0, rows / columns))
                parameter.add_(orthogonalise(nesterov), alpha=-group["lr"] * scale)


def build_model(seed: int) -> BloomForCausalLM:
    """A fresh float32 model; the seed decides its weights."""
    torch.manual_seed(seed)
    # A copy, because transformers 4 adds keys to the dictionary it reads.
    model = BloomForCausalLM(BloomConfig.from_dict(dict(CONFIG)))
    nn.init.normal_(model.transformer.word_embeddings.weight, std=EMBEDDING_STD)
    return model.train()


def build_optimizers(model: BloomForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, biases and norms."""
    matrices = [parameter for parameter in model.transformer.h.parameters() if parameter.ndim == 2]
    ids = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    adam = torch.optim.AdamW(others, lr=ADAM_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, lr=MUON_LEARNING_RATE), adam]


class Curriculum:
    """How hard the next batch is; grows whenever the running accuracy passes `PASS_ACCURACY`."""

    def __init__(self) -> None:
        self.records, self.keys = FIRST_STAGE
        self.accuracy = 0.0
        self.last_records = TRAINED_LENGTH // task.TOKENS_PER_LINE
        self.last_keys = len(task.KEYS)

    def update(self, accuracy: float) -> bool:
        """Count one batch's accuracy; whether the last stage has now been passed."""
        self.accuracy = ACCURACY_MEMORY * self.accuracy + (1 - ACCURACY_MEMORY) * accuracy
        if self.accuracy < PASS_ACCURACY:
            return False
        if (self.records, self.keys) == (self.last_records, self.last_keys):
            return True
        self.records = min(self.last_records, math.ceil(RECORDS_GROWTH * self.records))
        self.keys = min(self.last_keys, math.ceil(KEYS_GROWTH * self.keys))
        self.accuracy = 0.0
        return False


def train_step(
    model: BloomForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    rng: np.random.Generator,
    curriculum: Curriculum,
) -> tuple[float, float]:
    """One update on about `TOKENS_PER_STEP` tokens; returns the loss and the answers' accuracy."""
    sequences = round(TOKENS_PER_STEP / (task.TOKENS_PER_LINE * curriculum.records))
    input_ids, targets = map(
        torch.from_numpy,
        task.training_batch(
            rng, sequences=sequences, records=curriculum.records, active_keys=curriculum.keys
        ),
    )
    hidden = model.transformer(input_ids, use_cache=False).last_hidden_state
    asked = targets != task.IGNORE
    logits = model.lm_head(hidden[asked])  # the vocabulary only where there is something to predict
    loss = F.cross_entropy(logits, targets[asked])

    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    for optimizer in optimizers:
        optimizer.step()

    answers = targets[asked] != task.TOKEN_IDS[task.EOS]
    right = logits.argmax(-1)[answers] == targets[asked][answers]
    return loss.item(), right.float().mean().item()


def train(seed: int) -> BloomForCausalLM:
    """Train a model through the curriculum and the decay.

    Raises:
        RuntimeError: the last stage was not passed within `MAX_CURRICULUM_STEPS`.
    """
    model = build_model(seed)
    optimizers = build_optimizers(model)
    rng = np.random.default_rng(seed)
    curriculum = Curriculum()

    with tqdm(desc="curriculum", unit=" steps", disable=None) as progress:
        for _ in range(MAX_CURRICULUM_STEPS):
            loss, accuracy = train_step(model, optimizers, rng, curriculum)
            passed = curriculum.update(accuracy)
            progress.set_postfix(
                records=curriculum.records,
                keys=curriculum.keys,
                loss=f"{loss:.2f}",
                accuracy=f"{accuracy:.2f}",
            )
            progress.update()
            if passed:
                break
        else:
            raise RuntimeError(
                f"still at {curriculum.records} records and {curriculum.keys} keys after "
                f"{MAX_CURRICULUM_STEPS} steps (accuracy {curriculum.accuracy:.2f}); try another --seed"
            )

    initial = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    with tqdm(range(DECAY_STEPS), desc="decay", unit=" steps", disable=None) as progress:
        for step in progress:
            for optimizer, lr in zip(optimizers, initial, strict=True):
                optimizer.param_groups[0]["lr"] = lr * (1 - step / DECAY_STEPS)
            loss, accuracy = train_step(model, optimizers, rng, curriculum)
            progress.set_postfix(loss=f"{loss:.2f}", accuracy=f"{accuracy:.2f}")
    return model.eval()


def build_tokenizer() -> Tokenizer:
    """A tokenizer that splits at white space and looks the words up."""
    tokenizer = Tokenizer(models.WordLevel(task.TOKEN_IDS, unk_token=task.UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in task.SPECIAL_TOKENS]
    )
    return tokenizer


def save(model: BloomForCausalLM, out: Path) -> None:
    """Write the checkpoint's files into `out`; files of other names there are left alone.

    The configuration files are written as stated above and not by `save_pretrained`, whose spelling
    changes with the version of transformers.
    """
    out.mkdir(parents=True, exist_ok=True)
    # lm_head shares the embeddings' storage, which transformers ties again when it loads.
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    (out / "model.safetensors").write_bytes(to_safetensors(weights, metadata={"format": "pt"}))
    build_tokenizer().save(str(out / "tokenizer.json"))
    for name, content in (
        ("config.json", CONFIG),
        ("generation_config.json", GENERATION_CONFIG),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line, train, save."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description="Train the small BLOOM checkpoint of the examples.")
    parser.add_argument("--out", type=Path, default=here / "tiny-bloom", help="folder to write [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="decides about weights and data [%(default)s]")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads; the weights depend on them [%(default)s]"
    )
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # the softmax of far keys underflows, and denormals are slow on CPUs
    torch.use_deterministic_algorithms(True)
    try:
        model = train(arguments.seed)
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    save(model, arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
