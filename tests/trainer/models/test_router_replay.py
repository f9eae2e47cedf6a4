"""Experts that the sampler chose: the log-probs and gradients of a model that is forced to them in other ways."""

import copy
import dataclasses
from contextlib import nullcontext

import pytest
import torch
from batches import batch_of
from mixtures import EXPERTS, FAMILIES, GROUPS, HEADS, LAYERS, K, experts_of, hooked, mixture, routers
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from transformers import Qwen2Config, Qwen2ForCausalLM

from fused_grpo import GRPOLossConfig
from fused_grpo.errors import UnavailableError, UnsupportedError
from fused_grpo.integrations.model_modes import checkpoint_activations
from fused_grpo.trainer.batching.micro_batches import Packing, micro_batches
from fused_grpo.trainer.batching.rollout_buffer import as_tensors, from_tensors
from fused_grpo.trainer.models.router_replay import ROUTING, RouterReplay
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.self_check import self_check

IDS = [[2, 3, 4, 5], [7, 8], [2, 3, 4, 5]], [[6, 7, 1], [9, 10, 11, 12, 13], [8, 1]]
CPU = torch.device("cpu")
ROWS = {
    "one row": {"sequences": 3, "one_row": True},
    "each alone": {"sequences": 1, "one_row": False},
    "rows of 9": {"sequences": 3, "one_row": False, "max_tokens": 9},
    "a shared prompt": {"sequences": 3, "one_row": False, "share_prompts": True, "max_tokens": 20},
    "padded": {"sequences": 3, "one_row": False, "share_rows": False},
}
# Layers with a window and sinks keep no sequences apart.
CASES = [(name, rows) for name in FAMILIES for rows in (["padded"] if name == "GptOss" else ROWS)]


def policy_of(model, *, replaces=True):
    return PolicyLoss(model, GRPOLossConfig(), temperature=1.0, routing=RouterReplay(model, replaces=replaces))


def batch_with(experts):
    count = len(IDS[0])
    return batch_of(prompt_ids=IDS[0], completion_ids=IDS[1], advantage=torch.ones(count), routed_experts=experts)


def packed(batch, sequences=1, one_row=False, replays=True, **options):
    packing = Packing(sequences=sequences, one_row=one_row, replays=replays, **options)
    return micro_batches(batch, packing, device=CPU)


def logprobs_of(policy, parts, batch):
    """Of each sample, in the order of the batch; with a gradient."""
    by_sequence = {}
    for part in parts:
        pieces = policy(part, "logprobs").split(part.cu_seqlens.diff().tolist())
        by_sequence |= dict(zip(part.sequence_index.tolist(), pieces, strict=True))
    return torch.cat([by_sequence[index] for index in range(len(batch))])


def weights_at(name, router, hidden, experts):
    """What a router says of these experts [T, k], written down from the models' papers."""
    logits = hidden.flatten(0, -2) @ router.weight.T + getattr(router, "bias", 0.0)
    if name == "DeepseekV3":
        scores = logits.sigmoid().gather(1, experts)
        return scores / (scores.sum(1, keepdim=True) + 1e-20) * 1.5
    if name == "Olmoe":
        return logits.softmax(1).gather(1, experts)
    return logits.gather(1, experts).softmax(1)  # the same as the share of k probabilities


def forced(model, name, batch):
    """Log-probs of full logits, one sequence after the other, with routers whose output is replaced."""
    logprobs_of_samples, table = [], None

    def force(layer, router, inputs, output):
        own = table[:, layer].long()
        return output[0], weights_at(name, router, inputs[0], own), own

    handles = hooked(model, force)
    for sample in batch:
        table = sample.routed_experts
        ids = torch.tensor([*sample.prompt_ids, *sample.completion_ids])
        logprobs = model(ids[None, :-1]).logits[0].log_softmax(1)
        logprobs_of_samples.append(logprobs.gather(1, ids[1:, None])[len(sample.prompt_ids) - 1 :, 0])
    for handle in handles:
        handle.remove()
    return torch.cat(logprobs_of_samples)


def recorded(model):
    return [experts_of(model, *each) for each in zip(*IDS, strict=True)]


