"""`fused-grpo plan`: how long a step takes on how many GPUs, and which of them should sample (docs/planning.md).

Its options are the fields of `Run`, `ModelSize` and `Rates` in throughput.py. `--model` reads the sizes from a model's
config.json; no weights are loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM

from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.trainer.common.formatting import short_number
from fused_grpo.trainer.models.loading import loading
from fused_grpo.trainer.models.memory_estimate import layers_of, shape_of
from fused_grpo.trainer.throughput import ModelSize, Rates, Run, Step, splits

OTHERS = 4  # splits that are shown below the best
DESCRIPTION = """Predict the seconds of a step, and the best split of the GPUs between rollouts and training.

--model PATH_OR_HUB_ID, or the path of a config.json, stands for the sizes of the model.
"""


def plan(arguments: Sequence[str]) -> str:
    """The answer to `fused-grpo plan ...`; InputError where no split of the GPUs has room for the model."""
    parser = argparse.ArgumentParser("fused-grpo plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--model")
    named, others = parser.parse_known_args(arguments)
    make_run = Run if named.model is None else partial(Run, size=size_of(named.model), rates=Rates())
    flags = (tyro.conf.OmitArgPrefixes,)
    return answer(tyro.cli(make_run, prog="fused-grpo plan", description=DESCRIPTION, args=others, config=flags))


def size_of(name: str) -> ModelSize:
    """The sizes of the model at a path or in the hub, from its config alone."""
    with loading(f"config of {name!r}"):
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        text, shape = config.get_text_config(), shape_of(model)
    counts = [getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    experts, chosen = next(filter(None, counts), 1), getattr(text, "num_experts_per_tok", None) or 1
    in_experts = sum(weight.numel() for path, weight in model.named_parameters() if ".experts." in path)
    layers, latent = layers_of(text), getattr(text, "kv_lora_rank", None)
    heads = max(getattr(layer, "num_attention_heads", None) or 0 for layer in layers)
    if not heads:
        raise UnsupportedError(
            f"got {name}, a {config.model_type} without attention heads, want a transformer, of which the seconds were "
            "measured; fix: another model, or the sizes of one as options (--model-params, --layers, ...)"
        )
    kv_width = shape.kv_width if latent is None else (latent + text.qk_rope_head_dim) / 2
    sizes = [getattr(one, "v_head_dim", None) or getattr(one, "head_dim", None) for one in layers]
    head_dim = round(sum(size or shape.hidden // heads for size in sizes) / len(sizes))
    return ModelSize(
        model_params=shape.parameters,
        active_params=shape.parameters - in_experts * (1 - chosen / experts) if in_experts else None,
        layers=shape.layers,
        hidden_size=shape.hidden,
        heads=heads,
        kv_heads=kv_width / head_dim,
        head_dim=head_dim,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.head_tied,
    )


def answer(run: Run) -> str:
    """What the run is, its best splits, what bounds the best one, and what would change it."""
    size, steps = run.size, splits(run)
    active = "" if size.active_params is None else f", {size.active / 1e9:.3g}B of them for a token"
    lines = [
        f"{size.model_params / 1e9:.3g}B parameters{active}; {run.gpus} x {run.gpu}",
        f"batch: {run.prompts} prompts x {run.num_generations} completions of {run.completion_length:,.0f} tokens, "
        f"at most {run.max_completion_length:,}",
        "",
        f"{'GPUs':30} rollouts rewards training   sync  step (s) tokens/s",
        *map(_line, steps[: 1 + OTHERS]),
        "",
    ]
    best = steps[0]
    share = best.phases[best.bottleneck] / best.seconds
    lines.append(f"bottleneck: {best.bottleneck}, {share:.0%} of the step; instead of {best.seconds:,.1f} s:")
    changes = {
        f"--gpus {2 * run.gpus}": replace(run, gpus=2 * run.gpus),
        "--generate_ahead 1": replace(run, generate_ahead=1),
        "--no-gradient-checkpointing": replace(run, gradient_checkpointing=False),
    }
    for name, changed in changes.items():
        with suppress(InputError):  # that has no split with room for the model
            if changed != run:
                lines.append(f"  {name:28} {splits(changed)[0].seconds:8,.1f} s")
    return "\n".join(lines)


def _line(step: Step) -> str:
    sampling = f"{step.replicas} x TP {step.tensor_parallel} sample"
    where = f"{step.rollout_gpus} sample and train in turn" if step.colocate else f"{sampling}, {step.train_gpus} train"
    rollouts, rewards, training, sync = step.phases.values()
    parts = f"{rollouts:8,.1f} {rewards:7,.1f} {training:8,.1f} {sync:6,.1f} {step.seconds:9,.1f}"
    tokens = step.run.completions * step.run.completion_length
    return f"{where:30} {parts} {short_number(tokens / step.seconds):>8}"
