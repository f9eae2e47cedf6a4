"""`return_logprobs`: its results, what it leaves unchanged, wrappers around the model, and memory.

Refusals are tested in `test_transformers_refused.py`, the logit transforms of model families in
`test_logit_transform.py`.
"""

import copy
import importlib.util
import inspect
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fused_grpo import linear_logprobs_and_entropy
from fused_grpo.errors import InputError
from fused_grpo.integrations import transformers as ours
from fused_grpo.integrations.transformers import return_logprobs


def called(model: Any, batch: dict[str, Tensor], **options: Any) -> Any:
    with return_logprobs(model, **options):
        return model(**batch)


def learned(model: nn.Module, value: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return value, gradients(model, value)


def scored(model: nn.Module, scores: Any) -> Any:
    """Log-probs, entropy, and the gradients of their sum."""
    return scores.log_probs, scores.entropy, gradients(model, scores.log_probs.sum() + scores.entropy.sum())


def gradients(model: nn.Module, value: Tensor) -> dict[str, Tensor]:
    """All of them, of a value; none is left behind."""
    value.backward()
    by_name = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad(set_to_none=True)
    return by_name


@pytest.fixture
def assert_equals(assert_as_exact) -> Callable[..., None]:
    """What `ours(model)` gives is what `theirs(model)` gives, by the error rule; in fp64, that is exact."""

    def check(model: nn.Module, ours: Callable[[Any], Any], reference: Callable[[Any], Any]) -> None:
        exact = tensors(reference(copy.deepcopy(model).double()))
        actual, plain = tensors(ours(model)), tensors(reference(model))
        assert actual.keys() == plain.keys() == exact.keys()
        for name in exact:
            assert_as_exact(actual[name], plain[name], exact[name], what=name)

    return check


def tensors(value: Any, name: str = "result") -> dict[str, Tensor]:
    """Every tensor of a tensor, or of a tuple or a dict of them, by its place."""
    if isinstance(value, Tensor):
        return {name: value.detach()}
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return {place: x for key, part in parts for place, x in tensors(part, f"{name}[{key}]").items()}


def assert_same_bits(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def attributes(model: nn.Module) -> list[Any]:
    """All attributes of each module."""
    return [{k: list(v) if isinstance(v, dict) else id(v) for k, v in vars(x).items()} for x in model.modules()]


# What it returns


@pytest.mark.parametrize("count", [None, 7, torch.tensor(40)])
def test_the_loss_is_the_models_own(model, batch, assert_equals, count):
    batch |= {} if count is None else {"num_items_in_batch": count}
    assert_equals(
        model,
        lambda model: learned(model, called(model, batch).loss),
        lambda model: learned(model, model(**batch).loss),
    )


@pytest.mark.parametrize("count", [None, 7])
def test_ignore_index_is_that_of_the_call(model, batch, assert_equals, count):
    labels = batch["labels"].masked_fill(batch["labels"] == -100, 3)
    batch |= {"labels": labels, "ignore_index": 3} | ({} if count is None else {"num_items_in_batch": count})
    assert_equals(
        model,
        lambda model: learned(model, called(model, batch).loss),
        lambda model: learned(model, model(**batch).loss),
    )


@pytest.mark.parametrize("name", ["Mixtral", "JetMoe"])
def test_so_is_the_loss_of_its_experts(make_model, batch, assert_equals, name):
    options = {"router_aux_loss_coef": 0.3, "aux_loss_coef": 0.3, "num_local_experts": 4, "num_experts_per_tok": 2}
    options["experts_implementation"] = "eager"  # the grouped GEMM of PyTorch knows no fp64
    model = make_model(name, **options, kv_channels=8, output_router_logits=True)
    batch |= {"output_hidden_states": True, "output_router_logits": True}
    assert model(**batch).aux_loss > 0.1

    def everything(model: Any, out: Any) -> Any:
        return [out[x] for x in ("aux_loss", "router_logits", "hidden_states")], learned(model, out.loss)

    assert_equals(
        model, lambda model: everything(model, called(model, batch)), lambda model: everything(model, model(**batch))
    )


def test_labels_that_come_shifted_are_not_shifted_again(model, batch, assert_equals):
    shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    out, usual = called(model, inputs | {"shift_labels": shifted}), called(model, batch)
    for name in ("log_probs", "entropy"):
        assert torch.equal(out[name], nn.functional.pad(usual[name], (0, 1)))
    torch.testing.assert_close(out.loss, usual.loss, rtol=1e-5, atol=0)  # a sum of one term more, a 0
    shifted[:, -1] = 5
    assert_equals(
        model,
        lambda model: called(model, inputs | {"shift_labels": shifted}).log_probs[:, -1],
        lambda model: model(**inputs).logits[:, -1].log_softmax(-1)[:, 5],
    )


@pytest.mark.parametrize("shape", [(), (3, 1), (3, 10)])
def test_temperature_divides_logits(model, batch, by_logits, assert_equals, shape):
    temperature = 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(3))
    # Logits have one dimension more than what a number per token can be divided by.
    divisor, option = (temperature[..., None], temperature) if shape else (temperature, temperature.item())
    assert_equals(
        model,
        lambda model: scored(model, called(model, batch, temperature=option)),
        lambda model: scored(model, by_logits(model, batch, divisor)),
    )


def test_a_temperature_counts_only_where_there_is_a_label(model, batch):
    labels = batch["labels"].clone()
    labels[:, ::3] = -100
    given, ones = {**batch, "labels": labels}, torch.ones(3, 10)
    out = called(model, given, temperature=ones.masked_fill(labels[:, 1:] == -100, 0.0))
    assert torch.equal(out.log_probs, called(model, given, temperature=ones).log_probs)
    with pytest.raises(InputError, match=r"got a temperature of 0\.0, want finite numbers > 0"):
        called(model, given, temperature=ones.masked_fill(labels[:, 1:] != -100, 0.0))


def test_without_entropy_none_is_computed(model, batch):
    out = called(model, batch, entropy=False)
    assert out.entropy is None
    assert "entropy" not in out
    torch.testing.assert_close(out.log_probs, called(model, batch).log_probs, rtol=1e-6, atol=1e-6)


def test_no_label_at_all_is_a_differentiable_zero(model, batch):
    batch["labels"] = torch.full_like(batch["labels"], -100)
    out = called(model, batch)
    for value in (out.loss, out.log_probs.sum(), out.entropy.sum()):
        assert value.item() == 0.0
    assert all((x == 0).all() for x in gradients(model, out.loss).values())


def test_what_the_op_is_told(model, batch, monkeypatch, assert_equals):
    seen: dict[str, Any] = {}

    def spy(*args: Any, **options: Any) -> Any:
        seen.update(options)
        return linear_logprobs_and_entropy(*args, **options)

    monkeypatch.setattr(ours, "linear_logprobs_and_entropy", spy)
    options = {"chunk_bytes": 4096, "batch_invariant": True, "impl": "torch"}
    called(model, batch, **options)
    assert options.items() <= seen.items()
    assert_equals(
        model,
        lambda model: called(model, batch, impl="triton").log_probs,
        lambda model: called(model, batch, **options).log_probs,
    )


def test_under_autocast_log_probs_are_of_logits_that_were_not_rounded(model, batch, by_logits):
    """The model computes what it computes in bf16; from there, nothing is rounded."""
    states = []
    handle = model.lm_head.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    with torch.autocast("cpu", torch.bfloat16):
        out = called(model, batch)
        rounded = by_logits(model, batch).log_probs
    handle.remove()
    hidden, weight = (x.detach().bfloat16().double() for x in (states[0], model.lm_head.weight))
    exact = (hidden @ weight.t())[:, :-1].log_softmax(-1).gather(-1, batch["labels"][:, 1:, None].clamp_min(0))[..., 0]
    exact = exact.masked_fill(batch["labels"][:, 1:] == -100, 0.0)
    assert out.log_probs.dtype == out.entropy.dtype == out.loss.dtype == torch.float32
    assert (out.log_probs - exact).abs().max() < 1e-5
    assert (rounded - exact).abs().max() > 1e-3


def test_fsdp_may_not_round_them_either(model, batch):
    """What FSDP2 does for its `output_dtype`, by its own function: to what the head and what the model returns."""
    from torch.distributed.utils import _apply_to_tensors

    expected = called(model, batch)
    model.lm_head.register_forward_hook(lambda *args: _apply_to_tensors(lambda x: x.bfloat16(), args[-1]))
    out = called(model, batch | {"output_hidden_states": True})
    cast = _apply_to_tensors(lambda x: x.bfloat16(), out)
    assert cast.hidden_states[-1].dtype == torch.bfloat16
    for name in ("log_probs", "entropy", "loss"):
        assert torch.equal(cast[name], expected[name])
    assert cast.keys() == out.keys() == {"loss", "log_probs", "entropy", "hidden_states"}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_an_output_can_be_copied_and_pickled(model, batch, copied):
    with torch.no_grad():
        out = called(model, batch | {"output_hidden_states": True})
    again = copied(out)
    assert type(again) is type(out)
    assert again.keys() == out.keys() == {"loss", "log_probs", "entropy", "hidden_states"}
    for name in ("loss", "log_probs", "entropy"):
        assert torch.equal(again[name], out[name])


# What it leaves as it was


def test_generation_goes_on_as_ever(model, batch):
    prompt = {"input_ids": batch["input_ids"][:1, :4], "attention_mask": batch["attention_mask"][:1, :4]}
    options = {"do_sample": False, "max_new_tokens": 6, "use_cache": True}
    own = model.generate(**prompt, **options)
    signature = inspect.signature(model.forward)
    with return_logprobs(model):
        assert torch.equal(model.generate(**prompt, **options), own)
        assert inspect.signature(model.forward) == signature
        with pytest.raises(ValueError, match=r"model_kwargs.*attention_musk"):
            model.generate(**prompt, **options, attention_musk=1)
        assert torch.equal(model(**prompt).logits, model(**prompt, labels=None).logits)


def test_nothing_is_left_behind(model, batch):
    before, own = attributes(model), model(**batch).logits
    with return_logprobs(model):
        model(**batch)
    assert attributes(model) == before
    failing = model.model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        called(model, batch)
    failing.remove()
    assert attributes(model) == before
    assert torch.equal(model(**batch).logits, own)


def test_one_in_another_comes_first_and_goes_first(model, batch):
    before = attributes(model)
    with return_logprobs(model, temperature=2.0):
        hot = model(**batch).log_probs
        with return_logprobs(model):
            assert torch.equal(model(**batch).log_probs, called(model, batch).log_probs)
        assert torch.equal(model(**batch).log_probs, hot)
    assert attributes(model) == before


def test_hooks_of_accelerate_stay_where_they_are(model, batch, by_logits, assert_equals):
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Halve(ModelHook):
        def pre_forward(self, module: nn.Module, hidden: Tensor) -> Any:
            return (hidden / 2,), {}

    add_hook_to_module(model.lm_head, Halve())
    before = attributes(model)
    assert_equals(model, lambda model: called(model, batch).log_probs, lambda model: by_logits(model, batch).log_probs)
    assert attributes(model) == before


class Gathered(torch.autograd.Function):
    """As DeepSpeed's ZeRO-3 does it: what a module returns has to pass by here before its own backward pass."""

    @staticmethod
    def forward(ctx: Any, gather: Callable[[], None], value: Tensor) -> Tensor:
        ctx.gather = gather
        return value.detach()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[None, Tensor]:
        ctx.gather()
        return None, slope


def test_a_weight_between_hooks_alone_is_there_in_the_backward_pass(make_model, batch):
    model = make_model("Llama")
    expected = gradients(model, called(model, batch).loss)
    weight, full = model.lm_head.weight, model.lm_head.weight.data

    def gather(*_: Any) -> None:
        weight.data = full

    def release(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        weight.data = full.new_empty(0)
        return tuple(Gathered.apply(gather, x) for x in outputs)

    model.lm_head.register_forward_pre_hook(gather)
    model.lm_head.register_forward_hook(release)
    out = called(model, batch)
    assert weight.numel() == 0
    # The same calls of the same functions.
    assert_same_bits(gradients(model, out.loss), expected)


# What may be around the model, or in it


def test_a_model_inside_ddp(model, batch):
    from torch.nn.parallel import DistributedDataParallel

    expected = gradients(model, called(model, batch).loss)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model, static_graph=True)
        out = called(wrapped, batch)
        assert_same_bits(gradients(model, out.loss), expected)
    finally:
        time.sleep(0.25)  # see after_a_moment in fork_server.py: without it, this hung once in CI
        torch.distributed.destroy_process_group()


def test_compiled_it_gives_the_same_numbers(make_model, batch, assert_equals):
    model = make_model("Llama", num_hidden_layers=1)

    def compiled(model: nn.Module) -> Any:
        compiled = torch.compile(model, backend="aot_eager")
        logits = compiled(batch["input_ids"]).logits
        with return_logprobs(compiled):
            first, second = compiled(**batch), compiled(**batch)
        assert torch.equal(first.log_probs, second.log_probs)
        assert torch.equal(compiled(batch["input_ids"]).logits, logits)
        return scored(model, second)

    assert_equals(model, compiled, lambda model: scored(model, called(model, batch)))


def test_gradient_checkpointing_changes_nothing(model, batch):
    model.train()
    plain = called(model, batch)
    expected = gradients(model, plain.log_probs.sum())
    model.gradient_checkpointing_enable()
    assert_same_bits(gradients(model, called(model, batch).log_probs.sum()), expected)


LORA = {
    "around attention": {"target_modules": ["q_proj", "v_proj"]},
    "around attention and the head": {"target_modules": ["q_proj", "lm_head"]},
    "with a trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("where", LORA)
def test_lora(make_model, batch, by_logits, assert_equals, where):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model("Llama"), LoraConfig(**LORA[where], r=4, init_lora_weights=False))
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                x.add_(0.1 * torch.randn_like(x))
    before = attributes(model)
    assert_equals(
        model,
        lambda model: scored(model, called(model, batch)),
        lambda model: scored(model, by_logits(model, batch)),
    )
    with model.disable_adapter():
        assert_equals(
            model, lambda model: called(model, batch).log_probs, lambda model: by_logits(model, batch).log_probs
        )
    assert attributes(model) == before


# How little memory it takes


def test_no_tensor_as_large_as_the_logits_is_ever_allocated(make_model):
    B, T, V = 4, 64, 4001
    model = make_model("Qwen2", vocab_size=V, max_position_embeddings=T, tie_word_embeddings=True)
    ids = torch.randint(V, (B, T))

    def largest(work: Callable[[], Tensor]) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            work().backward()
        return max(x.nbytes() for x in recorded.profiler.kineto_results.events() if x.name() == "[memory]")

    logits = 4 * B * T * V
    with return_logprobs(model, chunk_bytes=logits // 8):
        # The gradient of the tied embedding is the largest there is: [V, D].
        assert largest(lambda: sum(model(ids, labels=ids)[x].sum() for x in ("log_probs", "entropy"))) <= 4 * V * 32
    assert largest(lambda: model(ids, labels=ids).loss) >= logits


def test_the_example_says_what_it_should(capsys):
    path = Path(__file__).parents[2] / "examples" / "transformers_logprobs.py"
    spec = importlib.util.spec_from_file_location("transformers_logprobs", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    by_family = example.main()
    assert by_family.keys() == example.FAMILIES.keys()
    assert max(max(differences) for differences in by_family.values()) < 2e-5
    assert "Gemma 2: 5 tanh(x / 5) log-probs" in capsys.readouterr().out


def test_a_copy_made_inside_is_its_own_model(make_model, batch):
    model = make_model("Llama", num_hidden_layers=1)
    with return_logprobs(model):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        ids = batch["input_ids"]
        assert not torch.allclose(other(ids).logits, model(ids).logits)
        assert other(**batch).logits is not None  # the copy is not inside the block
    assert not torch.allclose(other(ids).logits, model(ids).logits)


def test_what_is_put_around_the_model_inside_stays(make_model, batch):
    model = make_model("Llama", num_hidden_layers=1)
    expected, calls = model(**batch).logits, []
    with return_logprobs(model):
        inner = model.forward
        model.forward = lambda *args, **kwargs: calls.append(1) or inner(*args, **kwargs)
        assert model(**batch).log_probs is not None
    assert torch.equal(model(**batch).logits, expected)
    assert len(calls) == 2
