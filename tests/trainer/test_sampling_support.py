"""Truncated sampling: log-probs over the tokens that the sampler kept, through whole steps of the real trainer."""

import dataclasses
import json

import pytest
import torch

from fused_grpo.errors import UnsupportedError, WeightSyncError
from fused_grpo.trainer.engines.sampling import Completion
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine

ALL_THREE = {"top_p": 0.8, "top_k": 8, "min_p": 0.05}
DIFFERENCE, RATIO = "sampling/sampling_logp_difference/max", "sampling/importance_sampling_ratio/mean"


class SamplingEngine(TransformersEngine):
    """Transformers' engine as the user's own, whose log-probs the loss corrects for. It records its rollouts."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.recorded = []

    def generate(self, prompt_ids, sampling):
        self.recorded.append(super().generate(prompt_ids, sampling))
        return self.recorded[-1]


@pytest.fixture
def make_trainer(make_trainer):
    return lambda **options: make_trainer(**{"engine": SamplingEngine, **options})


def lines(trainer) -> list[dict]:
    return [json.loads(line) for line in (trainer.output_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("options", [{"top_p": 0.8}, {"top_k": 8}, {"min_p": 0.05}, ALL_THREE], ids=str)
def test_on_policy_the_ratio_is_one_within_the_support_and_biased_without(make_trainer, options):
    trainer = make_trainer(**options, sampling_support="require", temperature=0.8)
    trainer.train()
    for step in lines(trainer):
        assert step[DIFFERENCE] < 1e-4
        assert step[RATIO] == pytest.approx(1.0, abs=1e-4)
    biased = make_trainer(**options, sampling_support="off", temperature=0.8)
    biased.train()
    assert max(step[RATIO] for step in lines(biased)) < 0.99


def textbook_logprobs(model, rollouts) -> list[torch.Tensor]:
    """Full logits, with those of tokens that were not kept at -inf."""
    kept_logprobs = []
    for index, ids in enumerate(rollouts.completion_ids):
        prompt = rollouts.prompt_ids[index // 4]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        kept = rollouts.listed_tokens[index].ids.split(rollouts.listed_tokens[index].sizes.tolist())
        left_out = torch.ones_like(logits, dtype=torch.bool)
        for row, tokens in zip(left_out, kept, strict=True):
            row[tokens.long() if len(tokens) else slice(None)] = False
        logprobs = logits.masked_fill(left_out, -torch.inf).log_softmax(-1)
        kept_logprobs.append(logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0])
    return kept_logprobs


@pytest.mark.parametrize("options", [{"top_p": 0.8}, {"min_p": 0.3, "beta": 0.1}], ids=str)
def test_two_iterations_are_those_of_a_plain_loop_over_the_kept_tokens(make_trainer, make_model, options):
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 2}
    trainer = make_trainer(**cut, **options, max_grad_norm=1e9, skip_zero_advantages=False)
    trainer.train()
    model, (rollouts,) = make_model(), trainer.engine.recorded
    texts = trainer.processing_class.batch_decode(rollouts.completion_ids, skip_special_tokens=True)
    rewards = torch.tensor(trainer.rewards.functions[0](texts))
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).repeat_interleave(
        torch.tensor(list(map(len, rollouts.completion_ids)))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    old = reference = torch.cat(textbook_logprobs(model, rollouts)).detach()
    for step in lines(trainer):
        logprobs = torch.cat(textbook_logprobs(model, rollouts))
        ratio, apart = torch.exp(logprobs - old), reference - logprobs
        policy = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = (options.get("beta", 0.0) * ratio * (apart.exp() - apart - 1) - policy).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert step["loss"] == pytest.approx(loss.item(), abs=2e-6)
        assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        optimizer.step()


def test_stale_weights_are_noticed_under_truncation_too(make_trainer, make_model):
    trainer = make_trainer(**ALL_THREE, learning_rate=0.05)
    trainer.engine._model = trainer.engine._given = make_model()
    with pytest.raises(WeightSyncError, match="weight version 1"):
        trainer.train()
    assert trainer.step == 1


def test_without_supports_a_run_ends_or_says_so_once(make_trainer, caplog):
    unknown = Completion([3, 4, 1], None, "stop")

    def without_support(**options):
        trainer = make_trainer(top_p=0.8, **options)
        trainer.engine._run = lambda prompts, *_: [unknown] * len(prompts)  # as a model whose `generate` is its own
        return trainer

    with pytest.raises(UnsupportedError, match=r"got top_p=0.8 .*logits processors.*fix:"):
        without_support(sampling_support="require").train()
    trainer = without_support()
    trainer.train()
    assert trainer.step == 3
    assert caplog.text.count("no tokens that the sampler kept") == 1


def test_rewards_of_skipped_completions_leave_supports_with_their_tokens(make_trainer):
    """The order of sequences changes where micro-batches are cut by tokens, and some are in none of them."""
    options = {"mask_truncated_completions": True, "max_tokens_per_micro_batch": 20, "dynamic_sampling": 2}
    batch = {"per_device_train_batch_size": 16, "num_generations": 4, "steps_per_generation": 2}
    trainer = make_trainer(**ALL_THREE, **options, **batch, sampling_support="require")
    trainer.train()
    assert trainer.step == 3
    assert max(step[DIFFERENCE] for step in lines(trainer) if DIFFERENCE in step) < 1e-4


def test_kept_tokens_that_a_part_of_a_batch_lacks_are_not_compared_within(make_trainer):
    """As of an engine over several servers, of which one says none: such log-probs are over kept tokens, these not."""

    class Forgets(SamplingEngine):
        def generate(self, prompt_ids, sampling):
            rollouts = super().generate(prompt_ids, sampling)
            return rollouts if len(self.recorded) == 1 else dataclasses.replace(rollouts, listed_tokens=None)

    def equal_at_first(completions, **_):
        return [float(place % 4 if place > 3 or len(trainer.engine.recorded) > 1 else 0) for place in range(8)]

    cut = {"per_device_train_batch_size": 8, "dynamic_sampling": 1, "max_steps": 1}
    trainer = make_trainer(engine=Forgets, reward=equal_at_first, top_k=4, **cut)
    trainer.train()
    assert len(trainer.engine.recorded) == 2
    assert lines(trainer)[0][DIFFERENCE] > 0.01
