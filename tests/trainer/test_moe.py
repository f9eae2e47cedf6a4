"""Mixture of experts: ten steps are TRL's with the routers' auxiliary loss, also where sequences share rows."""

import copy
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
import trl_runs
from accelerate import Accelerator
from batches import batch_of
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from fused_grpo import GRPOLossConfig
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.batching.micro_batches import Packing, micro_batches
from fused_grpo.trainer.learner import Learner
from fused_grpo.trainer.models.adapters import base_weights, checkpoint_weights
from fused_grpo.trainer.policy import PolicyLoss, router_aux_loss

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL's and PEFT's, about what is experimental

SIZES = {
    "vocab_size": trl_runs.V,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "router_aux_loss_coef": 0.02,
}
# And whether the sequences of a row are kept apart.
MODELS = {
    "Qwen3Moe": ({"num_experts": 4, "moe_intermediate_size": 16}, True),
    "Mixtral": ({"num_local_experts": 4}, True),
    "GptOss": ({"num_local_experts": 4}, False),
}
SHARED = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": trl_runs.GROUP,
    "num_iterations": 1,
    "max_completion_length": trl_runs.LONGEST,
    "max_steps": 10,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-4,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
}


def make(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name][0])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for parameter in model.parameters():  # so far apart that rounding does not choose the experts
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, str]:
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in MODELS}
    for name, folder in folders.items():
        make(name).save_pretrained(folder)
    return folders


