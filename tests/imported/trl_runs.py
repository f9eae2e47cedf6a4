"""Runs of a GRPOTrainer, TRL's or ours, on a tiny model, with rollouts that depend on nothing but prompt and step.

By itself it is a process of distributed runs: `trl_runs.py OUTPUT RUNS` writes the parameters and the log of each of
RUNS, options by name (JSON).
"""

import functools
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

V, GROUP, LONGEST = 43, 4, 9
PROMPTS = ["2 3", "4 5 6 7", "8", "9 10 11", "12 13", "14", "15 16 17", "18 19"]
# What the clock says is not compared, and neither is what it gives.
CLOCKED = ("time", "runtime", "per_second", "num_tokens_per")
# Options of both trainers: every step is logged, and nothing else is in the way.
PLAIN = {
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-4,  # gradients that are rounding are not to be steps
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "shuffle_dataset": False,
}
# Outputs and models of this process, and gone with it.
FOLDER = tempfile.TemporaryDirectory(prefix="trl-runs-")


@functools.cache
def saved_model(sharpness: float = 1.0) -> str:
    """A folder with the model that a run starts from: TRL reads its reference from there. Its logits are multiplied by
    `sharpness`: without it, all entropies are nearly equal."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(
        vocab_size=V,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **sizes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.lm_head.weight.data.mul_(sharpness)
    folder = tempfile.mkdtemp(dir=FOLDER.name)
    model.save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: index for index, name in enumerate(["<pad>", "<eos>", *map(str, range(2, V))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def completions(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The k-th completion of a prompt in a step: of another length, some of them cut off."""
    seen: dict[str, int] = {}
    rows = []
    for prompt in prompts:
        seen[prompt] = seen.get(prompt, 0) + 1
        seed = 1000 * PROMPTS.index(prompt) + 10 * trainer.state.global_step + seen[prompt]
        generator = torch.Generator().manual_seed(seed)
        length = int(torch.randint(2, LONGEST + 1, (), generator=generator))
        row = torch.randint(2, V, (length,), generator=generator).tolist()
        rows.append(row if length == LONGEST else [*row[:-1], 1])
    ids = [[int(word) for word in prompt.split()] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": rows, "logprobs": None}


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Share of even tokens, coarse enough for ties."""
    return [round(2 * sum(token % 2 == 0 for token in ids) / len(ids)) / 2 for ids in completion_ids]


def run(
    trainer_class: type,
    *,
    config_class: type | None = None,
    model: str | None = None,
    peft_config: Any = None,
    rollout_func: Any = completions,
    rewards: Any = reward,
    **options: Any,
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """(parameters, log) after five steps; the rollouts are good for two updates each. None is TRL's `GRPOConfig`."""
    import datasets
    import trl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = (config_class or trl.GRPOConfig)(
            output_dir=tempfile.mkdtemp(dir=FOLDER.name),
            **{
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 2,
                "num_generations": GROUP,
                "num_iterations": 2,
                "max_completion_length": LONGEST,
                "max_steps": 5,
                "model_init_kwargs": {"dtype": "float32"},
                **PLAIN,
            }
            | options,
        )
        rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
        named = {"processing_class": tokenizer(), "rollout_func": rollout_func, "peft_config": peft_config}
        trainer = trainer_class(model or saved_model(), rewards, args, rows, **named)
        trainer.train()
    return what_became_of(trainer)


def run_offline(name: str, **options: Any) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The same of TRL's trainer of that name ("SFT", "DPO" or "KTO") after three steps on given completions."""
    import datasets
    import trl

    rows: list[dict[str, Any]] = [{"prompt": x, "chosen": f" {x} 7", "rejected": " 3 4"} for x in PROMPTS]
    if name == "SFT":
        rows = [{"text": f"{x} {x} 7 8"} for x in PROMPTS]
    elif name == "KTO":
        rows = [{"prompt": x, "completion": f" {x} 7", "label": k % 2 == 0} for k, x in enumerate(PROMPTS)]
    options = {**PLAIN, "max_steps": 3, "per_device_train_batch_size": 4} | options
    del options["shuffle_dataset"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = getattr(trl, f"{name}Config")(output_dir=tempfile.mkdtemp(dir=FOLDER.name), **options)
        given = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer()}
        trainer = getattr(trl, f"{name}Trainer")(saved_model(), args=args, **given)
        trainer.train()
    return what_became_of(trainer)


def what_became_of(trainer: Any) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """(parameters, log)."""
    trained = trainer.accelerator.unwrap_model(trainer.model)
    log = [{k: v for k, v in line.items() if not any(x in k for x in CLOCKED)} for line in trainer.state.log_history]
    return {name: value.detach().clone() for name, value in trained.state_dict().items()}, log


def main(output: str, runs: str) -> None:
    from trl import import_utils

    import_utils.is_vllm_available = lambda *_, **__: False
    from safetensors.torch import save_file

    from fused_grpo.integrations.trl import FusedGRPOTrainer

    for name, options in json.loads(runs).items():
        parameters, log = run(FusedGRPOTrainer, **options)
        if torch.distributed.get_rank() == 0:
            save_file(parameters, Path(output) / f"{name}.safetensors")
            (Path(output) / f"{name}.json").write_text(json.dumps(log))
    # A rank that is gone while another still talks to it takes that one down as it exits.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
