"""Packed rows give the loss and the gradients of padded ones, for models of transformers, and where not, that is seen.

The padded side is what a textbook does: right-padded rows with an attention mask, full logits, log_softmax.
"""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from batches import batch_of, column
from torch import Tensor
from transformers import PreTrainedModel

from fused_grpo import GRPOLossConfig
from fused_grpo.trainer.batching.micro_batches import Packing, micro_batches
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.self_check import self_check, shared_layout
from fused_grpo.trainer.types import Sample

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
GEMMA2 = {"sliding_window": 4, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 8.0}
PACKED = {
    "Qwen2": {},
    "Qwen3": {},
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 4},
    "Gemma2": GEMMA2,
    "GPT2": {"n_embd": 32, "n_head": 2, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
# Position ids do not reach the mask of these, or there is a layer without a mask.
NOT_PACKED = {
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 2},
    "Mamba": {"state_size": 8},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
}
LAYOUTS = [
    Packing(one_row=True),
    Packing(one_row=False),
    Packing(one_row=False, share_rows=False),
    Packing(one_row=False, max_tokens=20),
    Packing(one_row=True, max_tokens=20),
]


def make(name: str, options: dict, attention: str = "eager") -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**SHAPE, **options, attn_implementation=attention)
    causal_lm = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
    if attention == "sdpa" and not causal_lm._supports_sdpa:
        pytest.skip(f"this version of transformers has no SDPA for {name}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = causal_lm(config)
        for parameter in model.parameters():  # far enough from zero that a neighbour's token would show
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


@pytest.fixture
def batch() -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    lengths = [(3, 9), (1, 1), (5, 4), (2, 2), (4, 6), (1, 3)]
    ids = [[torch.randint(2, 64, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    return batch_of(
        prompt_ids=[prompt for prompt, _ in ids],
        completion_ids=[completion for _, completion in ids],
        sampling_logprobs=None,
        advantage=torch.randn(6, generator=generator),
        old_logprobs=[-4 - 0.3 * torch.rand(n, generator=generator) for _, n in lengths],
    )


def padded_loss(model: PreTrainedModel, batch: list[Sample]) -> Tensor:
    """The mean over completion tokens of the clipped loss."""
    sequences = [torch.tensor(sample.prompt_ids + sample.completion_ids) for sample in batch]
    input_ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in sequences], batch_first=True)
    log_p = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
    losses = []
    for row, sample in enumerate(batch):
        predicts = slice(len(sample.prompt_ids) - 1, len(sample.prompt_ids + sample.completion_ids) - 1)
        logprobs = log_p[row, predicts].gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
        ratio, advantage = (logprobs - sample.old_logprobs).exp(), sample.advantage
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    return torch.cat(losses).mean()


def row_layout(model: PreTrainedModel) -> Packing:
    return shared_layout([self_check(PolicyLoss(model, GRPOLossConfig(), temperature=1.0))])


def packed_loss(model: PreTrainedModel, batch: list[Sample], layout: Packing) -> Tensor:
    policy = PolicyLoss(model, GRPOLossConfig(), temperature=1.0)
    tokens, total = float(sum(map(len, column(batch, "completion_ids")))), torch.zeros(())
    for part in micro_batches(batch, replace(layout, sequences=6), device=CPU):
        loss = policy(part, num_tokens=tokens, num_sequences=6.0).loss
        loss.backward()
        total += loss.detach()
    return total


def assert_equal(model: PreTrainedModel, batch: list[Sample], layouts: list[Packing], *, checkpointing=False) -> None:
    plain = copy.deepcopy(model)
    expected = padded_loss(plain, batch)
    expected.backward()
    whole = torch.stack([parameter.grad.norm() for parameter in plain.parameters()]).norm()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layout in layouts:
        model.zero_grad()
        torch.testing.assert_close(packed_loss(model, batch, layout), expected.detach(), rtol=1e-5, atol=1e-5)
        for (name, packed), padded in zip(model.named_parameters(), plain.parameters(), strict=True):
            # A key's bias has a gradient of zero but for rounding.
            apart = (packed.grad - padded.grad).norm() / padded.grad.norm().clamp_min(1e-2 * whole)
            assert apart <= 1e-5, (name, layout, apart)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", PACKED)
def test_loss_and_gradients_of_packed_rows_are_those_of_padded_ones(name, attention, batch):
    model = make(name, PACKED[name], attention)
    layout = row_layout(model)
    assert (layout.one_row, layout.share_rows) == (False, True)
    assert_equal(model, batch, LAYOUTS)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Qwen2", "Gemma2"])
def test_gradient_checkpointing_changes_nothing(name, attention, batch):
    assert_equal(make(name, PACKED[name], attention), batch, LAYOUTS[:2], checkpointing=True)


@pytest.mark.parametrize("name", NOT_PACKED)
def test_sequences_that_see_each_other_are_noticed_and_rows_of_one_exact(name, batch, caplog):
    model = make(name, NOT_PACKED[name])
    alone = row_layout(model)
    assert (alone.one_row, alone.share_rows) == (False, False)
    assert f"{name}ForCausalLM does not keep the sequences of a packed row apart" in caplog.text
    assert model.training
    assert_equal(model, batch, [alone, replace(alone, max_tokens=20)])
    assert abs(packed_loss(model, batch, Packing(one_row=True)) - padded_loss(model, batch).detach()) > 1e-4


def test_a_model_for_another_machines_attention_is_tried_with_eager():
    model = make("Qwen2", {})
    model.config._attn_implementation = "flash_attention_2"
    assert row_layout(model) == Packing(one_row=True, share_rows=True, share_prompts=False)
    assert model.config._attn_implementation == "flash_attention_2"
