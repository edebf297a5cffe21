"""What each of two processes does in the tests of parallel models, on the CPU with gloo.

``python -m tests.parallel JOBS`` starts both processes; under torchrun it is one of them. JOBS is a JSON file
with a list of pairs: the name of a function below, and a folder with a converted model. The results take its
place: for each pair, what the function returned in both processes. Both also run the model in one process
and compare.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel, AutoModelForCausalLM

from tests.patched import batch

PROCESSES = 2
NEW_NAMES = transformers.__version__ >= "5"


def load(folder: str, auto_class: Any = AutoModelForCausalLM, **options: Any) -> Any:
    if dist.get_rank() > 0:  # the first process copies the model's code into the cache
        dist.barrier()
    auto_class.from_pretrained(folder, trust_remote_code=True)
    if dist.get_rank() == 0:
        dist.barrier()
    return auto_class.from_pretrained(folder, trust_remote_code=True, **options).eval()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def size(module: torch.nn.Module) -> int:
    """The number of weights in this process."""
    weights = module.parameters()
    return sum((weight.to_local() if hasattr(weight, "to_local") else weight).numel() for weight in weights)


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest difference, relative to the largest value if that is more than 1."""
    return ((first - second).abs().max() / second.abs().max().clamp(min=1.0)).item()


def differences(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> dict[str, float]:
    assert first.keys() == second.keys()
    return {name: difference(first[name], second[name]) for name in first}


def gradients(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss and its gradients. A row's first token is predicted where the output means nothing."""
    labels = ids.masked_fill((mask == 0) | (mask.cumsum(-1) == 1), -100)
    loss = model.train()(ids, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: whole(weight.grad) for name, weight in model.named_parameters()}


@torch.no_grad()
def tensor_parallel(folder: str) -> dict[str, Any]:
    """Logits, greedy tokens, and this process's part of the layers' weights and of the heads in the cache."""
    single, model = load(folder), load(folder, tp_plan="auto")
    ids, mask = batch(rows=2, length=40)
    expected, output = (each(ids, attention_mask=mask, use_cache=True) for each in (single, model))
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    chunked = options | {"cache_implementation": "static", "prefill_chunk_size": 16}
    heads = [each.past_key_values.layers[0].keys.shape[1] for each in (output, expected)]
    return {
        "logits": difference(output.logits[mask.bool()], expected.logits[mask.bool()]),
        "tokens": all(
            torch.equal(model.generate(ids, **each), single.generate(ids, **each))
            for each in (options, chunked)
        ),
        "weights": size(model.base_model.decoder_layers) / size(single.base_model.decoder_layers),
        "heads": heads,
    }


def tensor_parallel_gradients(folder: str) -> dict[str, float]:
    # tp_plan is the old name, and the only one that transformers 4.57 has.
    options = {"distributed_config": {"tp_plan": "auto"}} if NEW_NAMES else {"tp_plan": "auto"}
    models = load(folder), load(folder, **options)
    return differences(*(gradients(model, *batch(rows=2, length=40)) for model in models))


def tensor_parallel_trunk(folder: str) -> dict[str, Any]:
    ids, mask = batch(rows=2, length=40)
    models = load(folder, AutoModel), load(folder, AutoModel, tp_plan="auto")
    return {"states": difference(*(model(ids, attention_mask=mask).last_hidden_state for model in models))}


def fsdp_step(folder: str) -> dict[str, float]:
    """One step of training with FSDP2, in which each process has one row of the batch."""
    ids, _ = batch(rows=PROCESSES, length=40)
    mask = torch.ones_like(ids)  # rows of one length: the loss is the mean of the processes' losses
    single, model = load(folder), load(folder)
    for layer in model.base_model.decoder_layers:
        fully_shard(layer)
    fully_shard(model)
    own = slice(dist.get_rank(), dist.get_rank() + 1)
    expected, found = gradients(single, ids, mask), gradients(model, ids[own], mask[own])
    dist.all_reduce(found["loss"].div_(PROCESSES))
    for values, each in ((expected, single), (found, model)):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
        values |= {f"new {name}": whole(weight.detach()) for name, weight in each.named_parameters()}
    return {"weights": size(model) / size(single), **differences(found, expected)}


def run(jobs: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    results = []
    for function, folder in json.loads(jobs.read_text(encoding="utf-8")):
        try:
            result = globals()[function](folder)
        except Exception as error:
            result = {"raised": str(error)}
        both: list[Any] = [None] * PROCESSES
        dist.all_gather_object(both, result)
        results.append(both)
    if dist.get_rank() == 0:
        jobs.write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def fork(rank: int, jobs: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    run(jobs)


def main(jobs: Path) -> None:
    if "RANK" in os.environ:  # started by torchrun
        run(jobs)
        return
    start = multiprocessing.get_context("fork").Process
    processes = [start(target=fork, args=(rank, jobs)) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
