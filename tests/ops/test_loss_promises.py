"""What the fused loss promises beside its value: work left out, gradients added up, and nothing lost in bad company."""

import pytest
import torch

from fused_grpo import GRPOLossConfig, fused_linear_divergence, fused_linear_grpo_loss, grpo_loss, linear_logprobs
from fused_grpo.config import CORRECTIONS, LOSS_TYPES
from fused_grpo.head import chunked_loss, logprob_plans, registered_ops

pytestmark = pytest.mark.grid

B, T, D, V = 4, 6, 5, 11
IMPLS = ["reference", "torch", "triton"]
FAST = ["torch", "triton"]


@pytest.fixture
def leaves():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in ((B, T, D), (V, D))]


@pytest.fixture
def rest(leaves):
    generator, targets = torch.Generator().manual_seed(1), torch.arange(B * T).view(B, T) % V
    near = linear_logprobs(leaves[0], leaves[1], targets, impl="reference").detach()
    old, ref = (near + 0.3 * torch.randn(B, T, generator=generator) for _ in range(2))
    return {"targets": targets, "advantages": torch.tensor([1.0, -2.0, 0.5, 0.5]), "old_logprobs": old, "ref": ref}


def rows_of(gemms, what):
    return sum(rows for name, rows in gemms if name == what)


def run(leaves, rest, **options):
    given = {name: x for name, x in rest.items() if name != "ref"}
    return fused_linear_grpo_loss(*leaves, **(given | options))


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize(
    ("options", "scored", "graded"),
    [
        ({}, 24, 24),
        ({"mask": torch.arange(T).expand(B, T) < 4}, 16, 16),
        ({"advantages": torch.tensor([1.0, 0.0, 0.0, -1.0])}, 24, 12),
        ({"advantages": torch.tensor([1.0, 0.0, 0.0, -1.0]), "score": "needed"}, 12, 12),
        ({"advantages": torch.zeros(B), "score": "needed"}, 0, 0),
        ({"advantages": torch.zeros(B), "config": GRPOLossConfig(entropy_coef=0.1), "score": "needed"}, 24, 24),
    ],
)
def test_rows_without_a_gradient_take_no_part(leaves, rest, gemms, impl, options, scored, graded):
    out = run(leaves, rest, impl=impl, old_logprobs=None, **options)
    assert (rows_of(gemms, "logits"), rows_of(gemms, "hidden")) == (scored, graded)
    zero = out.metrics["loss_tokens"] * out.metrics["zero_gradient_fraction"]
    assert out.metrics["loss_tokens"] - zero == graded