@pytest.fixture
def trained_by_trl(monkeypatch) -> Any:
    """Ten steps by TRL: (parameters, log). vLLM is hidden from TRL, because its import takes longer than the test."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from trl import import_utils

    monkeypatch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)
    return lambda model, **options: trl_runs.run(trl.GRPOTrainer, model=model, **{**SHARED, **options})


@pytest.fixture
def ours(tmp_path) -> Any:
    def trained(
        model: Any, *, peft_config: Any = None, rollout_func: Any = trl_runs.completions, **options: Any
    ) -> tuple[GRPOTrainer, list[dict[str, float]]]:
        quiet = {"output_dir": str(tmp_path / "run"), "overwrite_output_dir": True, "bf16": False, "use_vllm": False}
        args = GRPOConfig(**{**SHARED, **quiet, "save_strategy": "no", "shuffle_dataset": False, **options})
        rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in trl_runs.PROMPTS])
        named = {"processing_class": trl_runs.tokenizer(), "peft_config": peft_config}
        trainer = GRPOTrainer(model, trl_runs.reward, args, rows, rollout_func=rollout_func, **named)
        trainer.train()
        lines = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
        return trainer, [json.loads(line) for line in lines]

    return trained


def compare(trl_run: tuple, our_run: tuple, tolerance: float) -> None:
    """Parameters, and the metrics that are to be the same."""
    trained = our_run[0].model.state_dict()
    assert trained.keys() == trl_run[0].keys()
    for name, expected in trl_run[0].items():
        torch.testing.assert_close(trained[name], expected, rtol=0, atol=tolerance, msg=lambda m, name=name: name + m)
    log = [line for line in trl_run[1] if "loss" in line]
    assert len(log) == len(our_run[1]) == SHARED["max_steps"]
    for line, entry in zip(our_run[1], log, strict=True):
        names = [name for name in ("aux_loss", "loss", "grad_norm") if name in line or name in entry]
        names += ["policy_loss"] if "policy_loss" in entry else []  # TRL has it with an entropy bonus alone
        assert [line[name] for name in names] == pytest.approx([entry[name] for name in names], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "coefficient"),
    [("Qwen3Moe", None), ("Qwen3Moe", 0.0), *((name, 0.1) for name in MODELS)]
    + [pytest.param(name, value, marks=pytest.mark.full) for name in ("Mixtral", "GptOss") for value in (None, 0.0)],
)
def test_ten_steps_are_trls(saved, trained_by_trl, ours, name, coefficient):
    options = {"router_aux_loss_coef": coefficient, "entropy_coef": 0.01 if coefficient else 0.0}
    trl_run = trained_by_trl(saved[name], **options)
    trainer, log = ours(saved[name], **options)
    assert trainer.learner.packing.share_rows is MODELS[name][1]
    assert all(("aux_loss" in line) is (coefficient != 0.0) for line in log)
    compare(trl_run, (trainer, log), 1e-5)
    assert any("policy_loss" in entry for entry in trl_run[1]) is bool(coefficient)


def test_accumulated_recomputed_and_off_policy_it_is_trls_too(saved, trained_by_trl, ours):
    """TRL's micro-batches are in order here; it shuffles them otherwise."""
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    options |= {"num_iterations": 2, "loss_type": "grpo", "beta": 0.04, "router_aux_loss_coef": 0.1}
    compare(trained_by_trl(saved["Qwen3Moe"], **options), ours(saved["Qwen3Moe"], **options), 1e-5)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("Mixtral", {"one_row": True}),
        ("Qwen3Moe", {"one_row": False}),
        ("GptOss", {"one_row": False, "share_rows": False}),
    ],
)
def test_each_token_counts_once_and_padding_does_not(name, layout):
    model = make(name)
    rows = [torch.arange(2, 2 + length) for length in (12, 3, 5, 2)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    expected = model(padded, attention_mask=mask, output_router_logits=True).aux_loss
    ids = [row.tolist() for row in rows]
    batch = batch_of(
        prompt_ids=[row[:1] for row in ids],
        completion_ids=[row[1:] for row in ids],
        sampling_logprobs=None,
        advantage=torch.zeros(4),
    )
    policy = PolicyLoss(model, GRPOLossConfig(), temperature=1.0, router_aux_loss_coef=1.0)
    (part,) = micro_batches(batch, Packing(sequences=4, **layout), device=torch.device("cpu"))
    output = policy(part, num_tokens=18.0, num_sequences=4.0)
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(output.metrics["aux_loss"], expected.detach(), rtol=1e-5, atol=0)


def test_a_step_without_sequences_has_no_auxiliary_loss(ours):
    trainer, _ = ours(make("Qwen3Moe"), max_steps=1)
    alone = batch_of(
        prompt_ids=[[2]],
        completion_ids=[[3, 1]],
        sampling_logprobs=None,
        advantage=torch.ones(1),
        in_loss=torch.tensor([False]),
    )
    _, metrics = trainer.learner.learn(alone)
    assert "aux_loss" not in metrics
    assert metrics["loss"] == metrics["grad_norm"] == 0.0


def test_what_has_no_router_logits_is_refused(make_model):
    def learner(model, **options):
        return Learner(model, GRPOConfig(**options), Accelerator(cpu=True), max_steps=1)

    with pytest.raises(InputError, match=r"router_aux_loss_coef=0.1 with a Qwen2ForCausalLM, .* fix: leave it out"):
        learner(make_model(), router_aux_loss_coef=0.1)
    assert learner(make_model(), router_aux_loss_coef=0.0).policy.router_aux_loss_coef == 0.0
    with pytest.raises(InputError, match=r"use_reentrant=True .* \(the model's own: 0.02\)"):
        learner(make("Mixtral"), gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(InputError, match="at least 0, and finite"):
        GRPOConfig(router_aux_loss_coef=-1.0)
    with pytest.raises(UnsupportedError, match="no router logits from a MixtralForCausalLM"):
        router_aux_loss(make("Mixtral"), object(), torch.ones(1, 1))


def test_a_model_without_experts_trains_without_the_loss_of_its_config():
    """Doge is dense by default, and its config has a coefficient: found at the first step once, and refused."""

    def learner(**options):
        return Learner(tiny_model("doge"), GRPOConfig(**options), Accelerator(cpu=True), max_steps=1)

    assert tiny_model("doge").config.router_aux_loss_coef > 0
    dense = learner()
    assert dense.policy.router_aux_loss_coef == dense.router_coefficient == 0
    assert dense.can_skip
    with pytest.raises(InputError, match=r"router_aux_loss_coef=0.1 with a DogeForCausalLM, .* fix: leave it out"):
        learner(router_aux_loss_coef=0.1)
    assert Learner(make("Mixtral"), GRPOConfig(), Accelerator(cpu=True), max_steps=1).router_coefficient == 0.02


@pytest.mark.parametrize("name", MODELS)
def test_engines_are_given_the_names_of_a_checkpoint_and_sample(saved, ours, name):
    """Experts lie in one tensor while they are trained; in a checkpoint as each architecture has them."""
    model = AutoModelForCausalLM.from_pretrained(saved[name], dtype=torch.float32)
    weights, served = load_file(Path(saved[name]) / "model.safetensors"), dict(checkpoint_weights(model))
    assert served.keys() == weights.keys()
    assert all(torch.equal(served[key], weight) for key, weight in weights.items())
    _, log = ours(model, max_steps=2, rollout_func=None)
    assert [line["rollout_engine"] for line in log] == ["transformers"] * 2
    assert max(line["sampling/sampling_logp_difference/max"] for line in log) < 1e-4


def adapter() -> LoraConfig:
    """On both stacks of experts, on a router and on a linear layer."""
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    return LoraConfig(r=4, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False)


def test_an_adapter_on_experts_is_trained_as_by_trl(saved, trained_by_trl, ours):
    options = {"router_aux_loss_coef": 0.1, "beta": 0.04}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(saved["Qwen3Moe"], dtype=torch.float32), adapter())
    trl_run = trained_by_trl(copy.deepcopy(model), model_init_kwargs=None, **options)
    trainer, log = ours(model, **options)
    compare(trl_run, (trainer, log), 5e-6)


def test_an_adapter_on_experts_is_merged_and_saved(saved, ours):
    trainer, _ = ours(saved["Qwen3Moe"], peft_config=adapter(), max_steps=2, learning_rate=1e-2)
    start = AutoModelForCausalLM.from_pretrained(saved["Qwen3Moe"], dtype=torch.float32)
    expected = copy.deepcopy(trainer.model).merge_and_unload()
    merged = dict(checkpoint_weights(trainer.model))
    torch.testing.assert_close(merged, dict(checkpoint_weights(expected)), rtol=0, atol=1e-6)
    torch.testing.assert_close(dict(base_weights(trainer.model)), dict(checkpoint_weights(start)), rtol=0, atol=0)
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    assert not torch.equal(merged[name], dict(base_weights(trainer.model))[name])
    loaded = PeftModel.from_pretrained(start, trainer.save_model())
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in trainer.model.state_dict().items())


