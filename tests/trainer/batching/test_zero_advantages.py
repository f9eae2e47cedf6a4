"""Completions with advantage 0 stay out of the forward pass: the same update, wherever they have no gradient."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from batches import batch_of, column

from fused_grpo import GRPOLossConfig, grpo_loss
from fused_grpo.config import LOSS_TYPES
from fused_grpo.errors import WeightSyncError
from fused_grpo.trainer.batching.micro_batches import can_skip, skip_zero_advantages
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.types import Sample

# Another value for each option of the loss; those of the first line give a token without an advantage a gradient, or
# let others depend on it.
OF_EVERY_TOKEN = {"beta": 0.1, "entropy_coef": 0.1, "top_entropy_quantile": 0.5}
OF_EVERY_TOKEN |= {"clip_cov_ratio": 0.6, "kl_cov_ratio": 0.3, "log_ratio_penalty": 0.2}
OF_SEQUENCES = {
    "loss_type": "sapo",
    "epsilon": 0.01,
    "epsilon_high": 0.02,
    "delta": 1.05,
    "kl_estimator": "k1",
    "use_bias_correction_kl": False,
    "importance_sampling_level": "sequence",
    "sapo_temperature_pos": 2.0,
    "sapo_temperature_neg": 2.0,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.0,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0,
    "sampling_correction": "sequence_mask",
    "sampling_clip_max": 1.05,
    "sampling_clip_min": 0.95,
    "off_policy_mask_threshold": 0.01,
    "max_completion_length": 9,
    "clip_cov_lb": 0.01,
    "clip_cov_ub": 2.0,
    "kl_cov_coef": 0.5,
    "sequence_rejection": "k3",
    "sequence_rejection_min": 0.01,
    "sequence_rejection_max": 0.05,
}
# What an option needs beside it.
COMPANIONS: dict[str, dict[str, Any]] = {
    "clip_cov_ratio": {"clip_cov_lb": -1.0, "epsilon": 9.0},
    "sequence_rejection": {"sequence_rejection_max": 0.05},
    "sequence_rejection_min": {"sequence_rejection": "k3"},
    "sequence_rejection_max": {"sequence_rejection": "k3"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"share_rows": False},
    "rows": {},
    "one row": {"one_row": True},
    "by tokens": {"max_tokens_per_micro_batch": 40},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "sequence level": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "off-policy mask": {"off_policy_mask_threshold": 0.0},
}


def batch(advantages: list[float], **fields: Any) -> list[Sample]:
    """Uneven completions, two to a prompt, with log-probs of a sampler that is not the policy."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (len(advantages),), generator=generator).tolist()
    return batch_of(
        prompt_ids=[[2 + index // 2 % 9] * (1 + index // 2 % 4) for index in range(len(advantages))],
        completion_ids=[torch.randint(2, 20, (length,), generator=generator).tolist() for length in lengths],
        sampling_logprobs=[(-3 - torch.rand(length, generator=generator)).tolist() for length in lengths],
        advantage=torch.tensor(advantages),
        **fields,
    )


HALF = batch([1.0, -1.0, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 2.0, -1.0, -0.7, -0.3, 0.0, 0.0, 0.0, 0.0])


def watch(model: Any, places: list[int]) -> None:
    """Add the places of each forward pass of the backbone to `places`."""
    hook = model.model.register_forward_pre_hook
    hook(lambda *args: places.append(args[2]["input_ids"].numel()), with_kwargs=True)


def updates(make_trainer: Any, batch: list[Sample], *, share_rows: bool = True, one_row: bool = False, **options: Any):
    """Two iterations on a batch: the gradients and the metrics of both, and the places that went through the model.

    Between them the policy moves by noise and not by its gradient, so that both times it is the same one.
    """
    options = {"per_device_train_batch_size": 16, "optim": "sgd", "learning_rate": 0.0, **options}
    trainer = make_trainer(**options)
    learner, model, gradients, metrics, places = trainer.learner, trainer.model, [], [], []
    layout = {"one_row": one_row, "share_rows": share_rows, "share_prompts": False}
    learner.packing = dataclasses.replace(learner.packing, **layout)
    watch(model, places)

    def keep(name: str) -> None:
        if name == "on_pre_optimizer_step":
            gradients.append({key: tensor.grad.clone() for key, tensor in model.named_parameters()})

    noise = torch.Generator().manual_seed(0)
    for _ in range(2):
        batch, step_metrics = learner.learn(batch, event=keep)
        metrics.append(step_metrics)
        for parameter in model.parameters():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=noise)
    return gradients, metrics, places


def without_zeros(batch: list[Sample]) -> list[Sample]:
    return skip_zero_advantages(batch)


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]], *, bits: bool = False) -> None:
    for gradients, expected in zip(one, other, strict=True):
        for name, gradient in gradients.items():
            bound = 0.0 if bits else 3e-7  # of gradients that are clipped to a norm of 1
            assert (gradient - expected[name]).abs().max() <= bound, name
        assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_are_those_of_all_completions(make_trainer, options):
    expected, all_metrics, _ = updates(make_trainer, HALF, **options)
    given, metrics, _ = updates(make_trainer, without_zeros(HALF), **options)
    # Where a micro-batch has completions without an advantage alone, leaving it out changes no sum of the others.
    assert_same(given, expected, bits="gradient_accumulation_steps" in options)
    exact = ["loss", "policy_term", "loss_tokens", "grad_norm", "zero_gradient_fraction"]
    exact += [name for name in all_metrics[1] if name.startswith("clip_ratio/")]
    assert len(exact) == 10
    assert all_metrics[1]["clip_ratio/region_mean"] > 0.01
    for skipping, full in zip(metrics, all_metrics, strict=True):
        wanted = {name: full[name] for name in exact}
        assert {name: skipping[name] for name in exact} == pytest.approx(
            wanted, rel=1e-6, abs=2e-7
        )  # sums of terms near 1
        assert skipping["entropy"] != pytest.approx(full["entropy"], abs=1e-6)


