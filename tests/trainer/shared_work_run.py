"""Evaluations and weight syncs on however many processes it is started on. Run by test_shared_work.py.

    python shared_work_run.py <model folder> <out folder>

Every process leaves what it saw in <out>/rank-<rank>.json. With Accelerate's variables for FSDP2 the policy is sharded.
"""

import gc
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from scale_out_run import ShardingAccelerator

from fused_grpo.errors import FusedGRPOError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.distributed import sharding
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.sampling import Completion, rollouts_of, vllm_requests
from fused_grpo.trainer.models import weight_stream
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

RANK = int(os.environ.get("RANK", "0"))
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(10 * a + b)} for a, b in ((1, 2), (3, 4), (5, 6), (7, 8), (1, 2))]
# By name: the rows of a set, and completions of each; one row is too few for two processes.
SETS: dict[str, tuple[Any, int | None]] = {
    "uneven": (ROWS, None),
    "sampled": (ROWS, 3),
    "one row": (ROWS[2:3], 3),
    "stream": (Dataset.from_list(ROWS).to_iterable_dataset(), 2),
    "by name": ({"low": ROWS[:3], "high": ROWS[3:]}, None),
}


def drawn(seed: int) -> Completion:
    tokens = torch.randint(2, 14, (1 + seed % 5,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Completion(tokens, [-1.0] * len(tokens), "stop" if len(tokens) < 4 else "length")


class Engine(RolloutEngine):
    """Completions depend on the prompt and on the seed that vLLM would be given for it. Rank 0 alone reads weights."""

    name, weight_version, weight_dtype = "counting", 0, torch.bfloat16
    prompts: list[list[int]]
    fails_after: int | None = None

    def generate(self, prompt_ids, sampling) -> Any:
        self.prompts += map(list, prompt_ids)
        limits = {"engine": self.name, "max_model_len": 64, "max_listed": 0, "vocab_size": 22}
        prompts, options = vllm_requests(prompt_ids, sampling, random.Random(0), **limits)
        completions = []
        for ids, option in zip(prompts, options, strict=True):
            seeds = [sum(ids) if sampling.temperature == 0 else option["seed"] + i for i in range(option["n"])]
            drawn = [
                torch.randint(2, 14, (1 + seed % 5,), generator=torch.Generator().manual_seed(seed)) for seed in seeds
            ]
            completions.extend(
                [Completion(d.tolist(), [-1.0] * len(d), "stop" if len(d) < 4 else "length") for d in drawn]
            )
        return rollouts_of(prompts, completions, sampling, weight_version=self.weight_version)

    def load_weights(self, named_weights, version) -> None:
        self.given: dict[str, Any] = {}
        if RANK == 0:
            for name, weight in named_weights:
                if len(self.given) == self.fails_after:
                    raise RuntimeError("no room for it")
                self.given[name] = [str(weight.dtype), list(weight.shape), weight.double().sum().item()]
                del weight
        self.weight_version = version

    def close(self) -> None:
        pass


class MostBytes:
    """The most bytes of tensors that this process had, as seen whenever a weight was read or sent."""

    def __init__(self) -> None:
        self.bytes = 0

    def look(self) -> None:
        alive = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        plain = [getattr(tensor, "_local_tensor", tensor) for tensor in alive]
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain if t.device.type == "cpu"
        }
        self.bytes = max(self.bytes, sum(storages.values()))

    def around(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self.look()
            answer = inner(*args, **options)
            self.look()
            return answer

        setattr(owner, name, watched)


def reward(prompts, completion_ids, answer, log_metric, scored=[], **_) -> list[float | None]:  # noqa: B006
    """Of the row and of the completion; sometimes none. It logs a mean."""
    scored += prompts
    log_metric("answers", sum(map(float, answer)) / len(answer))
    return [None if len(ids) == 2 else float(a) + sum(ids) for ids, a in zip(completion_ids, answer, strict=True)]


def make(folder: str, out: Path, **options: Any) -> GRPOTrainer:
    args = GRPOConfig(str(out / "run"), num_generations=4, max_completion_length=6, use_cpu=True, bf16=False, **options)
    rows, tokenizer = [{"prompt": "1+1=", "answer": "2"}] * 8, build_tokenizer()
    return GRPOTrainer(folder, reward, args, rows, processing_class=tokenizer, rollout_engine=Engine())


def evaluations(trainer: GRPOTrainer) -> dict[str, Any]:
    results: dict[str, Any] = {}
    scored = reward.__defaults__[0]
    for name, (dataset, count) in SETS.items():
        trainer.args.num_generations_eval, trainer.engine.prompts = count, []
        scored.clear()
        result = trainer.evaluate(dataset)
        timeless = {key: value for key, value in result.items() if "runtime" not in key and "per_second" not in key}
        results[name] = {"result": timeless, "prompts": trainer.engine.prompts, "scored": list(scored)}
    return results


def sync(trainer: GRPOTrainer, fails_after: int | None) -> dict[str, Any]:
    engine, most = trainer.engine, MostBytes()
    engine.weight_version, engine.fails_after, error = -1, fails_after, ""
    most.around(weight_stream.WeightStream, "__next__")
    try:
        trainer._sync_engine()
    except FusedGRPOError as raised:
        error = type(raised).__name__
    except RuntimeError as raised:
        error = str(raised)
    return {"given": engine.given, "bytes": most.bytes, "error": error}


def main(folder: str, out: Path) -> None:
    starting = MostBytes()
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        sharding.Accelerator = ShardingAccelerator
        starting.around(torch.distributed, "broadcast")
    trainer = make(folder, out, beta=0.1)
    own = sum(p.numel() for p in (getattr(p, "_local_tensor", p) for p in trainer.learner.policy.parameters()))
    weights = {name: value.double().sum().item() for name, value in trainer.learner.weights().items()}
    result = {"starting": starting.bytes, "parameters": own, "weights": weights}
    result |= {"evaluations": evaluations(trainer), "sync": sync(trainer, None), "failed": sync(trainer, 3)}
    out.mkdir(exist_ok=True)
    (out / f"rank-{RANK}.json").write_text(json.dumps(result))
    Accelerator(cpu=True).end_training()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