def test_engines_get_base_plus_scaled_b_a_of_each_expert(saved, ours):
    trainer, _ = ours(saved["Qwen3Moe"], peft_config=adapter(), max_steps=2, learning_rate=1e-2)
    state, merged, base = (
        dict(make(trainer.model)) for make in (torch.nn.Module.state_dict, checkpoint_weights, base_weights)
    )
    rank, scaling, rows = 4, 8 / 4, 16
    # PEFT wraps both stacks: gate_up_proj is inside, down_proj outside. Rows of A and columns of B are of all experts.
    for layer in range(2):
        for inner, names in ((".base_layer.base_layer", ("gate_proj", "up_proj")), (".base_layer", ("down_proj",))):
            prefix = f"base_model.model.model.layers.{layer}.mlp.experts{inner.removesuffix('.base_layer')}"
            a, b = (state[f"{prefix}.lora_{kind}.default.weight"] for kind in "AB")
            for expert in range(4):
                delta = scaling * b[:, expert::4] @ a[expert * rank : (expert + 1) * rank]
                for name, part in zip(names, delta.split(rows if len(names) > 1 else len(delta)), strict=True):
                    key = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                    torch.testing.assert_close(merged[key], base[key] + part, rtol=0, atol=1e-6)
                    assert part.abs().max() > 1e-2
