"""Short runs on however many processes it is started on, one after the other. Run by test_scale_out.py.

    python scale_out_run.py <plan.json>

A plan is a list of {"out": folder, "model": {...}, "options": {...}}, where the "teacher" of a model is "self" or what
differs in the teacher's configuration, "experts" make it a mixture of them, and "lora" is the configuration of an
adapter. Of each run every process leaves what it saw in <out>/rank-<rank>.pt. With Accelerate's variables for FSDP2 in
the environment, the policy is sharded.
"""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback

from fused_grpo.trainer import GRPOConfig, GRPOTrainer, loop
from fused_grpo.trainer.distributed import sharding
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.sampling import all_or_none
from fused_grpo.trainer.models import weight_stream
from fused_grpo.trainer.models.adapters import adapter_stream, checkpoint_weights
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer
from fused_grpo.trainer.types import ListedTokens, Rollouts


def kept_with(completion: list[int]) -> list[list[int]]:
    """The tokens that are kept at each place of a completion: 1 to 6 of 14, or all of them (no ids)."""
    return [sorted({(token + 3 * i) % 14 for i in range(token % 7)}) for token in completion]


def experts_by(prompt: list[int], completion: list[int]) -> torch.Tensor:
    """[P+T-1, 2, 2], which depend on the token and the layer."""
    first = torch.tensor([*prompt, *completion][:-1])[:, None] + torch.arange(2)
    return torch.stack([first % 4, (first + 1) % 4], dim=2).to(torch.uint8)


