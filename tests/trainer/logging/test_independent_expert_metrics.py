"""The load of a mixture's experts and their disagreement with the sampler's, in metrics.jsonl, are what docs/ say."""

import copy
import json
from dataclasses import replace
from typing import Any

import independent_term_metrics as independent
import pytest
from mixtures import K, experts_of, mixture
from watched_steps import BASE, reward, watched


@pytest.fixture
def make_model():
    return lambda seed=0: mixture("Qwen3Moe", seed=seed)


def routing_engine(base):
    class RoutingEngine(base):
        """Says which experts it computed with: those of the weights it was given first."""

        def __init__(self, model, tokenizer):
            super().__init__(model, tokenizer)
            self.first = copy.deepcopy(model)

        def load_weights(self, named_weights, version):
            list(named_weights)  # it computes with the policy itself
            self.weight_version = version

        def generate(self, prompt_ids, sampling):
            made = super().generate(prompt_ids, sampling)
            pairs = [(prompt_ids[place // sampling.n], ids) for place, ids in enumerate(made.completion_ids)]
            return replace(made, routed_experts=[experts_of(self.first, *pair) for pair in pairs])

    return RoutingEngine


MIXTURES: dict[str, dict[str, Any]] = {
    "one micro-batch": {"share_prompts": False},
    "two micro-batches": {"share_prompts": False, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "completions without an advantage": {"share_prompts": False, "router_aux_loss_coef": 0.0},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_metrics_of_experts_are_their_definitions(make_trainer, served_engine, name):
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "router_aux_loss_coef": 0.05}
    options |= {"learning_rate": 0.05, "steps_per_generation": 2} | MIXTURES[name]
    trainer = make_trainer(reward, engine=routing_engine(served_engine.__mro__[1]), **BASE | options)
    steps, cuts = watched(trainer), watched_cuts(trainer)
    trainer.train()
    lines = (trainer.output_dir / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    changed = False
    for (batch, policy, _), cut, record in zip(steps, cuts, records, strict=True):
        policy = policy.float()  # the weights are those of fp32, and experts are computed in no wider type
        ids = [sample.prompt_ids + sample.completion_ids for sample in batch]
        places = sorted(number for part in cut for number in part)
        assert places == [number for number, sample in enumerate(batch) if not sample.skipped]
        wanted = independent.disagreement(
            policy, [ids[n] for n in places], [batch[n].routed_experts for n in places], K
        )
        assert record["sampling/routing_disagreement"] == pytest.approx(wanted, rel=1e-6)
        changed = changed or wanted > 0
        if options["router_aux_loss_coef"]:
            losses = [independent.load_loss(policy, [ids[number] for number in part], K) for part in cut]
            assert record["aux_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        else:
            assert "aux_loss" not in record
    assert changed


def watched_cuts(trainer):
    """Of each step, the numbers of the sequences of its micro-batches."""
    learn, pack, cuts, newest = trainer.learner.learn, trainer.learner._pack, [], []

    def packing(batch):
        newest[:] = pack(batch)
        return list(newest)

    def learning(batch, **options):
        result = learn(batch, **options)
        cuts.append([sorted(part.sequence_index.tolist()) for part in newest])
        return result

    trainer.learner.learn, trainer.learner._pack = learning, packing
    return cuts
