"""Three steps of a mixture of experts with the experts that vLLM returns. Run by test_routed_experts.py.

    TRITON_INTERPRET=1 python routed_run.py <out folder> <dtype of vLLM>

vLLM returns experts with its model runner V2, whose kernels are Triton's. On a CPU it wants a build of Triton with a
CPU backend; here the interpreter takes its place, in a process that has to begin with it.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "imported"))
from mixtures import EXPERTS, LAYERS, K, experts_of, mixture  # noqa: E402

from fused_grpo.trainer import GRPOConfig, GRPOTrainer  # noqa: E402
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer  # noqa: E402

SIZES = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32, "max_position_embeddings": 64}
MEAN, ROUTING = "sampling/sampling_logp_difference/mean", "sampling/routing_disagreement"
OPTIONS = {"use_vllm": True, "use_cpu": True, "bf16": False, "save_strategy": "no", "gradient_checkpointing": False}
OPTIONS |= {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 12, "max_steps": 3}
OPTIONS |= {"learning_rate": 1e-3, "logprob_mismatch": "warn"}


def run(out: Path, *, replay: bool, dtype: str) -> tuple[list[float], list[float], float]:
    """By step the mean difference of log-probs and the disagreement; and how many choices of the first are equal."""
    model = mixture("Qwen3Moe", **SIZES)
    returned = {"enable_return_routed_experts": True}
    args = GRPOConfig(str(out), router_replay=replay, vllm_engine_kwargs=returned, vllm_dtype=dtype, **OPTIONS)
    rows = [{"prompt": f"{a}+{a}="} for a in range(8)]
    reward = lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids]  # noqa: E731
    trainer = GRPOTrainer(model, reward, args, rows, processing_class=build_tokenizer())
    learn, equal = trainer.learner.learn, list[float]()

    def learn_from(batch: list, **options: Any) -> Any:
        equal.append(agreement(mixture("Qwen3Moe", **SIZES), batch))
        return learn(batch, **options)

    trainer.learner.learn = learn_from
    trainer.train()
    trainer.end()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line[MEAN] for line in lines], [line[ROUTING] for line in lines], equal[0]


def main(out: Path, dtype: str) -> None:
    with_replay, disagreement, equal = run(out / "replay", replay=True, dtype=dtype)
    without, differing, _ = run(out / "none", replay=False, dtype=dtype)
    print(json.dumps([with_replay, disagreement, without, differing, equal]))
    exact = dtype == "float32"
    assert equal > (0.999 if exact else 0.9)
    assert max(with_replay) < (1e-5 if exact else 0.1)
    assert exact or sum(with_replay) < sum(without)


def agreement(model: torch.nn.Module, batch: list) -> float:
    """The share of tokens and layers for which the trainer's model chooses the experts that vLLM returned."""
    same = []
    for sample in batch:
        own = experts_of(model, sample.prompt_ids, sample.completion_ids)
        assert sample.routed_experts.shape == own.shape == (len(own), LAYERS, K)
        assert int(sample.routed_experts.max()) < EXPERTS
        same.append((sample.routed_experts.sort(2).values == own.sort(2).values).all(2).flatten())
    return torch.cat(same).float().mean().item()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