class EngineByPrompt(RolloutEngine):
    """Completions that depend on the prompt and their place in its group, not on the process that asks for them.

    A greedy one is the last of its group. Their log-probs come from weights of its own: the trainer's, as they were
    handed over.
    """

    name, weight_version = "by prompt", 0

    def __init__(self, model: Qwen2ForCausalLM, group: int = 4) -> None:
        self.model, self.group, self.rank = copy.deepcopy(model), group, int(os.environ.get("RANK", "0"))
        self.fails = False  # for the first completion of a fourth of the groups

    def generate(self, prompt_ids, sampling) -> Rollouts:
        completions, failed = [], set[int]()
        for place, ids in enumerate(prompt_ids, start=self.rank * len(prompt_ids)):
            generator = torch.Generator().manual_seed(hash(tuple(ids)) % 2**31)
            lengths = torch.randint(1, 9, (self.group,), generator=generator).tolist()
            whole = [torch.randint(2, 14, (length,), generator=generator).tolist() for length in lengths]
            first = place * sampling.n % self.group if sampling.temperature else self.group - 1
            if self.fails and sum(ids) % 4 == 1 and first in (0, self.group - 1):
                failed.add(len(completions))
            completions += whole[first : first + sampling.n]
        pairs = [(list(prompt_ids[i // sampling.n]), ids) for i, ids in enumerate(completions)]
        kept = [kept_with(ids) if sampling.wants_support else None for ids in completions]
        rows = self.logprobs(pairs, kept)
        logprobs = [row.gather(1, torch.tensor(ids)[:, None])[:, 0] for row, ids in zip(rows, completions, strict=True)]
        return Rollouts(
            prompt_ids=[list(ids) for ids in prompt_ids],
            completion_ids=completions,
            sampling_logprobs=[[] if i in failed else values.tolist() for i, values in enumerate(logprobs)],
            finish_reasons=["stop" if ids[-1] % 2 else "length" for ids in completions],
            num_generations=sampling.n,
            weight_version=self.weight_version,
            routed_experts=[experts_by(*pair) for pair in pairs] if sampling.routed_experts else None,
            listed_tokens=all_or_none([self.listed(*each, sampling) for each in zip(rows, kept, strict=True)]),
        )

    def listed(self, rows, kept, sampling) -> ListedTokens | None:
        if not sampling.wants_logprobs:
            return None if kept is None else ListedTokens.of(kept)
        likely = [row.topk(sampling.top_k_listed or 14) for row in rows]
        steps = [zip(top.indices.tolist(), top.values.tolist(), strict=True) for top in likely]
        logprobs = [{token: logprob for token, logprob in step if logprob > -torch.inf} for step in steps]
        return ListedTokens.of(logprobs, is_top_k=sampling.top_k_listed > 0)

    @torch.no_grad()
    def logprobs(self, pairs, kept) -> list[torch.Tensor]:
        """Of each pair [T, 14]: of the distributions that the tokens are drawn from."""
        ids = pad_sequence([torch.tensor(prompt + completion) for prompt, completion in pairs], batch_first=True)
        rows = []
        for logits, (prompt, completion), kept_tokens in zip(self.model(ids).logits, pairs, kept, strict=True):
            row = logits[len(prompt) - 1 :][: len(completion)]
            for token_row, tokens in zip(row, kept_tokens or [[]] * len(row), strict=True):
                token_row[[token for token in range(14) if tokens and token not in tokens]] = -torch.inf
            rows.append(row.log_softmax(-1))
        return rows

    def load_weights(self, named_weights, version) -> None:
        # A checkpoint has the experts under names of their own: these stay as they were.
        self.model.load_state_dict(dict(named_weights), strict=not hasattr(self.model.config, "num_experts"))
        self.weight_version = version

    def close(self) -> None:
        pass


class ShardingAccelerator(Accelerator):
    """Accelerate has FSDP on accelerators alone; PyTorch has it on a CPU as well."""

    distributed_type, is_fsdp2 = DistributedType.FSDP, True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        if self.mixed_precision != "no":
            self.state.fsdp_plugin.set_mixed_precision(self.mixed_precision)


class Stop(TrainerCallback):
    """Saves after the first step and ends the run."""

    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_save = control.should_training_stop = True


def log_parities(completion_ids: list[list[int]], log_metric: Any) -> None:
    """A number of the call, and one of each completion."""
    odd = [float(sum(ids) % 2) for ids in completion_ids]
    log_metric("odd_share", sum(odd) / len(odd))
    for value in odd:
        log_metric("odd", value)


def reward(prompts: list[str], completion_ids: list[list[int]], log_metric: Any, **columns: Any) -> list[float]:
    """Differs within groups. From the second step on, prompts with a 4 cost their group, and so does a completion that
    begins with token 3, whichever process has it."""
    unwanted = any(prompt.startswith("4") for prompt in prompts) or any(ids[0] == 3 for ids in completion_ids)
    if unwanted and columns["trainer_state"].global_step > 0:
        raise ValueError("none of these any more")
    log_parities(completion_ids, log_metric)
    return [float(sum(ids) % 7) for ids in completion_ids]


def half_equal(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Differs within the groups of every other prompt."""
    pairs = zip(prompts, completion_ids, strict=True)
    return [float(sum(ids) % 7 if int(prompt[0]) % 2 else 2) for prompt, ids in pairs]


def watch(policy: PolicyLoss) -> list[dict[str, Any]]:
    """What reaches the loss in each micro-batch from here on."""
    seen: list[dict[str, Any]] = []
    inner = policy._loss

    def loss(batch, **step):
        weight, output = policy.model.get_output_embeddings().weight, inner(batch, **step)
        facts = {name: getattr(batch, name) for name in ("advantages", "old_logprobs", "sampling_logprobs")}
        facts |= {"tokens": len(batch.targets), "head": list(weight.shape), "head_dtype": str(weight.dtype)}
        seen.append(facts | {"plain": type(weight.data) is torch.Tensor, "loss_dtype": str(output.loss.dtype)})
        return output

    policy._loss = loss
    return seen


def streams(model: Any) -> dict[str, Any]:
    """What engines are sent, merged and of the adapter alone, and how many numbers are gathered for each."""
    weights: dict[str, Any] = {}
    for name, make in (("merged", checkpoint_weights), ("adapter", adapter_stream)):
        sizes, inner = list[int](), weight_stream.DTensor.full_tensor
        weight_stream.DTensor.full_tensor = lambda self, sizes=sizes, inner=inner: (
            sizes.append(self.numel()) or inner(self)
        )
        weights |= {name: dict(make(model)), f"{name}_gathered": sum(sizes)}
        weight_stream.DTensor.full_tensor = inner
    return weights


def run(out: Path, model_options: dict[str, Any], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {**shape, "vocab_size": 14, "num_key_value_heads": 2, "tie_word_embeddings": False, **model_options}
    teacher, experts, lora = (config.pop(name, None) for name in ("teacher", "experts", "lora"))
    model = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**config, **experts)) if experts else Qwen2ForCausalLM(Qwen2Config(**config))
    )
    if isinstance(teacher, dict):
        teacher = Qwen2ForCausalLM(Qwen2Config(**config | teacher))
    callbacks = [Stop] if options.pop("rank_that_stops", None) == int(os.environ.get("RANK", "0")) else []
    rewards = half_equal if options.pop("half_equal", False) else reward
    defaults = {"max_steps": 3, "num_generations": 4, "learning_rate": 1e-4, "scale_rewards": "batch"}
    engine = EngineByPrompt(model, group=defaults["num_generations"])
    engine.weight_version = 0 if lora is None else -1  # an adapter changes the model before the first step
    eval_rows = options.pop("eval_rows", 0)
    args = GRPOConfig(str(out / "run"), reward_failure="drop", logging_steps=1, **{**defaults, **options})
    rows = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)]
    more = {"processing_class": build_tokenizer(), "rollout_engine": engine, "callbacks": callbacks}
    more |= {"teacher_model": teacher, "peft_config": None if lora is None else LoraConfig(**lora)}
    more["eval_dataset"] = rows[7 : 7 + eval_rows] or None
    engine.fails = args.rollout_failure == "drop"
    trainer = GRPOTrainer(model, rewards, args, rows, **more)
    learner = trainer.learner
    parts = sum(value.numel() for value in (getattr(p, "_local_tensor", p) for p in learner.policy.parameters()))
    seen = watch(trainer.accelerator.unwrap_model(learner.policy))
    result = trainer.train()
    reference = {} if learner.reference is None else dict(checkpoint_weights(learner.reference.model))
    report = {"parameters": learner.weights(), "reference": reference, "metrics": result.metrics}
    report["history"] = trainer.state.log_history
    groups = sum(isinstance(module, FSDPModule) for module in learner.policy.modules())
    report |= {"seen": seen, "mine": parts, "groups": groups}
    report |= streams(trainer.model) if lora else {}
    out.mkdir(exist_ok=True)
    torch.save(report, out / f"rank-{trainer.accelerator.process_index}.pt")
    trainer.accelerator.wait_for_everyone()


def main(plan: Path) -> None:
    # Drawing takes five times as long as training.
    loop.RunOutput.report = lambda self, model: Path(self.args.output_dir)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        sharding.Accelerator = ShardingAccelerator
    for entry in json.loads(plan.read_text()):
        run(Path(entry["out"]), entry["model"], entry["options"])
    # In order: a process that leaves while another still talks to it may abort the other.
    Accelerator(cpu=True).end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