@pytest.mark.parametrize("score", ["all", "needed"])
def test_half_the_sequences_left_out_changes_gradients_by_rounding_alone(monkeypatch, score):
    """3e-7 of its length: other rows share a chunk, so blocks, shifts and orders of sums are others."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((8, 64, 128), (8003, 128)))
    targets = torch.randint(0, 8003, (8, 64), generator=generator)
    advantages = torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0, 0.5, 0.0, -0.7])

    def gradients(**options):
        leaves = [hidden.clone().requires_grad_(), (weight / 5).requires_grad_()]
        given = {"advantages": advantages, "chunk_bytes": 12 * 2**20, "entropy": False, **options}
        out = fused_linear_grpo_loss(*leaves, targets, **given, impl="torch")
        out.loss.backward()
        return [leaf.grad for leaf in leaves]

    left_out = gradients(score=score)
    monkeypatch.setattr(chunked_loss, "rows_to_score", lambda inputs, *_, **options: (inputs, None, 8 * 64))
    for ours, whole in zip(left_out, gradients(), strict=True):
        assert (ours - whole).double().norm() <= 3e-7 * whole.double().norm()


@pytest.mark.parametrize("impl", FAST)
def test_clipped_and_corrected_away_rows_have_a_gradient_of_exactly_zero(leaves, rest, gemms, impl):
    config = GRPOLossConfig(epsilon=0.1, sampling_correction="token_mask", sampling_clip_max=1.1)
    out = run(leaves, rest, impl=impl, config=config, sampling_logprobs=rest["ref"])
    out.loss.backward()
    fraction = out.metrics["zero_gradient_fraction"]
    assert 0.2 < fraction < 0.9
    # To find them would cost a GPU a wait for every chunk: they are multiplied by 0.
    assert (rows_of(gemms, "logits"), rows_of(gemms, "hidden")) == (24, 24)
    assert (leaves[0].grad == 0).all(-1).sum() == round(24 * fraction.item())


@pytest.mark.cpu_only(reason="the budgets are those of a CPU")
@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize(("rows", "recomputed"), [(24, 0), (8, 16), (7, 18)])
def test_two_phases_recompute_what_the_budget_cannot_hold(leaves, rest, gemms, impl, rows, recomputed):
    config = GRPOLossConfig(importance_sampling_level="sequence", epsilon=1.0)
    # Of a small budget on a CPU a third goes to the logits, and to what a row needs beside them.
    out = run(leaves, rest, impl=impl, config=config, chunk_bytes=3 * 4 * (V + D) * rows)
    assert rows_of(gemms, "logits") == 24 + recomputed
    assert out.metrics["recomputed_fraction"].item() == pytest.approx(recomputed / 24)


@pytest.mark.parametrize("impl", FAST)
def test_rows_that_no_phase_multiplies_have_a_gradient_of_0(leaves, rest, monkeypatch, impl):
    """A clipped sequence in a chunk that is not recomputed: nothing writes its dH, and new memory holds anything."""
    unwritten = torch.empty_like

    def of_nan(*like, **options):
        memory = unwritten(*like, **options)
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty_like", of_nan)
    rest["old_logprobs"][0] -= 2.0  # a ratio of e^2, and an advantage above 0
    config = GRPOLossConfig(importance_sampling_level="sequence", epsilon=0.5)
    run(leaves, rest, impl=impl, config=config, chunk_bytes=3 * 4 * (V + D) * 7).loss.backward()
    assert (leaves[0].grad[0] == 0).all()
    assert (leaves[0].grad[1:] != 0).any(-1).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_on_policy_the_value_is_the_kl_and_the_gradient_is_the_policys(leaves, rest, impl):
    """A group's advantages cancel in the value, where every ratio is 1; in the gradient they are all that there is."""
    config, advantages = GRPOLossConfig(beta=0.3), torch.tensor([1.0, -2.0, 0.5, 0.5])
    on_policy = rest | {"advantages": advantages, "old_logprobs": None}
    out = run(leaves, on_policy, impl=impl, config=config, ref_logprobs=rest["ref"])
    torch.testing.assert_close(out.loss.detach(), 0.3 * out.metrics["kl"])
    logprobs = linear_logprobs(*leaves, rest["targets"], impl="reference")
    q = rest["ref"] - logprobs
    kl = torch.exp(q) - q - 1
    # The corrected KL carries the ratio's gradient, which at ratio 1 is the KL times that of log p.
    textbook = (-advantages[:, None] * logprobs + 0.3 * (kl + kl.detach() * logprobs)).mean()
    for ours, wanted in zip(torch.autograd.grad(out.loss, leaves), torch.autograd.grad(textbook, leaves), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_group_cut_over_several_backward_calls_is_the_group(leaves, rest, assert_as_exact, impl):
    wide = [x.detach().double().requires_grad_() for x in leaves]
    plain, exact = (torch.autograd.grad(run(x, rest, impl="reference").loss, x) for x in (leaves, wide))
    for cut in (slice(0, 1), slice(1, 3), slice(3, 4)):
        part = {name: x[cut] for name, x in rest.items()}
        run([leaves[0][cut], leaves[1]], part, impl=impl, num_tokens=B * T).loss.backward()
    for leaf, *wanted in zip(leaves, plain, exact, strict=True):
        assert_as_exact(leaf.grad, *wanted, what=str(tuple(leaf.shape)))


@pytest.mark.cpu_only(reason="what is added to is a copy there; tests/gpu adds to a main gradient of a GPU")
@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dw_goes_to_a_main_gradient_unrounded_and_scaled(leaves, rest, impl, dtype):
    narrow = [x.detach().to(dtype).requires_grad_() for x in leaves]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    (wanted,) = torch.autograd.grad(2.5 * run(wide, rest, impl="reference").loss, wide[1])
    main = torch.ones(V, D)
    (2.5 * run(narrow, rest, impl=impl, weight_main_grad=main).loss).backward()
    assert narrow[1].grad is None
    assert narrow[0].grad.abs().max() > 0
    torch.testing.assert_close(main - 1, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.cpu_only(reason="what is added to is a copy there; tests/gpu adds to a main gradient of a GPU")
@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_main_gradient_gets_dw_where_a_backward_pass_asks_for_it_alone(leaves, rest, is_leaf):
    """A caller may look at the gradient of the hidden states before, or compute both one after the other."""
    teacher = [leaf.detach() / 2 for leaf in leaves]
    for op in (
        lambda heads, main: run(heads, rest, weight_main_grad=main),
        lambda heads, main: fused_linear_divergence(*heads, *teacher, weight_main_grad=main),
    ):
        main, wanted = torch.zeros(V, D), torch.zeros(V, D)
        op(leaves, wanted).loss.backward()
        assert wanted.any()
        heads = leaves if is_leaf else [leaf * 1 for leaf in leaves]
        loss = op(heads, main).loss
        torch.autograd.grad(loss, leaves[0], retain_graph=True)
        loss.backward(inputs=[leaves[0]], retain_graph=True)
        assert not main.any()
        loss.backward(inputs=[leaves[1]], retain_graph=True)
        assert torch.equal(main, wanted)
        torch.autograd.grad(loss, heads[1], allow_unused=True)
        assert torch.equal(main, wanted * 2)


@pytest.mark.parametrize("impl", FAST)
def test_the_entropy_is_measured_unless_told_otherwise(leaves, rest, assert_as_exact, impl):
    with_it, without = (run(leaves, rest, impl=impl, entropy=asked) for asked in (True, False))
    assert with_it.metrics.keys() - without.metrics.keys() == {"entropy"}
    if impl == "triton":
        assert torch.equal(with_it.loss, without.loss)
    # On the torch path, sums that have no entropy beside them may be relative to another number.
    plain, exact = (
        run([x.to(dtype) for x in leaves], rest, impl="reference").loss for dtype in (torch.float32, torch.float64)
    )
    for output in (with_it, without):
        assert_as_exact(output.loss, plain, exact, what="loss")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("bounds", [(None, 0.8), (1.2, 3.0)])
def test_padding_is_in_no_loss_where_bounds_leave_out_a_weight_of_1(loss_type, correction, bounds):
    if loss_type in ("vespo", "dppo_tv", "dppo_kl", "ipo", "dro") and correction.startswith("sequence"):
        pytest.skip("these refuse it")
    given = {"loss_type": loss_type, "log_ratio_penalty": 0.05, "max_completion_length": 9}
    least, most = bounds
    config = GRPOLossConfig(**given, sampling_correction=correction, sampling_clip_min=least, sampling_clip_max=most)
    mask, (logprobs, old, sampling) = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]), -torch.rand(3, 2, 4)
    rows, lengths = mask != 0, torch.tensor([0, 2, 5], dtype=torch.int32)
    token_inputs = {"old_logprobs": old, "sampling_logprobs": sampling}
    options = {"advantages": torch.tensor([1.0, -1.0]), "config": config}
    padded = grpo_loss(logprobs, mask=mask, **token_inputs, **options)
    packed = {name: x[rows] for name, x in token_inputs.items()}
    torch.testing.assert_close(padded.loss, grpo_loss(logprobs[rows], cu_seqlens=lengths, **packed, **options).loss)