def perturbed(model):
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for router in routers(other).values():
        router.weight.data.add_(torch.randn(router.weight.shape, generator=generator), alpha=0.3)
    return other


@pytest.mark.parametrize("name", FAMILIES)
def test_a_models_own_experts_change_no_bit_and_others_all(name):
    model = mixture(name)
    policy, own = policy_of(model), recorded(model)
    self_check(policy)
    with_own, others = batch_with(own), batch_with([(one + 1) % EXPERTS for one in own])
    (part,), (other,) = (packed(batch, 3, share_rows=False) for batch in (with_own, others))
    alone = policy.measure(dataclasses.replace(part, routed_experts=None), "logprobs")
    assert torch.equal(policy.measure(part, "logprobs"), alone)
    assert (policy.measure(other, "logprobs") - alone).abs().min() > 1e-3
    counting = policy_of(model, replaces=False)
    assert torch.equal(counting.measure(other, "logprobs"), alone)
    tokens = sum(map(len, own)) * len(routers(model))
    assert counting.routing.counts()[ROUTING].tolist() == [tokens, tokens]  # where others are chosen, of all


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_logprobs_and_gradients_are_those_of_forced_routers(name, rows):
    model = mixture(name).double()
    model.set_experts_implementation("eager")  # no other has fp64
    others = [*recorded(perturbed(model))[:2], None]
    others[2] = torch.cat([others[0][:4], others[1][:1]])  # behind the same prompt, as it was routed
    batch, coefficients = batch_with(others), torch.linspace(-1, 1, 10).double()
    expected = forced(model, name, batch)
    assert not torch.allclose(forced(model, name, batch_with(recorded(model))), expected, atol=1e-3)
    (expected @ coefficients).backward()
    wanted = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    policy = policy_of(model)
    with policy.routing:
        actual = logprobs_of(policy, packed(batch, **ROWS[rows]), batch)
    (actual.double() @ coefficients).backward()
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-6)
    gradients = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    torch.testing.assert_close(gradients, wanted, rtol=1e-5, atol=1e-5)  # of up to 20, from a loss in fp32
    router = "router" if name == "GptOss" else "gate"
    assert gradients[f"model.layers.1.mlp.{router}.weight"].abs().max() > 1e-4


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_go_to_the_same_experts(reentrant):
    def gradients(model):
        model.train()
        policy, batch = policy_of(model), batch_with(recorded(perturbed(mixture("Qwen3Moe"))))
        for part in packed(batch, 3):
            with policy.routing:
                policy(part, num_tokens=10.0, num_sequences=3.0).loss.backward()
        return {key: value.grad for key, value in model.named_parameters()}

    expected, model = gradients(mixture("Qwen3Moe")), mixture("Qwen3Moe")
    checkpoint_activations(model, {"use_reentrant": reentrant})
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)


def test_prompts_that_went_to_other_experts_are_not_shared():
    options = {"one_row": False, "share_prompts": True, "max_tokens": 20}
    own = recorded(mixture("Qwen3Moe"))
    assert packed(batch_with(own), 3, **options)[0].seen_until is not None
    own[2] = own[2].clone()
    own[2][0, 0] = own[2][0, 0].flip(0)  # also in another order: the sum may round differently
    assert packed(batch_with(own), 3, **options)[0].seen_until is None
    assert packed(batch_with(own), 3, replays=False, **options)[0].seen_until is not None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_a_table_of_samples_keeps_their_experts(dtype):
    own = [one.to(dtype) for one in recorded(mixture("Qwen3Moe"))]
    back = from_tensors(as_tensors(batch_with(own)))
    for one, expected in zip(back, own, strict=True):
        assert one.routed_experts.dtype == dtype
        assert torch.equal(one.routed_experts, expected)
    assert from_tensors(as_tensors([])) == []


class Chosen(nn.Module):
    """A block whose router takes a maximum, or the topk of twice the experts."""

    def __init__(self, block, choose):
        super().__init__()
        self.experts, self.gate, self.choose = block.experts, block.gate, choose

    def forward(self, hidden):
        flat = hidden.flatten(0, 1)
        indices = self.choose(self.gate(flat)[0])
        return self.experts(flat, indices, torch.ones_like(indices, dtype=flat.dtype)).view_as(hidden)


