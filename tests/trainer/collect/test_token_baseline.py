"""The optimal token baseline against its formula, token by token, and from the model's own logits in a run."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_grpo.trainer.collect.advantages import Scores, token_advantages
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.types import Sample

SCRIPT = Path(__file__).parents[1] / "ranks_run.py"
Group = list[tuple[float, list[tuple[int, float]]]]  # rewards, and (place, norm) of tokens


def by_hand(group: Group, *, zero_tail: bool) -> list[list[float]]:
    """arXiv:2602.07078, one token at a time."""
    with_reward = [(r, tokens) for r, tokens in group if not math.isnan(r) and tokens]
    advantages = []
    for reward, tokens in group:
        own = []
        for place, _ in tokens:
            # The weight of each completion that reaches the place: its path's norm so far.
            paths = [
                (r, sum(norm for at, norm in norms if at <= place))
                for r, norms in with_reward
                if place in [at for at, _ in norms]
            ]
            total = sum(w for _, w in paths)
            baseline = sum(r * w for r, w in paths) / total if total else reward
            if zero_tail and len(paths) == 1:
                baseline = 0.0
            own.append(0.0 if math.isnan(reward) or len({r for r, _ in with_reward}) < 2 else reward - baseline)
        advantages.append(own)
    return advantages


def of_ours(group: Group, *, zero_tail: bool) -> list[list[float]]:
    scores = [
        Scores(r, torch.tensor([norm for _, norm in tokens]), torch.tensor([at for at, _ in tokens], dtype=torch.int64))
        for r, tokens in group
    ]
    return [advantages.tolist() for advantages in token_advantages(scores, zero_tail=zero_tail)]


NORMS = st.sampled_from([0.0, 1e-3, 0.25, 1.0, 1.75])
PLACES = st.lists(st.tuples(st.integers(0, 5), NORMS), max_size=6, unique_by=lambda pair: pair[0]).map(sorted)
REWARDS = st.sampled_from([0.0, 1.0, -2.5, 0.1, math.nan])


@given(st.lists(st.tuples(REWARDS, PLACES), min_size=1, max_size=5), st.booleans())
def test_advantages_are_those_of_the_formula(group, zero_tail):
    ours, expected = of_ours(group, zero_tail=zero_tail), by_hand(group, zero_tail=zero_tail)
    assert [len(one) for one in ours] == [len(one) for one in expected]
    for one, other in zip(ours, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


@given(st.lists(PLACES, min_size=2, max_size=5), st.sampled_from([0.1, -3.3, 1e6]), st.booleans())
def test_equal_rewards_have_advantages_of_exactly_0(places, reward, zero_tail):
    """On one process such a group is not measured; of one on two processes the norms are known."""
    assert not any(map(any, of_ours([(reward, tokens) for tokens in places], zero_tail=zero_tail)))


def test_a_baseline_leaves_the_least_of_what_it_is_the_best_for():
    """No other number in its place has a smaller sum of W (r - b)^2."""
    tokens = [(0, 0.5), (1, 1.5)]
    group: Group = [(1.0, tokens), (0.0, [(0, 1.0), (1, 0.1)]), (0.5, [(0, 0.2), (1, 0.9)])]
    ours, paths = of_ours(group, zero_tail=False), [sum(norm for _, norm in norms) for _, norms in group]
    baseline = group[0][0] - ours[0][1]

    def variance(b: float) -> float:
        return sum(w * (r - b) ** 2 for (r, _), w in zip(group, paths, strict=True))

    assert all(variance(baseline) < variance(baseline + change) for change in (-0.01, 0.01))
    assert baseline != pytest.approx(0.5, abs=0.05)  # the mean


class Captured:
    """What `PolicyLoss` was given, micro-batch after micro-batch."""

    def __init__(self, monkeypatch) -> None:
        self.parts: list[Any] = []
        loss = PolicyLoss._loss
        monkeypatch.setattr(
            PolicyLoss, "_loss", lambda own, part, **step: self.parts.append(part) or loss(own, part, **step)
        )


@torch.no_grad()
def norms_of_full_logits(model: Any, sample: Any, *, kept: bool = False) -> torch.Tensor:
    """1 - 2 p + sum p^2 of each token, over its kept tokens if it has any."""
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].double()
    if kept:
        listed = sample.listed_tokens
        ends = listed.sizes.cumsum(0).tolist()
        for row, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
            if last > first:
                others = torch.ones(logits.shape[1], dtype=torch.bool)
                logits[row, others.index_fill(0, listed.ids[first:last].long(), 0)] = -torch.inf
    p = logits.softmax(1)
    own = p[torch.arange(len(p)), sample.completion_ids]
    return 1 - 2 * own + p.square().sum(1)


@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.7}], ids=["whole", "kept tokens"])
def test_in_a_run_the_norms_are_those_of_the_models_logits(make_trainer, monkeypatch, estimator, options):
    """Completions of unequal lengths; those of a group with equal rewards stay out, and have advantages of 0."""
    captured = Captured(monkeypatch)
    rewards = iter([1.0, 0.0, 0.5, 0.0, *[2.0] * 4])
    trainer = make_trainer(
        lambda completions, **columns: [next(rewards) for _ in completions], engine=TransformersEngine, max_steps=1,
        per_device_train_batch_size=8, num_generations=4, advantage_estimator=estimator, **options,
    )  # fmt: skip
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    trainer.model.load_state_dict(before)
    samples = trainer.scored.samples[:4]
    assert len({len(sample.completion_ids) for sample in samples}) > 1
    group = [
        (sample.reward, [*enumerate(norms_of_full_logits(trainer.model, sample, kept=bool(options)).tolist())])
        for sample in samples
    ]
    expected = by_hand(group, zero_tail=estimator.startswith("tir"))
    (part,) = captured.parts
    assert len(part.cu_seqlens) == 5
    norms = part.advantages[:, 0].split(part.cu_seqlens.diff().tolist())
    by_tokens = {tuple(sample.completion_ids): one for sample, one in zip(samples, expected, strict=True)}
    targets = part.targets.split(part.cu_seqlens.diff().tolist())
    for ids, values in zip(targets, norms, strict=True):
        assert values.tolist() == pytest.approx(by_tokens[tuple(ids.tolist())], abs=1e-5)


def test_a_completion_with_the_groups_mean_reward_is_learned_from(make_trainer, monkeypatch):
    """Its advantage is 0 against the mean; that of its tokens is not, so that a middle reward is not skipped."""
    captured, rewards = Captured(monkeypatch), iter([1.0, 0.5, 0.0, 0.5])
    trainer = make_trainer(
        lambda completions, **columns: [next(rewards) for _ in completions], engine=TransformersEngine, max_steps=1,
        per_device_train_batch_size=4, num_generations=4, advantage_estimator="optimal_token_baseline",
    )  # fmt: skip
    trainer.train()
    assert [sample.advantage for sample in trainer.scored.samples] == [0.5, 0.0, -0.5, 0.0]
    assert len(captured.parts[0].cu_seqlens) == 5


def test_places_count_the_tools_tokens_or_not(make_trainer, monkeypatch):
    """Of the completions [own, own] and [own, tool, own]: the second own tokens share a place, or none."""
    from fused_grpo.trainer.collect import collector

    trainer = make_trainer(engine=TransformersEngine, max_steps=1, num_generations=4)
    fields: Any = {"prompt_ids": [5], "finish_reason": "stop", "weight_version": 0, "sampling_logprobs": None}
    group = [
        Sample(completion_ids=ids, completion_mask=mask, reward=reward, advantage=reward - 0.25, **fields)
        for ids, mask, reward in (([6, 7], [True, True], 1.0), ([6, 8, 7], [True, False, True], 0.0))
    ]
    group += [replace(group[1], completion_ids=[6, 8, 9])] * 2
    monkeypatch.setattr(collector, "token_advantages", lambda group, **options: [one.places.double() for one in group])
    places = {}
    for estimator in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        trainer.collector.args.advantage_estimator = estimator
        places[estimator] = [one.token_advantages.tolist() for one in trainer.collector._with_token_advantages(group)]
    assert places["optimal_token_baseline"] == [[0, 1], [0, 2], [0, 2], [0, 2]]
    assert places["tir_optimal_token_baseline"] == [[0, 1]] * 4


@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_norms_of_corrected_rollouts_are_known_before_the_reference_is(make_trainer, served_engine, estimator):
    trainer = make_trainer(engine=served_engine, max_steps=1, advantage_estimator=estimator, beta=0.1)
    assert trainer.train().metrics["kl"] == pytest.approx(0.0, abs=1e-6)


def test_stale_rollouts_weigh_by_the_square_of_their_correction(make_trainer, monkeypatch, served_engine):
    """Norms are multiplied by rho^2, rho = min(p / q, 3) by token."""
    trainer = make_trainer(engine=served_engine, max_steps=1, advantage_estimator="optimal_token_baseline")
    given = {}
    score_norms = trainer.learner.score_norms

    def shifted(samples):
        moved = [0.5, -0.5, 2.0]
        changed = [
            [value - moved[place % 3] for place, value in enumerate(sample.sampling_logprobs)] for sample in samples
        ]
        with_it = score_norms(
            [type(one)(**{**vars(one), "sampling_logprobs": q}) for one, q in zip(samples, changed, strict=True)]
        )
        given["plain"], given["weighed"] = score_norms(samples), with_it
        return given["plain"]

    trainer.learner.score_norms = shifted
    trainer.train()
    for plain, weighed in zip(given["plain"], given["weighed"], strict=True):
        rho = torch.tensor([0.5, -0.5, 2.0]).exp().clamp_max(3.0).repeat(len(plain))[: len(plain)]
        torch.testing.assert_close(weighed, plain * rho.square(), rtol=1e-3, atol=1e-6)


@pytest.fixture(scope="module", params=["optimal_token_baseline", "tir_optimal_token_baseline"])
def rank_updates(request, fork_server, tmp_path_factory):
    """One group of episodes on one process, and split over two."""
    ranks, options = {}, json.dumps({"advantage_estimator": request.param, "variance_report": True})
    for processes, sequences in ((1, 4), (2, 2)):
        out = tmp_path_factory.mktemp(f"of-{processes}")
        fork_server.run(SCRIPT, out, sequences, options, processes=processes, stage="libraries")
        ranks[processes] = [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in range(processes)]
    return ranks


def test_a_group_on_two_processes_makes_the_update_of_one(rank_updates):
    (one,), two = rank_updates[1], rank_updates[2]
    for name, weight in one["weights"].items():
        for rank in two:
            torch.testing.assert_close(rank["weights"][name], weight, rtol=0, atol=1e-4)  # it moved by 2e-3
    for name in ("effective_sequences", "effective_groups", "largest_group_share"):
        assert two[0]["logged"][f"gradient/{name}"] == pytest.approx(one["logged"][f"gradient/{name}"], rel=1e-4)
    assert one["logged"]["gradient/effective_groups"] == pytest.approx(1.0)
    assert 1.0 < one["logged"]["gradient/effective_sequences"] <= 4.0


def test_the_report_is_of_the_gradients_in_the_logits(make_trainer, served_engine):
    """One group of two has all of the gradient: its rewards differ, and the loss is one of tokens."""
    rewards = iter([1.0, 0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 3.0])
    trainer = make_trainer(
        lambda completions, **columns: [next(rewards) for _ in completions], engine=served_engine, max_steps=1,
        per_device_train_batch_size=8, num_generations=4, variance_report=True, loss_type="dapo",
    )  # fmt: skip
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    metrics = trainer.train().metrics
    trainer.model.load_state_dict(before)
    samples = trainer.scored.samples[:4]
    energies = [sample.advantage**2 * float(norms_of_full_logits(trainer.model, sample).sum()) for sample in samples]
    expected = sum(map(math.sqrt, energies)) ** 2 / sum(energies)
    assert metrics["gradient/effective_sequences"] == pytest.approx(expected, rel=1e-3)
    assert metrics["gradient/effective_groups"] == pytest.approx(1.0)
    assert metrics["gradient/largest_group_share"] == pytest.approx(1.0)


def test_a_step_without_a_gradient_has_a_report_of_zeros(make_trainer, served_engine):
    trainer = make_trainer(lambda completions, **columns: [1.0] * len(completions), engine=served_engine, max_steps=1,
                           variance_report=True)  # fmt: skip
    metrics = trainer.train().metrics
    assert [
        metrics[f"gradient/{name}"] for name in ("effective_sequences", "effective_groups", "largest_group_share")
    ] == [0.0] * 3