# "dro" has a penalty of every token.
@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "dro"])
def test_gradients_are_the_same_for_every_loss(make_trainer, loss_type):
    expected, _, _ = updates(make_trainer, HALF, loss_type=loss_type)
    given, _, _ = updates(make_trainer, without_zeros(HALF), loss_type=loss_type)
    assert_same(given, expected)


def test_completions_without_an_advantage_do_not_go_through_the_model(make_trainer):
    lengths = [len(p) + len(c) for p, c in zip(column(HALF, "prompt_ids"), column(HALF, "completion_ids"), strict=True)]
    remaining = sum(len(sample.prompt_ids + sample.completion_ids) for sample in HALF if sample.advantage)
    assert remaining < 0.6 * sum(lengths)
    for batch, tokens in ((HALF, sum(lengths)), (without_zeros(HALF), remaining)):
        assert updates(make_trainer, batch, one_row=True)[2] == [tokens] * 2
        trainer = make_trainer(per_device_train_batch_size=16)
        with_old = column(trainer.learner.with_old_logprobs(batch), "old_logprobs")
        empty = bool(column(batch, "skipped").any())
        expected = [0 if empty and not sample.advantage else len(sample.completion_ids) for sample in batch]
        assert [len(values) for values in with_old] == expected


def equal_for_small_numbers(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) if prompt[0] in "23" else 1) for prompt, text in zip(prompts, completions, strict=True)]


def test_a_run_computes_what_is_left_once_and_old_log_probs_of_later_steps(make_trainer, served_engine):
    options = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 2}
    trainer, places = make_trainer(equal_for_small_numbers, engine=served_engine, **options), []
    trainer.learner.packing = dataclasses.replace(
        trainer.learner.packing, one_row=True, share_rows=True, share_prompts=False
    )
    watch(trainer.model, places)
    trainer.train()
    lines = map(json.loads, (trainer.output_dir / "rollouts.jsonl").read_text().splitlines())
    # One token for each character, and the end of the completion.
    tokens = [(len(line["prompt"] + line["completion"]) + 1) * bool(line["advantage"]) for line in lines]
    first, second = sum(tokens[:8]), sum(tokens[8:])
    assert 0 in tokens
    assert places == [second, first, second]


OPTIONS = [field.name for field in dataclasses.fields(GRPOLossConfig)]
OPTIONS.remove("score_centering")  # it needs the head: tests/trainer/test_score_centering.py


