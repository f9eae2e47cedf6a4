"""The code of docs/integrations/openrlhf.md, as it stands there, beside what OpenRLHF does with the logits."""

import re
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations" / "openrlhf.md"
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
V, TEMPERATURE = 97, 0.7


@pytest.fixture(scope="module")
def log_probs_from_hidden():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names["log_probs_from_hidden"]


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, **SIZES)).double()


def batch(*, packed: bool) -> dict[str, torch.Tensor]:
    """What `Actor.forward` gives the model: padded with a mask, or one row whose positions start again."""
    ids = torch.randint(0, V, (1, 14) if packed else (3, 8))
    if packed:
        return {"input_ids": ids, "position_ids": torch.cat([torch.arange(5), torch.arange(9)])[None]}
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)}


def from_logits(model, labels, temperature, **inputs):
    """`Actor.forward`, `log_probs_from_logits` and `compute_entropy` of OpenRLHF 0.11.2, but for the cast to fp32."""
    logits = model(**inputs)["logits"].clone().div_(temperature)
    logprobs = logits.gather(-1, labels[..., None])[..., 0] - logits.logsumexp(-1)
    return None, logprobs, logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


@pytest.mark.parametrize("packed", [False, True])
def test_log_probs_entropy_and_gradients_are_those_of_the_logits(log_probs_from_hidden, model, packed):
    inputs, results = batch(packed=packed), []
    labels = torch.roll(inputs["input_ids"], shifts=-1, dims=1)
    g, g_entropy = torch.randn(2, *labels.shape, dtype=torch.float64)
    for function in (log_probs_from_hidden, from_logits):
        model.zero_grad()
        _, logprobs, entropy = function(model, labels, TEMPERATURE, **inputs)
        torch.autograd.backward([logprobs, entropy], [g, g_entropy])
        results.append([logprobs, entropy, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_the_head_is_itself_again_also_after_an_error(log_probs_from_hidden, model):
    inputs = batch(packed=False)
    with pytest.raises(ValueError, match="targets"):
        log_probs_from_hidden(model, torch.zeros(1, 1), **inputs)
    assert "forward" not in vars(model.lm_head)
    assert model(**inputs).logits.shape == (3, 8, V)


def test_logits_changed_after_the_head_are_refused(log_probs_from_hidden):
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=V, num_key_value_heads=1, head_dim=16, **SIZES))
    inputs = batch(packed=False)
    with pytest.raises(NotImplementedError, match="changes its logits after the head"):
        log_probs_from_hidden(model, inputs["input_ids"], **inputs)


def test_a_head_with_an_adapter_is_refused(log_probs_from_hidden, model):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "lm_head"]))
    inputs = batch(packed=False)
    with pytest.raises(NotImplementedError, match="the head is a"):
        log_probs_from_hidden(adapted, inputs["input_ids"], **inputs)


def test_a_head_with_a_forward_of_its_own_keeps_it(log_probs_from_hidden, model):
    """As those of Accelerate's hooks have."""
    model.lm_head.forward = own = model.lm_head.forward
    with pytest.raises(NotImplementedError, match="the head is a Linear"):
        log_probs_from_hidden(
            model, torch.zeros(1, 3, dtype=torch.int64), input_ids=torch.ones(1, 3, dtype=torch.int64)
        )
    assert vars(model.lm_head)["forward"] is own
