"""The ops against torch.nn.functional and autograd, written out here: nothing of ours is trusted to judge ours."""

from contextlib import nullcontext

import pytest
import torch
from batches import batch_of
from device_under_test import DEVICE, assert_rounded, rounds
from torch.nn.functional import linear

from fused_grpo import (
    Distillation,
    GRPOLossConfig,
    fused_linear_divergence,
    fused_linear_grpo_loss,
    grpo_loss,
    linear_logprobs,
)
from fused_grpo.errors import InputError
from fused_grpo.passes import buffers

IMPLS = ["torch", "triton", "reference"]
FAST = ["torch", "triton"]


@pytest.fixture
def inputs():
    """hidden [2, 3, D], weight, bias, targets [2, 3] with the last token id and an ignored row."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((2, 3, 8), (11, 8), (11,)))
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    return leaves, torch.tensor([[10, -100, 4], [0, 10, 7]])


@pytest.fixture
def update():
    """What the loss of these tokens needs besides: two sequences of three."""
    old = -1.0 - torch.rand(2, 3, generator=torch.Generator().manual_seed(1))
    return {"advantages": torch.tensor([1.5, -0.5]), "old_logprobs": old}


def textbook_logprobs(leaves, targets, *, temperature=1.0):
    hidden, weight, bias = leaves
    logits = linear(hidden, weight, bias) / torch.as_tensor(temperature).expand(targets.shape)[..., None]
    picked = logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    return torch.where(targets == -100, 0.0, picked)


def textbook_loss(leaves, targets, *, advantages, old_logprobs):
    """Mean over the tokens that are not ignored."""
    ratio, A = torch.exp(textbook_logprobs(leaves, targets) - old_logprobs), advantages[:, None]
    per_token = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
    return per_token[targets != -100].mean()


def fused(leaves, targets, **options):
    hidden, weight, bias = leaves
    return fused_linear_grpo_loss(hidden, weight, targets, bias=bias, **options)


def assert_close(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_logprobs_of_three_dimensions_with_a_temperature_per_token(inputs, impl):
    leaves, targets = inputs
    temperature = torch.tensor([[0.5, 1.0, 2.0], [0.7, 1.3, 3.0]])
    upstream = torch.arange(1.0, 7.0).view(2, 3)
    expected = textbook_logprobs(leaves, targets, temperature=temperature)
    gradients = torch.autograd.grad(expected, leaves, upstream)
    hidden, weight, bias = leaves
    ours = linear_logprobs(hidden, weight, targets, bias=bias, temperature=temperature, impl=impl)
    assert_close([ours, *torch.autograd.grad(ours, leaves, upstream)], [expected, *gradients])


@pytest.mark.parametrize("impl", IMPLS)
def test_the_fused_loss_is_linear_log_softmax_gather_and_autograd(inputs, update, impl):
    leaves, targets = inputs
    expected = textbook_loss(leaves, targets, **update)
    ours = fused(leaves, targets, **update, impl=impl)
    assert_close(
        [ours.loss, *torch.autograd.grad(ours.loss, leaves)], [expected, *torch.autograd.grad(expected, leaves)]
    )
    assert_close([ours.logprobs], [textbook_logprobs(leaves, targets).detach()])


@pytest.mark.parametrize("impl", IMPLS)
def test_ignored_rows_give_zero_and_no_gradient(inputs, update, impl):
    leaves, targets = inputs
    hidden, weight, bias = leaves
    logprobs = linear_logprobs(hidden, weight, targets, bias=bias, impl=impl)
    output = fused(leaves, targets, **update, impl=impl)
    assert logprobs[0, 1] == output.logprobs[0, 1] == 0
    for result in (logprobs.sum(), output.loss):
        (gradient,) = torch.autograd.grad(result, hidden)
        assert (gradient[0, 1] == 0).all()
        assert gradient[0, 0].abs().max() > 0


@pytest.mark.parametrize("value", [torch.nan, 0.0, -1.0])
@pytest.mark.parametrize("impl", IMPLS)
def test_rows_that_do_not_count_may_have_any_temperature(inputs, update, impl, value):
    leaves, targets = inputs
    (hidden, weight, _), mask = leaves, torch.tensor([[1, 1, 1], [0, 1, 1]])

    def losses(unread):
        ignored = torch.tensor([[0.5, unread, 0.7], [0.5, 0.5, 0.5]])
        masked = torch.where(mask == 0, unread, ignored)
        for several in (targets, targets[..., None].repeat(1, 1, 2)):
            yield linear_logprobs(hidden, weight, several, temperature=ignored, impl=impl).sum()
        for teacher in (None, Distillation(hidden.detach() + 1, weight.detach(), coef=0.1)):
            given = {"temperature": masked, "mask": mask, "distillation": teacher, "impl": impl}
            yield fused(leaves, targets, **update, **given).loss
        both, other = (hidden, weight), (hidden.detach() + 1, weight.detach())
        given = {"temperature": masked, "mask": mask * (targets != -100), "impl": impl}
        yield fused_linear_divergence(*both, *other, **given).loss

    for ours, expected in zip(losses(value), losses(1.0), strict=True):
        for one, other in zip(*(torch.autograd.grad(loss, leaves[:2]) for loss in (ours, expected)), strict=True):
            assert torch.equal(one, other)


def test_targets_of_another_shape_with_as_many_tokens_are_refused(inputs, update):
    (hidden, weight, _), targets = inputs
    for shape in ((3, 2), (6,), (1, 2, 3)):
        with pytest.raises(InputError, match="one per row of hidden"):
            linear_logprobs(hidden, weight, targets.reshape(shape))
        with pytest.raises(InputError, match="one per row of hidden"):
            fused_linear_grpo_loss(hidden, weight, targets.reshape(shape), **update)


@pytest.mark.parametrize("impl", ["unfused", *IMPLS])
def test_an_empty_sequence_counts_among_the_sequences(inputs, impl):
    leaves, _ = inputs
    targets, hidden = torch.tensor([10, 3, 5, 1, 0, 2]), leaves[0].flatten(0, 1)
    layout = {"cu_seqlens": torch.tensor([0, 2, 2, 6]), "advantages": torch.tensor([1.0, 9.0, 3.0])}
    config = GRPOLossConfig(loss_type="grpo")
    if impl == "unfused":
        loss = grpo_loss(textbook_logprobs([hidden, *leaves[1:]], targets), **layout, config=config).loss
    else:
        loss = fused([hidden, *leaves[1:]], targets, **layout, config=config, impl=impl).loss
    # On policy a token costs -A: the means are -1, nothing, -3.
    assert loss.item() == pytest.approx(-4 / 3)


@pytest.mark.parametrize("impl", ["unfused", *IMPLS])
def test_what_was_recorded_gets_no_gradient(inputs, update, impl):
    leaves, targets = inputs
    recorded = {**update, "ref_logprobs": update["old_logprobs"] - 0.1}
    recorded["sampling_logprobs"] = update["old_logprobs"] + 0.1
    recorded = {name: x.clone().requires_grad_() for name, x in recorded.items()}
    config = GRPOLossConfig(beta=0.1)
    if impl == "unfused":
        grpo_loss(textbook_logprobs(leaves, targets), **recorded, config=config).loss.backward()
    else:
        fused(leaves, targets, **recorded, config=config, impl=impl).loss.backward()
    assert all(x.grad is None for x in recorded.values())
    assert all(x.grad.abs().max() > 0 for x in leaves)


@pytest.mark.parametrize("impl", IMPLS)
def test_two_backward_passes_add_up_what_came_from_upstream(inputs, update, impl):
    leaves, targets = inputs
    expected = torch.autograd.grad(textbook_loss(leaves, targets, **update), leaves)
    loss = fused(leaves, targets, **update, impl=impl).loss
    loss.backward(torch.tensor(2.0), retain_graph=True)
    assert_close([x.grad for x in leaves], [2 * x for x in expected])
    loss.backward(torch.tensor(-5.0))
    assert_close([x.grad for x in leaves], [-3 * x for x in expected])


@pytest.mark.parametrize(
    ("op", "frozen", "expected"),
    [
        ("logprobs", False, ["logits", "logits", "hidden", "weight"]),
        ("logprobs", True, ["logits", "hidden"]),
        ("loss", False, ["logits", "hidden", "weight"]),
        ("loss", True, ["logits", "hidden"]),
    ],
)
def test_each_op_multiplies_no_more_than_it_must(inputs, update, gemms, op, frozen, expected):
    (hidden, weight, _), targets = inputs
    weight.requires_grad_(not frozen)
    if op == "logprobs":
        linear_logprobs(hidden, weight, targets, impl="torch").sum().backward()
    else:
        fused_linear_grpo_loss(hidden, weight, targets, **update, impl="torch").loss.backward()
    assert [what for what, _ in gemms] == expected
    assert (weight.grad is None) == frozen


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd_no_gradient_is_computed(inputs, update, gemms, impl, mode):
    leaves, targets = inputs
    hidden, weight, bias = leaves
    with mode():
        output = fused(leaves, targets, **update, impl=impl)
        logprobs = linear_logprobs(hidden, weight, targets, bias=bias, impl=impl)
    assert {what for what, _ in gemms} <= {"logits"}
    assert not output.loss.requires_grad
    assert not logprobs.requires_grad
    expected = textbook_logprobs(leaves, targets)
    assert_close([output.loss, logprobs], [textbook_loss(leaves, targets, **update).detach(), expected.detach()])


# torch's own backward passes, which are the reference's, do round where backward() is called under autocast.
@pytest.mark.parametrize(
    ("impl", "backward_inside"), [*((impl, True) for impl in FAST), *((impl, False) for impl in IMPLS)]
)
def test_autocast_casts_inputs_as_a_linear_layer_does_and_nothing_else(inputs, update, impl, backward_inside):
    leaves, targets = inputs
    hidden, weight, bias = leaves

    def run(*, autocast):
        def context(on):
            return torch.autocast(DEVICE.type, dtype=torch.float16) if on else nullcontext()

        first = hidden if autocast else hidden.half()
        with context(autocast):
            loss = fused([first, weight, bias], targets, **update, impl=impl).loss
            logprobs = linear_logprobs(first, weight, targets, bias=bias, impl=impl)
        with context(autocast and backward_inside):
            gradients = [torch.autograd.grad(x, leaves) for x in (loss, logprobs.square().sum())]
        return [loss, logprobs, *gradients[0], *gradients[1]]

    for plain, cast in zip(run(autocast=False), run(autocast=True), strict=True):
        assert plain.dtype == cast.dtype == torch.float32
        assert torch.equal(plain, cast)


@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
def test_a_master_weight_is_rounded_once_and_its_gradient_never(inputs, impl):
    (hidden, weight, bias), targets = inputs
    ours = linear_logprobs(hidden.bfloat16(), weight, targets, bias=bias, impl=impl)
    rounded = [x.detach().bfloat16().double().requires_grad_() for x in (hidden, weight)]
    exact = textbook_logprobs([*rounded, bias.double()], targets)
    assert_close([ours.double()], [exact])
    (gradient,) = torch.autograd.grad(ours.square().sum(), weight)
    (expected_gradient,) = torch.autograd.grad(exact.square().sum(), rounded[1])
    if impl != "reference" and rounds(torch.bfloat16):
        assert_rounded(gradient, expected_gradient, dtype=torch.bfloat16, what="weight")
    else:
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.cpu_only(reason="it computes sizes, and asks no op")
def test_a_tile_of_logits_is_256_mib_unless_told_otherwise():
    both_sizes = (buffers.Sizes(8192, columns, torch.device("cuda"), 4) for columns in (8192, 16384))
    assert [buffers.tile_shape(sizes) for sizes in both_sizes] == [(8192, 8192), (8192, 8192)]


SHAPE = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


@pytest.mark.cpu_only(reason="the trainer calls the ops, of a model that is on the CPU")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 16}),
        ("Granite", {"logits_scaling": 0.3}),
        ("Cohere", {"logit_scale": 3.0}),
        ("Qwen2", {"tie_word_embeddings": False}),
    ],
)
def test_the_models_own_logits_are_those_of_the_policy(family, options):
    import transformers

    from fused_grpo.trainer.batching.micro_batches import Packing, pack
    from fused_grpo.trainer.policy import PolicyLoss

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    if family == "Qwen2":
        model.set_output_embeddings(torch.nn.Linear(32, 24, bias=True).double())
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    prompt, completion = [3, 5, 7], [23, 4, 9, 1]
    batch = batch_of(prompt_ids=[prompt], completion_ids=[completion], sampling_logprobs=[[0.0] * 4], advantage=[1.0])
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.8
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].detach()
    micro_batch = pack(batch, [[0]], Packing(one_row=False), device=torch.device("cpu"))
    policy = PolicyLoss(model, GRPOLossConfig(), temperature=0.8)
    torch.testing.assert_close(policy.measure(micro_batch, "logprobs"), expected, rtol=0, atol=1e-10)
    loss_logprobs = policy(micro_batch, num_tokens=4, num_sequences=1).logprobs
    torch.testing.assert_close(loss_logprobs, expected, rtol=0, atol=1e-10)
