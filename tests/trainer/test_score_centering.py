"""Score centering in whole steps: the loss gets what the sampler said of likely tokens, beside those tokens."""

import json
from typing import Any

import pytest
import torch

from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.trainer import policy
from fused_grpo.trainer.config.checks import check_arguments
from fused_grpo.trainer.engines.sampling import Completion
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.types import Rollouts

KINDS: dict[str, dict[str, Any]] = {
    "kept": {"top_p": 0.8},
    "topk": {"score_centering_topk": 5},
    "topk of a truncated sampler": {"score_centering_topk": 5, "top_k": 3, "sampling_support": "off"},
    "topk of all": {},
}
KINDS = {name: {"score_centering": name.split()[0], "temperature": 0.8, **options} for name, options in KINDS.items()}


class SamplingEngine(TransformersEngine):
    """Transformers' engine as the user's own, whose log-probs the loss corrects for. It records its rollouts."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.recorded: list[Rollouts] = []

    def generate(self, prompt_ids, sampling):
        self.recorded.append(super().generate(prompt_ids, sampling))
        return self.recorded[-1]


@pytest.fixture
def make_trainer(make_trainer):
    return lambda **options: make_trainer(engine=SamplingEngine, **options)


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """The arguments of each loss, with its log-probs and metrics."""
    seen, op = [], policy.fused_linear_grpo_loss

    def recording(hidden, weight, targets, **options):
        output = op(hidden, weight, targets, **options)
        logits = (hidden.detach() @ weight.detach().T) / options["temperature"]
        seen.append({"targets": targets, "logits": logits, **options, "metrics": output.metrics})
        return output

    monkeypatch.setattr(policy, "fused_linear_grpo_loss", recording)
    return seen


def rows_of(call: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The ids of each token, and the sampler's log-probs of them."""
    ids, logprobs = call["sampling_topk_ids"], call["sampling_topk_logprobs"]
    if ids is None:
        tokens, offsets = call["support"]
        sizes = offsets.diff().tolist()
        return list(zip(tokens.long().split(sizes), logprobs.split(sizes), strict=True))
    assert call["support"] is None
    return [(row[row >= 0], values[row >= 0]) for row, values in zip(ids, logprobs, strict=True)]


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_on_policy_the_samplers_logprobs_are_those_of_the_policy(make_trainer, calls, options):
    make_trainer(**options, max_steps=2).train()
    assert sum(len(call["targets"]) for call in calls) > 20
    for call in calls:
        named = zip(rows_of(call), call["logits"], call["targets"], call["sampling_logprobs"], strict=True)
        for (ids, logprobs), logits, target, target_logprob in named:
            within = ids if "top_p" in options or "top_k" in options else torch.arange(len(logits))
            torch.testing.assert_close(logprobs, logits[ids] - logits[within].logsumexp(0), atol=1e-4, rtol=0)
            assert torch.equal(logprobs[ids == target], target_logprob.expand(int((ids == target).sum())))
            if options["score_centering"] == "topk":
                likely = min(len(logits), options.get("top_k", options.get("score_centering_topk", len(logits))))
                assert ids.tolist() == sorted(logits.topk(likely).indices.tolist())


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_micro_batch": 20}, {"share_prompts": True}], ids=str)
def test_rows_stay_with_their_tokens_however_a_batch_is_cut(make_trainer, calls, options):
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "mask_truncated_completions": True}
    make_trainer(**KINDS["topk of all"], **sizes, **options, max_steps=1).train()
    for call in calls:
        expected = call["logits"].log_softmax(-1)
        torch.testing.assert_close(call["sampling_topk_logprobs"], expected, atol=1e-4, rtol=0)
    assert "kept_tokens" not in "".join(calls[0]["metrics"])


def textbook(model: Any, rollouts: Rollouts, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token its log-prob, and sum of c_v log p_v; a loop over full logits."""
    own, corrections = [], []
    for index, ids in enumerate(rollouts.completion_ids):
        prompt, listed = rollouts.prompt_ids[index // 4], rollouts.listed_tokens[index]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / options["temperature"]
        parts = (values.split(listed.sizes.tolist()) for values in (listed.ids, listed.logprobs))
        for row, token, tokens, sampler in zip(logits, ids, *parts, strict=True):
            within = tokens.long() if options["score_centering"] == "kept" else torch.arange(len(row))
            logprobs = torch.full_like(row, -torch.inf).index_put((within,), row[within].log_softmax(0))
            p, q = logprobs[tokens.long()].detach().exp(), sampler.exp()
            c = torch.minimum(p, 3.0 * q)
            if options["score_centering"] == "topk":
                tail = (1 - q.sum()).clamp(min=0) / (1 - p.sum()).clamp(min=1e-6)
                c = c - (3.0 * tail).clamp(max=1.0) * p
            else:
                c = c - c.sum() * p
            own.append(logprobs[token])
            corrections.append((c * logprobs[tokens.long()]).sum())
    return torch.stack(own), torch.stack(corrections)


def moved(model: Any, other: Any) -> float:
    """The distance of the parameters of both."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return torch.cat([(value - before).detach().flatten() for value, before in pairs]).norm().item()


PLAIN_STEPS = {"optim": "sgd", "learning_rate": 3.0, "max_grad_norm": 1e9, "skip_zero_advantages": False}


@pytest.mark.parametrize("name", ["kept", "topk", "topk of a truncated sampler"])
def test_two_iterations_are_those_of_a_plain_loop_with_the_formula(make_trainer, make_model, name):
    options, rules = KINDS[name], {"num_iterations": 2, "max_steps": 2, **PLAIN_STEPS, "learning_rate": 0.1}
    trainer = make_trainer(**options, **rules)
    trainer.train()
    model, (rollouts,) = make_model(), trainer.engine.recorded
    texts = trainer.processing_class.batch_decode(rollouts.completion_ids, skip_special_tokens=True)
    rewards = torch.tensor(trainer.rewards.functions[0](texts))
    lengths = torch.tensor(list(map(len, rollouts.completion_ids)))
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).repeat_interleave(lengths)
    optimizer = torch.optim.SGD(model.parameters(), lr=rules["learning_rate"])
    old = textbook(model, rollouts, options)[0].detach()
    sampling = torch.cat([torch.tensor(one) for one in rollouts.sampling_logprobs])
    weights = torch.exp(old - sampling).clamp(max=3.0)
    for step in map(json.loads, (trainer.output_dir / "metrics.jsonl").read_text().splitlines()):
        logprobs, corrections = textbook(model, rollouts, options)
        ratio = torch.exp(logprobs - old)
        policy = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * weights
        loss = (advantages * corrections - policy).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert step["loss"] == pytest.approx(loss.item(), abs=5e-6)
        assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert 0 < step["centering_sampler_mass"] < 1 + 1e-4
        optimizer.step()
    assert step["centering_l1"] > 1e-3