# NumPy, under the interpreter, warns of what this test is about.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo", "vespo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_huge_advantages_and_policies_far_apart_stay_finite(leaves, rest, impl, loss_type, level):
    config = GRPOLossConfig(loss_type=loss_type, importance_sampling_level=level)
    far = {"advantages": torch.tensor([1e3, -1e3, 1e3, -1e3])}
    logprobs = linear_logprobs(*leaves, rest["targets"]).detach()
    far["old_logprobs"] = logprobs + torch.tensor([50.0, 50.0, -50.0, -50.0])[:, None]
    far["sampling_logprobs"] = torch.where(torch.arange(T) == 2, torch.nan, logprobs)
    exact = run([x.double() for x in leaves], {**rest, **{k: x.double() for k, x in far.items()}}, config=config)
    out = run(leaves, rest | far, impl=impl, config=config)
    gradients = torch.autograd.grad(out.loss, leaves)
    torch.testing.assert_close(out.loss.double(), exact.loss, rtol=1e-3, atol=1e-3)
    assert all(x.isfinite().all() for x in gradients)
    assert all(x.isfinite() for x in out.metrics.values())


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_what_is_not_a_number_reaches_the_loss_whatever_selects(leaves, rest, impl):
    """A comparison with it is False, so that a selection would leave it out: a broken model would train on nothing."""
    corrected = {"sequence_rejection": "k3", "sequence_rejection_max": 9.0, "sampling_correction": "sequence_mask"}
    share, far = {"top_entropy_quantile": 0.5}, {"off_policy_mask_threshold": -9.0}
    hidden = leaves[0].detach().clone()
    hidden[1, 2] = torch.nan
    for options in ({}, share, far, corrected, {"clip_cov_ratio": 0.1}, share | {"kl_cov_ratio": 0.1}):
        arguments = {"config": GRPOLossConfig(**options), "impl": impl, "sampling_logprobs": rest["old_logprobs"]}
        assert run([hidden, leaves[1]], rest, **arguments).loss.isnan(), options
        if options is not share:  # which may leave out the tokens that this advantage is of
            assert run(leaves, rest, advantages=rest["advantages"].log(), **arguments).loss.isnan(), options
    arguments = {"config": GRPOLossConfig(**share), "entropy_threshold": torch.tensor(torch.nan), "impl": impl}
    assert run(leaves, rest, **arguments).loss.isnan()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_hidden_states_of_masked_tokens_may_hold_anything(leaves, rest, impl, level):
    masked, config = torch.arange(T).expand(B, T) > 3, GRPOLossConfig(importance_sampling_level=level)
    clean = run(leaves, rest, impl=impl, config=config, mask=~masked)
    hidden = leaves[0].detach().masked_fill(masked[..., None], torch.nan).requires_grad_()
    out = run([hidden, leaves[1]], rest, impl=impl, config=config, mask=~masked)
    assert torch.equal(out.loss, clean.loss)
    assert (out.logprobs[masked] == 0).all()
    dirty_gradients, clean_gradients = (
        torch.autograd.grad(x.loss, [h, leaves[1]]) for x, h in ((out, hidden), (clean, leaves[0]))
    )
    assert all(torch.equal(one, other) for one, other in zip(dirty_gradients, clean_gradients, strict=True))
    assert (dirty_gradients[0][masked] == 0).all()


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("options", [{}, {"importance_sampling_level": "sequence"}, {"entropy_coef": 0.1}], ids=str)
def test_rows_that_stay_in_place_change_nothing(leaves, rest, impl, options, monkeypatch):
    """As few rows on a GPU do, where none is counted: those that need nothing may hold anything all the same."""
    masked, config = torch.arange(T).expand(B, T) > 3, GRPOLossConfig(**options)
    hidden = leaves[0].detach().masked_fill(masked[..., None], torch.nan).requires_grad_()
    results = []
    for leaves_out in (True, False):
        for module in (chunked_loss, logprob_plans, registered_ops):
            monkeypatch.setattr(module, "leaves_out_rows", lambda tensor, leaves_out=leaves_out: leaves_out)
        loss = run([hidden, leaves[1]], rest, impl=impl, config=config, mask=~masked).loss
        targets = rest["targets"].masked_fill(masked, -100)
        logprobs = linear_logprobs(hidden, leaves[1], targets, impl=impl)
        values = [loss, (logprobs * torch.linspace(-1, 1, T)).sum()]
        results.append([values, *(torch.autograd.grad(value, [hidden, leaves[1]]) for value in values)])
    for usual, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, usual, rtol=1e-5, atol=1e-7)
    assert all((hidden_gradient[masked] == 0).all() for hidden_gradient, _ in results[1][1:])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_micro_batch_that_is_all_masked_is_a_differentiable_zero(leaves, rest, impl):
    for config in (GRPOLossConfig(), GRPOLossConfig(importance_sampling_level="sequence", top_entropy_quantile=0.5)):
        out = run(leaves, rest, impl=impl, config=config, mask=torch.zeros(B, T))
        assert out.loss == 0
        assert all((x == 0).all() for x in torch.autograd.grad(out.loss, leaves))
        assert out.metrics["loss_tokens"] == out.metrics["zero_gradient_fraction"] == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_the_loss_of_given_logprobs_sends_its_gradients_on(rest, impl):
    generator = torch.Generator().manual_seed(2)
    logprobs, entropy = (torch.rand(B, T, generator=generator).sub_(2).requires_grad_() for _ in range(2))
    given = {"advantages": rest["advantages"], "old_logprobs": rest["old_logprobs"], "entropy": entropy}
    loss = grpo_loss(logprobs, **given, config=GRPOLossConfig(entropy_coef=0.2), impl=impl).loss
    (-3 * loss).backward(retain_graph=True)
    torch.testing.assert_close(entropy.grad, torch.full((B, T), 3 * 0.2 / (B * T)))
    ratio = (logprobs - rest["old_logprobs"]).exp().detach()
    A = rest["advantages"][:, None]
    clipped = ((A > 0) & (ratio > 1.2)) | ((A < 0) & (ratio < 0.8))
    torch.testing.assert_close(logprobs.grad, torch.where(clipped, 0.0, 3 * ratio * A / (B * T)))
