"""`return_logprobs`: models and calls that it does not take, and what it says about them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import ProphetNetConfig, ProphetNetForCausalLM, Qwen2ForCausalLM

from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.integrations.transformers import return_logprobs


def called(model: Any, batch: dict[str, Tensor], **options: Any) -> Any:
    with return_logprobs(model, **options):
        return model(**batch)


class Planted(Qwen2ForCausalLM):
    """Does to its logits what no config would say."""

    change: Callable[[Tensor], Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        return output


def masked(logits: Tensor) -> Tensor:
    logits[:, :, 7:9] = torch.finfo(logits.dtype).min
    return logits


PLANTED = {
    "scaled": lambda z: z * 1.7,
    "scaled a little": lambda z: z * 1.001,
    "capped": lambda z: z.clamp(-50, 50),
    "with a bias": lambda z: z + 0.1 * torch.arange(z.shape[-1]),
    "turned around": lambda z: z.flip(-1),
    "without two columns": masked,
    "cut": lambda z: z[..., :-3],
    "normalised": lambda z: z.log_softmax(-1),
    "added to": lambda z: z + torch.randn(3, 11, z.shape[-1]),
}


@pytest.mark.parametrize("count", ["5", True, -1, float("nan"), torch.ones(2), torch.ones((), device="meta")], ids=str)
def test_a_count_of_items_that_is_none_is_found_before_the_backbone_runs(model, batch, count, monkeypatch):
    monkeypatch.setattr(model.base_model, "forward", None)
    with pytest.raises(InputError, match=r"got num_items_in_batch"):
        called(model, {**batch, "num_items_in_batch": count})


def test_a_temperature_without_values_is_refused_by_name(model, batch):
    for wrong in (torch.ones((), device="meta"), torch.tensor([[0.5]]).to_sparse()):
        with pytest.raises(InputError, match="got temperature"):
            called(model, batch, temperature=wrong)


@pytest.mark.parametrize("transform", PLANTED)
def test_a_transform_that_the_config_does_not_tell_is_refused(model, batch, transform):
    planted = Planted(copy.deepcopy(model.config))
    planted.change = PLANTED[transform]
    with pytest.raises(
        UnsupportedError, match=r"Planted that takes .* by its forward something else; fix: call it without"
    ):
        called(planted, batch)


def test_a_head_that_is_not_called_is_refused(model, batch, monkeypatch):
    monkeypatch.setattr(Qwen2ForCausalLM, "get_output_embeddings", lambda self: nn.Linear(32, 61, bias=False))
    with pytest.raises(UnsupportedError, match="does not call its output embeddings"):
        called(model, batch)


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_head_that_is_more_than_its_weight_is_refused(model):
    def refused(match: str, head: Any) -> None:
        model.lm_head = head
        with pytest.raises(UnsupportedError, match=match), return_logprobs(model):
            pass

    refused(r"got a Doubling of [\w.]+ as the head of Qwen2ForCausalLM, want nn.Linear", Doubling(32, 61))
    refused(r"got a Linear of [\w.]+ as the head", type("Linear", (Doubling,), {})(32, 61))
    replaced = nn.Linear(32, 61)
    replaced.forward = lambda x: x
    refused("got a Linear of torch.nn.modules.linear with another forward as the head", replaced)
    del model.lm_head
    with pytest.raises(UnsupportedError, match="without output embeddings"), return_logprobs(model):
        pass


@pytest.mark.parametrize("hook", [lambda logits: logits * 2, lambda logits: logits[0]], ids=["scales", "picks"])
def test_a_hook_that_changes_the_logits_of_the_head_is_refused(model, batch, hook):
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: hook(output))
    with pytest.raises(UnsupportedError, match=r"got a forward hook on the head of Qwen2ForCausalLM .*; fix: remove"):
        called(model, batch)
    assert "forward" not in vars(model.lm_head)
    handle.remove()
    assert called(model, batch).log_probs.shape == (3, 10)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_an_adapter_that_is_more_than_a_sum_is_refused(model, options):
    from peft import LoraConfig, get_peft_model

    model.lm_head = nn.Linear(32, 61)
    adapted = get_peft_model(model, LoraConfig(target_modules=["lm_head"], **options)).train()
    with pytest.raises(UnsupportedError, match="got an adapter with dropout, a bias or a variant"):
        called(adapted, {})


def test_a_head_whose_weight_is_no_plain_tensor_is_refused(model, batch):
    class Packed(nn.Parameter):
        pass

    model.lm_head.weight = Packed(model.lm_head.weight.data)
    with pytest.raises(UnsupportedError, match=r"got a Packed of torch\.float32 as the weight of the head"):
        called(model, batch)


def test_a_head_that_gets_more_than_one_state_per_label_is_refused(make_model, batch):
    options = {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4}
    options |= {"num_decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "is_decoder": True}
    config = ProphetNetConfig(vocab_size=61, hidden_size=32, ngram=2, add_cross_attention=False, **options)
    with pytest.raises(InputError, match=r"got labels \(3, 11\) and hidden states \(3, 2, 11, 32\)"):
        called(ProphetNetForCausalLM(config), batch)


def test_arguments_that_cannot_be_right_are_refused(model, batch):
    bad: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"logits_to_keep": 3}, {}, "got logits_to_keep with labels"),
        ({"labels": batch["labels"][:, :5]}, {}, r"got labels \(3, 5\) and hidden states \(3, 11, 32\)"),
        ({"labels": batch["labels"][0]}, {}, r"got labels \(11,\) and hidden states \(3, 11, 32\)"),
        ({"labels": batch["labels"].tolist()}, {}, "got labels of type list, want a torch.Tensor"),
        ({"shift_labels": batch["labels"].tolist()}, {}, "got shift_labels of type list, want a torch.Tensor"),
        *(
            (
                {name: batch["labels"].to(dtype)},
                {},
                f"got {name} of dtype {dtype}, want torch.int64; fix: {name}.long()",
            )
            for name in ("labels", "shift_labels")
            for dtype in (torch.int32, torch.uint8, torch.bool, torch.float32)
        ),
        ({"ignore_index": "none"}, {}, "got ignore_index='none', want a whole number"),
        ({"ignore_index": 2**70}, {}, "got ignore_index=1180591620717411303424, want a whole number"),
        ({}, {"temperature": torch.ones(4, 10)}, r"got temperature \(4, 10\), want what broadcasts to .*\(3, 10\)"),
        ({}, {"temperature": 0.0}, "got temperature=0.0"),
        ({}, {"impl": "cuda"}, "got impl='cuda'"),
    ]
    for arguments, options, message in bad:
        with pytest.raises(InputError, match=message):
            called(model, batch | arguments, **options)
    with pytest.raises(InputError, match="got a Linear with no model of transformers inside"):
        called(nn.Linear(2, 2), batch)
    for wrong in ({"chunk_bytes": 0}, {"batch_invariant": 1}, {"entropy": "no"}, {"impl": "cuda"}, {"temperature": 0}):
        with pytest.raises(InputError, match=f"got {next(iter(wrong))}"):  # before a model is called
            return_logprobs(model, **wrong).__enter__()
    model.z_loss_coefficient = 0.1
    with pytest.raises(UnsupportedError, match=r"want z_loss_coefficient=0\.0"):
        called(model, batch)


@pytest.mark.parametrize("tokens", ["input_ids", "inputs_embeds"])
def test_labels_and_temperatures_are_refused_before_a_backbone_runs(model, batch, tokens):
    labels = batch["labels"]
    if tokens == "inputs_embeds":
        batch = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"])}
    model.model.forward = None
    for given, of in (
        ({"labels": labels[:, :5]}, {}),
        ({"labels": labels[0, 0]}, {}),
        ({"shift_labels": labels[:, 1:]}, {}),
        ({"labels": labels, "return_dict": False}, {}),
        ({"labels": labels}, {"temperature": torch.ones(4, 10)}),
        ({"labels": labels}, {"temperature": torch.zeros(10)}),
    ):
        with pytest.raises(
            InputError, match=r"^got (labels \(.*\) and hidden states \(3, 11, 32\)|a? ?temp|return_dict=)"
        ):
            called(model, batch | given, **of)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "BertForMaskedLM"])
def test_a_model_whose_labels_are_not_those_of_the_next_token_is_refused(make_model, batch, name):
    model = make_model(name, name[:4] + "Config", d_model=32)
    inputs = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    own = model.eval()(**inputs)
    targets = batch["labels"].flatten()
    assert own.loss == torch.nn.functional.cross_entropy(own.logits.flatten(0, 1), targets)  # not shifted
    with pytest.raises(UnsupportedError, match=f"got a {name}, whose labels .*; fix: AutoModelForCausalLM"):
        return_logprobs(model).__enter__()
    assert "forward" not in vars(model)


def test_a_model_of_fake_tensors_is_refused(model):
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake, ids = Qwen2ForCausalLM(model.config), torch.zeros(2, 3, dtype=torch.long)
        with return_logprobs(fake), pytest.raises(UnsupportedError, match=r"got a FakeTensor .*; fix: .* tensors fake"):
            fake(ids, labels=ids)