@pytest.mark.parametrize("name", ["kept", "topk"])
def test_completions_without_an_advantage_leave_the_update_as_it_is(make_trainer, make_model, calls, name):
    def reward(prompts: list[str], **_: Any) -> list[float]:
        return [float(place * (prompt[0] in "02")) for place, prompt in enumerate(prompts)]

    ends, sizes = [], {"per_device_train_batch_size": 16, "num_iterations": 2, "max_steps": 2}
    for skip in (True, False):
        trainer = make_trainer(reward=reward, **KINDS[name], **PLAIN_STEPS | {"skip_zero_advantages": skip}, **sizes)
        trainer.train()
        ends.append(trainer.model)
    counts = [len(call["targets"]) for call in calls]
    assert counts[0] == counts[1] < counts[2] == counts[3]
    assert moved(ends[0], ends[1]) < 1e-4 * moved(ends[1], make_model())


@pytest.mark.parametrize("name", ["kept", "topk"])
def test_on_policy_the_correction_leaves_the_update_as_it_is(make_trainer, make_model, name):
    options, ends = dict(KINDS[name]), []
    for kind in (options.pop("score_centering"), "off"):
        trainer = make_trainer(**options, **PLAIN_STEPS, score_centering=kind, max_steps=1)
        metrics = trainer.train().metrics
        ends.append(trainer.model)
        if kind != "off":
            assert metrics["centering_sampler_mass"] == pytest.approx(metrics["centering_trainer_mass"], abs=1e-5)
    assert moved(ends[0], ends[1]) < 1e-4 * moved(ends[1], make_model())


@pytest.mark.parametrize("kind", ["kept", "topk"])
def test_a_rank_without_samples_takes_part_in_a_step(make_trainer, kind):
    options = {"top_p": 0.8} if kind == "kept" else {}
    learner = make_trainer(score_centering=kind, **options, max_steps=1).learner
    batch, metrics = learner.learn([])
    assert (batch, metrics["loss"], metrics["grad_norm"]) == ([], 0.0, 0.0)


def test_without_score_centering_nothing_more_is_kept_or_passed(make_trainer, calls):
    trainer = make_trainer(top_p=0.8, max_steps=1)
    trainer.train()
    assert "sampling_topk_logprobs" not in calls[0]
    assert all(sample.listed_tokens.logprobs is None for sample in trainer.scored.samples)


def test_likely_tokens_are_not_reported_as_kept_ones(make_trainer):
    trainer = make_trainer(**KINDS["topk of a truncated sampler"], max_steps=1)
    metrics = trainer.train().metrics
    assert not [name for name in metrics if "kept_tokens" in name]
    # Of different distributions, so that they may not be compared.
    assert metrics["sampling/sampling_logp_difference/max"] > 0.01


def test_an_evaluation_asks_for_no_logprobs_of_further_tokens(make_trainer):
    rows = [{"prompt": "1+1="}]
    trainer = make_trainer(
        **KINDS["topk"], eval_dataset=rows, num_generations_eval=2, eval_strategy="steps", max_steps=1
    )
    trainer.train()
    assert [one.listed_tokens is None for one in trainer.engine.recorded] == [False, True]


def test_an_engine_without_logprobs_ends_the_run(make_trainer):
    trainer = make_trainer(**KINDS["topk"])
    trainer.engine._run = lambda prompts, *_: [Completion([3, 4, 1], None, "stop")] * len(prompts)
    with pytest.raises(UnsupportedError, match=r"score_centering='topk' and no log-probs .*logits processors.*fix:"):
        trainer.train()


def test_a_rollout_func_is_refused_with_score_centering(make_trainer):
    args = make_trainer(**KINDS["topk"]).args
    with pytest.raises(InputError, match=r"score_centering='topk' with rollout_func.*fix:"):
        check_arguments(args, rollout_func=lambda *_: {}, eval_dataset=None, teacher_model=None)