@pytest.mark.parametrize("name", OPTIONS)
def test_every_loss_option_is_declared_to_leave_other_tokens_alone_or_not(name):
    """The gradient of a loss over two sequences, one of them with advantage 0, against that of the other alone."""
    value = {**OF_EVERY_TOKEN, **OF_SEQUENCES}[name]
    loss_type = "vespo" if name.startswith("vespo") else "sapo" if name.startswith("sapo") else "grpo"
    config = GRPOLossConfig(**{"loss_type": loss_type, **COMPANIONS.get(name, {}), name: value})
    generator = torch.Generator().manual_seed(1)
    numbers = {
        key: -torch.rand(8, generator=generator) for key in ("old_logprobs", "ref_logprobs", "sampling_logprobs")
    }
    logprobs, entropy = (torch.rand(8, generator=generator).neg().requires_grad_() for _ in range(2))

    def gradients(count: int, advantages: list[float]) -> torch.Tensor:
        given = {key: values[:count] for key, values in numbers.items()}
        bounds = torch.tensor([0, 4, 8][: len(advantages) + 1], dtype=torch.int32)
        options = {"cu_seqlens": bounds, "num_tokens": 8.0, "num_sequences": 2.0, "config": config, **given}
        given_advantages = torch.tensor(advantages)
        loss = grpo_loss(logprobs[:count], entropy=entropy[:count], advantages=given_advantages, **options).loss
        return torch.cat(torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True, materialize_grads=True))

    for advantage in (0.7, -0.7):
        both, alone = gradients(8, [advantage, 0.0]), gradients(4, [advantage])
        assert torch.equal(both, alone) is (name in OF_SEQUENCES), (both, alone)


@pytest.mark.parametrize(
    "options", [*({name: value} for name, value in OF_EVERY_TOKEN.items()), {"use_adaptive_entropy": True}]
)
def test_nothing_is_left_out_where_every_token_counts(make_trainer, options):
    assert not can_skip(GRPOConfig(**options), router_coefficient=0.0)
    assert not make_trainer(**options).learner.can_skip


def test_a_router_loss_and_the_option_keep_everything():
    assert can_skip(GRPOConfig(), router_coefficient=0.0)
    assert not can_skip(GRPOConfig(), router_coefficient=1e-3)
    assert not can_skip(GRPOConfig(skip_zero_advantages=False), router_coefficient=0.0)
    assert not can_skip(GRPOConfig(distillation_coef=0.1), router_coefficient=0.0)


def equal_from_the_second_step(completions: list[str], **columns: Any) -> list[float]:
    later = columns["trainer_state"].global_step > 0
    return [0.1 if later else float(sum(map(ord, text)) % 7) for text in completions]


def test_a_step_without_any_advantage_moves_the_optimizer_as_before(make_trainer):
    options = {
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "num_generations": 6,
        "per_device_train_batch_size": 6,
    }
    results = []
    for skips in (True, False):
        trainer = make_trainer(equal_from_the_second_step, skip_zero_advantages=skips, learning_rate=1e-2, **options)
        metrics = trainer.train().metrics
        state = trainer.learner.optimizer.state_dict()["state"]
        results.append((trainer.model.state_dict(), state, metrics))
        assert metrics["grad_norm"] == 0.0
        assert metrics["entropy"] > 0.0
    (skipping, skipping_state, metrics), (full, full_state, full_metrics) = results
    assert all(torch.equal(skipping[name], full[name]) for name in full)
    assert all(torch.equal(skipping_state[index]["exp_avg"], entry["exp_avg"]) for index, entry in full_state.items())
    assert metrics["completion_tokens"] == full_metrics["completion_tokens"]
    assert metrics["learning_rate"] == full_metrics["learning_rate"]


def test_an_engine_with_other_weights_is_seen_where_all_rewards_are_equal(make_trainer, served_engine):
    def stale(*arguments: Any) -> Any:
        engine = served_engine(*arguments)
        engine.model.get_output_embeddings().weight.data.mul_(2)
        return engine

    trainer = make_trainer(lambda completions, **columns: [0.0] * len(completions), engine=stale)
    with pytest.raises(WeightSyncError):
        trainer.train()


def test_truncated_completions_are_not_counted_twice():
    marked = without_zeros(batch([1.0, 0.0, 0.0, -1.0], in_loss=torch.tensor([False, True, False, True])))
    assert column(marked, "skipped").tolist() == [False, True, False, False]
    assert column(marked, "in_forward").tolist() == [False, False, False, True]
    lonely = without_zeros(batch([1.0, 0.0, 0.0], in_loss=torch.tensor([False, True, True])))
    assert column(lonely, "in_forward").tolist() == [False, True, False]
