"""Options drawn together, some rewards too, four steps beside TRL's trainer: what each of them does alone, or with
another one, is compared in test_trajectories.py. `--full` draws ten times as many."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import trl_runs
from trl_compared import compare, with_tools

from fused_grpo.config import TRL_LOSS_TYPES

pytest.importorskip("trl", reason="TRL is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL's, about what is experimental

# Each of these is drawn or left out. Where a formula is the same for any of its numbers, one of them is enough.
ANY: dict[str, Sequence[Any]] = {
    "beta": (0.04, 0.3),
    "epsilon": (0.01,),
    "delta": (1.2, 4.0),
    "importance_sampling_level": ("sequence",),
    "scale_rewards": ("batch", "none", True, False),
    "mask_truncated_completions": (True,),
    "off_policy_mask_threshold": (0.01, 0.5),
    "use_bias_correction_kl": (False,),
    "temperature": (0.7, 1.5),
    "weight_decay": (0.1,),
    "lr_scheduler_type": ("cosine", "polynomial", "inverse_sqrt"),
    "max_grad_norm": (0.05, 0.0),
    "optim": ("sgd",),
    "gradient_checkpointing": (True,),
    "logging_steps": (2, 3),
    "logging_first_step": (True,),
    "cast_lm_head_to_fp32": (True,),
    "multi_objective_aggregation": ("normalize_then_sum",),
}
OF_ONE_BATCH = {"top_entropy_quantile": (0.35,), "entropy_coef": (0.05,)}  # others: docs/from-trl.md
# Of ours alone, which may change nothing.
OURS: dict[str, Sequence[Any]] = {"max_tokens_per_micro_batch": (30, 60), "chunk_bytes": (4096,)}
SEEDS = [pytest.param(seed, marks=() if seed < 6 else pytest.mark.full) for seed in range(60)]


def of_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """None for every fifth, on average."""
    return [None if sum(ids) % 5 == 0 else float(len(ids) % 3) for ids in completion_ids]


def of_some_groups(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    return [None if x in ("2 3", "8") else float(sum(ids) % 4) for x, ids in zip(prompts, completion_ids, strict=True)]


def all_equal(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [1.0] * len(completion_ids)


REWARDS: tuple[Callable[..., Any], ...] = (trl_runs.reward, of_tokens, of_some_groups, all_equal)


def drawn(rng: random.Random, pool: dict[str, Sequence[Any]], share: float = 0.25) -> Iterator[tuple[str, Any]]:
    return ((name, rng.choice(values)) for name, values in pool.items() if rng.random() < share)


@pytest.mark.parametrize("seed", SEEDS)
def test_options_drawn_together_train_as_with_trl(trl, seed):
    rng = random.Random(seed)
    loss_type, batches = rng.choice(TRL_LOSS_TYPES), rng.choice((1, 1, 2, 4))
    batches = 1 if loss_type == "bnpo" else batches  # of each micro-batch there
    options = {
        "loss_type": loss_type,
        "epsilon_high": 5.0,
        "num_iterations": rng.choice((1, 2, 3)),
        **dict(drawn(rng, ANY)),
    }
    options |= {"gradient_accumulation_steps": batches, "per_device_train_batch_size": 16 // batches, "max_steps": 4}
    options |= dict(drawn(rng, OF_ONE_BATCH if batches == 1 else {}))
    if options.get("beta") and rng.random() < 0.3:
        options |= {"sync_ref_model": True, "ref_model_sync_steps": 2}
    rewards = rng.sample(REWARDS, rng.choice((1, 2, 3)))
    if rng.random() < 0.5:
        options["reward_weights"] = [rng.choice((1.0, 0.5, -1.0, 0.0)) for _ in rewards]
    model = trl_runs.saved_model(sharpness=20.0 if "top_entropy_quantile" in options else 1.0)
    rollouts = rng.choice((trl_runs.completions, with_tools))
    means = ["policy_loss", "entropy", "kl", "clip", "vespo"] if batches > 1 else []
    # TRL has masked completions in the means over sequences.
    means += ["clip", "vespo"] if "mask_truncated_completions" in options else []
    compare(trl, dict(drawn(rng, OURS)), means, model=model, rewards=rewards, rollout_func=rollouts, **options)
