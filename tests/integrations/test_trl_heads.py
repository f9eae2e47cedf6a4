"""What a fused head of TRL's returns under `patched()`, over the model types that TRL tests its own op with.

Per type and temperature: all fields beside TRL's, both beside full logits with the tolerance of TRL's tests, and the
gradients of all weights.
"""

import copy

import pytest
import tiny_models
import torch

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("trl", reason="TRL is not installed")

TYPES = ["cohere", "cohere2", "deepseek_v3", "gemma", "gemma2", "glm4_moe", "gpt_oss", "lfm2", "llama", "mistral"]
TYPES += ["nemotron_h", "olmo3", "phi3", "qwen2", "qwen3"]
TYPES += ["falcon_h1", "granite", "hyperclovax", "minicpm3"]  # these scale their logits, each in its own words
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def fields_of_logits(logits, labels):
    log_p = logits.log_softmax(-1)
    log_probs = log_p.gather(-1, labels[..., None])[..., 0]
    fields = [log_probs, -(log_p.exp() * log_p).sum(-1), (2 * log_p).logsumexp(-1), logits.mean(-1)]
    return dict(zip(FIELDS, [*fields, logits.argmax(-1) == labels], strict=True))


def with_fused_head(model, temperature):
    fused = copy.deepcopy(model)
    import trl.trainer.utils as trl_utils

    trl_utils.add_fused_lm_head(fused, temperature, outputs=FIELDS)
    return fused


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("model_type", TYPES)
def test_fields_and_gradients_of_a_head_are_trls(ours, model_type, temperature):
    model = tiny_models.tiny_model(model_type).eval()
    ids = torch.randint(2, tiny_models.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(9) < 3, -100)
    counts = labels[:, 1:] != -100
    logits = model(input_ids=ids).logits[:, :-1].float() / temperature
    expected = {name: x * counts for name, x in fields_of_logits(logits, ids[:, 1:]).items()}
    upstream = torch.linspace(-1, 1, 8)
    ((expected["log_probs"] + 0.1 * expected["entropy"]) * upstream).sum().backward()

    results = []
    for context in (torch.enable_grad, ours.patched):
        fused = with_fused_head(model, temperature)
        fused.zero_grad(set_to_none=True)
        with context():
            fields = fused(input_ids=ids, labels=labels, fused_lm_head=True)
            ((fields.log_probs + 0.1 * fields.entropy) * upstream).sum().backward()
        results.append((fields, {name: x.grad for name, x in fused.named_parameters()}))
    (trl_fields, trl_gradients), (our_fields, our_gradients) = results
    assert our_fields.keys() == trl_fields.keys()
    for name in FIELDS:
        torch.testing.assert_close(our_fields[name], trl_fields[name], rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(our_fields[name], expected[name], rtol=5e-3, atol=5e-3, msg=name)
    torch.testing.assert_close(our_fields.loss, trl_fields.loss)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert our_gradients[name] is None
        else:
            torch.testing.assert_close(our_gradients[name], trl_gradients[name], rtol=1e-3, atol=1e-4, msg=name)
            torch.testing.assert_close(our_gradients[name], parameter.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("model_type", ["gemma", "llama", "olmo3", "qwen3"])
def test_fields_and_gradients_in_bf16_are_no_less_exact_than_trls(ours, model_type):
    """Exact is fp64 of the same bf16 hidden states and weights; both may round the gradient to bf16."""
    model = tiny_models.tiny_model(model_type).bfloat16().eval()
    ids = torch.randint(2, tiny_models.VOCABULARY, (8, 33), generator=torch.Generator().manual_seed(0))
    hidden = model.base_model(input_ids=ids).last_hidden_state[:, :-1].detach().double()
    weight = model.get_output_embeddings().weight.detach().double().requires_grad_()
    exact = fields_of_logits(hidden @ weight.t() / 0.7, ids[:, 1:])
    (gradient,) = torch.autograd.grad(exact["log_probs"].sum(), weight)

    errors = []
    for context in (torch.enable_grad, ours.patched):
        fused = with_fused_head(model, 0.7)
        with context():
            fields = fused(input_ids=ids, labels=ids, fused_lm_head=True)
            head = fused.get_output_embeddings().weight
            (grad,) = torch.autograd.grad(fields.log_probs.sum(), head)
        errors.append([(fields[name].double() - exact[name].double()).abs().mean() for name in FIELDS])
        errors[-1].append((grad.double() - gradient).abs().mean())
    for name, trl_error, our_error in zip([*FIELDS, "gradient"], *errors, strict=True):
        assert our_error <= 1.05 * trl_error + 1e-6, name
