"""Where a model is loaded to."""

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import DistributedType

from fused_grpo.errors import DataError, InputError, UnsupportedError, WrongTypeError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.models import loading
from fused_grpo.trainer.models.memory_estimate import planned_shape
from fused_grpo.trainer.rewards.reward_functions import load_reward_model


@pytest.mark.parametrize(
    ("device", "kind", "given", "expected"),
    [
        ("cuda:1", "MULTI_GPU", {}, {"": torch.device("cuda:1")}),
        ("cuda:1", "FSDP", {}, None),  # its shards go there
        ("cpu", "NO", {}, None),
        ("cuda:0", "NO", {"device_map": "auto"}, "auto"),
    ],
)
def test_a_model_is_loaded_straight_to_its_device(monkeypatch, device, kind, given, expected):
    asked: dict[str, Any] = {}
    config = SimpleNamespace(get_text_config=SimpleNamespace, _attn_implementation=None)
    model = SimpleNamespace(config=config, generation_config=None)
    monkeypatch.setattr(
        loading.AutoModelForCausalLM,
        "from_pretrained",
        lambda name, **options: asked.update(options) or (model, {"missing_keys": [], "mismatched_keys": []}),
    )
    accelerator = SimpleNamespace(device=torch.device(device), distributed_type=DistributedType[kind])
    args = GRPOConfig(model_init_kwargs={"dtype": torch.bfloat16, **given})
    loading.load_model("somewhere", accelerator, **loading.loading_options(args))
    assert asked.get("device_map") == expected
    assert asked["dtype"] == torch.bfloat16


@pytest.mark.parametrize("lost", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_a_checkpoint_lacks_are_no_random_numbers(make_model, tmp_path, lost):
    model = make_model(tie_word_embeddings=False)
    weights = {name: weight for name, weight in model.state_dict().items() if name != lost}
    model.save_pretrained(tmp_path, state_dict=weights)
    accelerator = SimpleNamespace(device=torch.device("cpu"), distributed_type=DistributedType.NO)
    with pytest.raises(DataError, match=rf"without 1 of the weights of a \w+, such as {lost}, want all: .*; fix: "):
        loading.load_model(tmp_path, accelerator, **loading.loading_options(GRPOConfig()))


def test_weights_of_another_shape_are_no_random_numbers(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    accelerator = SimpleNamespace(device=torch.device("cpu"), distributed_type=DistributedType.NO)
    args = GRPOConfig(model_init_kwargs={"vocab_size": 30, "ignore_mismatched_sizes": True})
    with pytest.raises(DataError, match=r"without 2 of the weights of a \w+, such as lm_head.weight, want all"):
        loading.load_model(tmp_path, accelerator, **loading.loading_options(args))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_audio", "t5", "vit", "clip"])
def test_a_type_of_which_no_causal_lm_is_made_is_refused_by_its_config(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UnsupportedError, match=f"^got teacher_model .* of type '{kind}', .*; fix: "):
        loading.load_config("teacher_model", str(tmp_path), GRPOConfig(), None)


def test_a_device_without_fp64_is_refused(make_model):
    accelerator = SimpleNamespace(device=torch.device("mps"), distributed_type=DistributedType.NO)
    for model in (make_model(), "somewhere"):
        with pytest.raises(UnsupportedError, match=r"got Apple's MPS .*fix: use_cpu=True"):
            loading.load_model(model, accelerator, **loading.loading_options(GRPOConfig()))


def test_what_is_no_tokenizer_is_refused(make_model):
    with pytest.raises(WrongTypeError, match="got a str as processing_class"):
        loading.tokenizer_for(make_model(), "a tokenizer", GRPOConfig())


@pytest.mark.parametrize("part", ["model", "model.layers.1", "lm_head"])
def test_weights_without_numbers_are_refused_before_anything_is_read(make_model, part):
    model = make_model()
    model.get_submodule(part).to("meta")
    with pytest.raises(InputError, match=rf"got a Qwen2ForCausalLM as model whose {part}\S+ is on the meta device"):
        GRPOTrainer(model, lambda **given: [], GRPOConfig(use_cpu=True), [{"prompt": "a"}])


@pytest.mark.parametrize("wrong", [None, 5, b"model", ["model"], int, torch.nn.Linear(2, 2)], ids=repr)
def test_what_is_no_model_is_refused_by_its_type(tmp_path, wrong):
    args = GRPOConfig(output_dir=str(tmp_path / "run"))
    with pytest.raises(WrongTypeError, match=f"got a {type(wrong).__name__} as model, want a path"):
        GRPOTrainer(wrong, lambda **given: [], args, [{"prompt": "a"}])


def test_every_rank_reads_a_reward_model(monkeypatch):
    """Under FSDP2 the launcher asks that rank 0 alone reads; of a reward model the others would have zeros."""
    seen: list[str | None] = []

    def from_pretrained(name: str, **options: Any) -> Any:
        seen.append(os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING"))
        raise OSError("no such model")

    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_pretrained", from_pretrained)
    with pytest.raises(InputError, match="no such model"):
        load_reward_model("somewhere")
    assert seen == [None]
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"


def with_bias(model):
    model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)


def with_rows(model):
    model.model.embed_tokens = torch.nn.Embedding(model.config.vocab_size + 8, model.config.hidden_size)


@pytest.mark.parametrize(
    ("change", "name"), [(with_bias, "lm_head.bias"), (with_rows, "model.embed_tokens.weight"), (None, "")]
)
def test_a_model_that_would_load_as_another_one_is_a_warning(make_model, caplog, change, name):
    warn_once.cache_clear()
    model = make_model()
    if change is None:
        model.resize_token_embeddings(40)  # which changes the config too
    else:
        change(model)
    loading.warn_of_other_weights(model)
    said = f"got a Qwen2ForCausalLM whose {name} are not those of its config, or tied otherwise: from_pretrained will"
    said = [f"{said} load what is saved"]
    assert [text.partition(" as another")[0] for text in caplog.messages if text[:5] == "got a"] == said[: bool(name)]


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_is_tied_otherwise_than_its_config_says_is_a_warning(make_model, caplog, tied):
    warn_once.cache_clear()
    model = make_model(tie_word_embeddings=tied)
    loading.warn_of_other_weights(model)
    assert not caplog.text
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone()) if tied else model.model.embed_tokens.weight
    loading.warn_of_other_weights(model)
    assert "whose lm_head.weight are not those of its config, or tied otherwise" in caplog.text


@pytest.mark.parametrize("trusted", [False, True])
def test_code_beside_a_config_runs_without_a_question(make_model, tmp_path, monkeypatch, trusted):
    asked = list[str]()
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    code = "from transformers import Qwen2Config, Qwen2ForCausalLM\nclass Config(Qwen2Config): model_type = 'mine'\n"
    (tmp_path / "mine.py").write_text(f"{code}class Model(Qwen2ForCausalLM): config_class = Config\n")
    names = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(make_model().config.to_dict() | names))
    config = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    shape = planned_shape(config, str(tmp_path), trust_remote_code=trusted)
    assert (shape is not None, asked) == (trusted, [])