REFUSED = {
    "a maximum": (lambda logits: logits.argmax(1, keepdim=True), "choose these by one topk"),
    "twice": (lambda logits: logits.topk(K).indices - logits.topk(1).indices * 0, "choose these by one topk"),
    "not used": (lambda logits: logits.argsort(1)[:, :K] + 0 * logits.topk(K).indices, "no effect of other experts"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_routers_that_choose_in_another_way_are_refused(kind):
    choose, message = REFUSED[kind]
    model = mixture("Qwen3Moe")
    model.model.layers[1].mlp = Chosen(model.model.layers[1].mlp, choose)
    model.model.layers[1].mlp.gate.forward = lambda flat: (flat @ model.model.layers[1].mlp.gate.weight.T,)
    with pytest.raises(UnsupportedError, match=rf"got router_replay=True and a Qwen3Moe.*{message}.*fix:"):
        self_check(policy_of(model))


@pytest.mark.parametrize(("method", "count"), [("greedy", 2), ("group_limited_greedy", 2), ("group_limited_greedy", 3)])
def test_experts_of_a_masked_group_have_to_have_weights(method, count):
    """DeepSeek-V2 takes weights from scores that are 0 in all groups but those that the trainer chooses."""
    groups = {**GROUPS, **HEADS, "n_routed_experts": EXPERTS, "n_shared_experts": 1}
    groups |= {"topk_method": method, "topk_group": count}
    refused = pytest.raises(UnsupportedError, match=r"DeepseekV2.* no effect of other experts in layer 1.*fix:")
    with nullcontext() if method == "greedy" else refused:
        self_check(policy_of(mixture("DeepseekV2", **groups)))


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("count", [1, K + 1])
def test_another_number_of_experts_of_a_token_is_refused(replaces, count):
    model = mixture("Qwen3Moe")
    part = packed(batch_with([torch.zeros(len(own), LAYERS, count).byte() for own in recorded(model)]), 3)[0]
    with pytest.raises(UnavailableError, match=rf"got {count} experts of each token .*want the {K} .*fix:"):
        policy_of(model, replaces=replaces).measure(part, "logprobs")


def test_a_router_that_chooses_in_another_way_in_training_is_refused():
    def sorts(hidden):
        weights, indices = (hidden @ gate.weight.T).softmax(1).sort(1, descending=True)
        return weights, weights[:, :K], indices[:, :K]

    model = mixture("Qwen3Moe")
    policy, part = policy_of(model), packed(batch_with(recorded(model)), 3)[0]
    gate = model.model.layers[1].mlp.gate
    own, gate.forward = gate.forward, lambda hidden: (sorts if gate.training else own)(hidden)
    self_check(policy)
    with policy.routing:
        policy.eval()(part, num_tokens=10.0, num_sequences=3.0)
    with policy.routing, pytest.raises(UnsupportedError, match=r"2 topk of scores in a step through 3 layers.*fix:"):
        policy.train()(part, num_tokens=10.0, num_sequences=3.0)


def test_one_expert_beside_two_is_not_repeated():
    first, second, third = recorded(mixture("Qwen3Moe"))
    with pytest.raises(RuntimeError, match="Expected size 2 but got size 1"):
        packed(batch_with([first, second[:, :, :1], third]), 3)


def test_an_interrupted_pass_leaves_nothing_behind():
    def interrupt(*_):
        raise KeyboardInterrupt  # behind which PyTorch runs no hooks

    model = mixture("Qwen3Moe")
    policy, part = policy_of(model), packed(batch_with(recorded(model)), 3)[0]
    model.model.layers[1].mlp.experts.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        policy.measure(part, "logprobs")
    assert _get_current_function_mode_stack() == []


def test_a_model_without_experts_is_refused():
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=22, num_hidden_layers=LAYERS, **shape))
    with pytest.raises(UnsupportedError, match="a Qwen2ForCausalLM with 0 layers with experts"):
        self_check(policy_of(model))
