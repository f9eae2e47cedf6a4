"""LoRA: the adapter learns, nothing else does, by the gradients of PEFT's own logits; engines get its sum."""

import copy
import json
import math
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from batches import batch_of, column
from peft import (
    AdaLoraConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from safetensors.torch import load_file
from transformers import TrainerCallback

from fused_grpo.errors import (
    CheckpointError,
    InputError,
    UnavailableError,
    UnsupportedError,
    WeightSyncError,
    WrongTypeError,
)
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.checkpoint.training_state import read_adapter
from fused_grpo.trainer.engines.engine_choice import choose_engine
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.engines.vllm import inprocess
from fused_grpo.trainer.engines.vllm.inprocess import VLLMAdapterEngine, VLLMOptions
from fused_grpo.trainer.models.adapters import adapter_stream, as_reference, base_weights, checkpoint_weights, saver_of
from fused_grpo.trainer.models.weight_stream import WeightStream
from fused_grpo.trainer.types import SamplingParams

# Trained from the first step on: with B = 0, nothing would show.
PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
PISSA = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "pissa"}  # which takes a part of the base
KINDS = {
    "plain": PLAIN,
    "attention only": {**PLAIN, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "patterns": {**PLAIN, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "head": {**PLAIN, "target_modules": ["q_proj", "lm_head"]},
    "head alone": {**PLAIN, "target_modules": ["lm_head"]},
    "head trained": {**PLAIN, "modules_to_save": ["lm_head"]},
    "embedding": {**PLAIN, "target_modules": ["q_proj", "embed_tokens"]},
    "dora": {**PLAIN, "use_dora": True},
    "parameter": {**PLAIN, "target_modules": ["q_proj"], "target_parameters": ["mlp.down_proj.weight"]},
}
BATCH = batch_of(
    prompt_ids=[[2, 3, 4], [5, 6]],
    completion_ids=[[7, 8, 9, 1], [10, 11, 12, 13, 1]],
    sampling_logprobs=None,
    advantage=torch.tensor([1.0, -0.5]),
)


class MergingEngine(TransformersEngine):
    """Keeps what it is given, as an engine in another process would."""

    has_own_weights = True

    def load_weights(self, named_weights, version) -> None:
        self.given, self.weight_version = dict(named_weights), version


def digit_reward(completions, **columns) -> list[float]:
    return [sum(character.isdigit() for character in text) / (len(text) + 1) for text in completions]


@pytest.fixture
def make_lora_trainer(make_model, tokenizer, tmp_path):
    def make(model=None, kind="plain", *, engine=MergingEngine, peft_config="default", **options):
        defaults = {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 4, "num_generations": 4}
        defaults |= {"max_completion_length": 6, "max_steps": 3, "learning_rate": 1e-2, "overwrite_output_dir": True}
        defaults |= {"lr_scheduler_type": "constant", "gradient_checkpointing": False, "max_grad_norm": 1e9}
        model = make_model() if model is None else model
        return GRPOTrainer(
            model,
            digit_reward,
            GRPOConfig(**{**defaults, **options}),
            [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)],
            processing_class=tokenizer,
            peft_config=LoraConfig(**KINDS[kind]) if peft_config == "default" else peft_config,
            rollout_engine=engine(model, tokenizer),
        )

    return make


@pytest.fixture
def adapted(make_model):
    def make(kind="plain", seed=1, **options) -> PeftModel:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return get_peft_model(make_model(**options), LoraConfig(**{**KINDS, "pissa": PISSA}[kind]))

    return make


def values(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def completion_logprobs(model, batch) -> torch.Tensor:
    """From right-padded rows and the model's own logits."""
    rows = [torch.tensor(sample.prompt_ids + sample.completion_ids) for sample in batch]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logprobs = model(padded, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    taken = logprobs.gather(2, padded[:, 1:, None])[..., 0]
    firsts = [len(p) - 1 for p in column(batch, "prompt_ids")]
    return torch.cat([taken[i, first : len(rows[i]) - 1] for i, first in enumerate(firsts)])


def test_only_the_adapter_changes(make_lora_trainer):
    trainer = make_lora_trainer()
    start = values(trainer.model)
    trainer.train()
    changed = {name for name, value in values(trainer.model).items() if not torch.equal(value, start[name])}
    assert changed == {name for name in start if "lora_" in name}
    assert len(changed) == 2 * 2 * 7
    assert {name for name, p in trainer.model.named_parameters() if p.requires_grad} == changed


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_give_the_same_update(make_lora_trainer, reentrant):
    ends = []
    for options in ({}, {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}):
        learner = make_lora_trainer(gradient_checkpointing=bool(options), **options).learner
        start = values(learner.policy.model)
        learner.learn(BATCH)
        ends.append(values(learner.policy.model))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-6)
    changed = {name for name, value in ends[1].items() if not torch.equal(value, start[name])}
    assert changed == {name for name in start if "lora_" in name}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_pefts_logits(make_lora_trainer, kind):
    learner = make_lora_trainer(kind=kind, max_steps=1).learner
    model = learner.policy.model
    logprobs = completion_logprobs(model, BATCH)
    advantages = column(BATCH, "advantage").repeat_interleave(torch.tensor([4, 5]))
    loss = -((logprobs - logprobs.detach()).exp() * advantages).sum() / 9
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = dict(zip(trained, torch.autograd.grad(loss, trained.values()), strict=True))
    gradients = {}
    batch, metrics = learner.learn(
        BATCH, check=lambda *_: gradients.update({name: p.grad.clone() for name, p in trained.items()})
    )
    torch.testing.assert_close(torch.cat(column(batch, "old_logprobs")), logprobs.detach(), rtol=1e-5, atol=1e-5)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)  # of up to 20
    assert min(gradient.abs().max() for gradient in expected.values()) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_merge_and_unloads(adapted, make_model, kind):
    model = adapted(kind)
    start, merged = values(model), dict(checkpoint_weights(model))
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    torch.testing.assert_close(merged, dict(expected), rtol=0, atol=1e-6)
    assert all(torch.equal(value, start[name]) for name, value in values(model).items())
    if kind != "head trained":  # a copy that has not been trained yet
        base = values(make_model())
        assert max((merged[name] - base[name]).abs().max() for name in base) > 1e-2


def test_base_weights_know_nothing_of_the_adapter(adapted, make_model):
    torch.testing.assert_close(dict(base_weights(adapted())), dict(make_model().state_dict()), rtol=0, atol=0)


def test_engines_are_given_merged_weights(make_lora_trainer, make_model):
    trainer = make_lora_trainer()
    trainer.learner.learn(BATCH)
    trainer._sync_engine()
    served = make_model()
    served.load_state_dict(trainer.engine.given)
    batch_logprobs = completion_logprobs(served, BATCH)
    torch.testing.assert_close(batch_logprobs, completion_logprobs(trainer.model, BATCH), rtol=0, atol=1e-4)
    assert (batch_logprobs - completion_logprobs(make_model(), BATCH)).abs().max() > 1e-2


def test_the_reference_is_the_base(make_lora_trainer, make_model):
    learner = make_lora_trainer(beta=0.1).learner
    ref_logprobs = torch.cat(column(learner._with_reference(BATCH), "ref_logprobs"))
    torch.testing.assert_close(ref_logprobs, completion_logprobs(make_model(), BATCH).detach(), rtol=1e-5, atol=1e-5)
    assert (ref_logprobs - completion_logprobs(learner.policy.model, BATCH)).abs().max() > 1e-2
    assert learner.reference is None


@pytest.mark.parametrize("kind", ["plain", "head trained", "pissa"])
def test_the_reference_of_an_adapter_that_came_along_is_that_adapter(make_lora_trainer, adapted, kind):
    trainer = make_lora_trainer(adapted(kind), peft_config=None, beta=0.1)
    model, start = trainer.model, completion_logprobs(adapted(kind), BATCH).detach()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    torch.testing.assert_close(completion_logprobs(model, BATCH).detach(), start, rtol=1e-5, atol=1e-5)
    trainer.learner.learn(BATCH)
    ref_logprobs = torch.cat(column(trainer.learner._with_reference(BATCH), "ref_logprobs"))
    torch.testing.assert_close(ref_logprobs, start, rtol=1e-5, atol=1e-5)
    assert (completion_logprobs(model, BATCH) - start).abs().max() > 1e-2
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
    assert not any(".ref." in name for name in trained)
    assert not any(".ref." in name for name in load_file(trainer.save_model() / "adapter_model.safetensors"))


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("frozen", ["lora_A", "layers.0", "v_proj"])
def test_what_a_user_has_frozen_of_an_adapter_stays_so(make_lora_trainer, adapted, frozen, is_new):
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.data.mul_(not (is_new and "lora_B" in name))
        parameter.requires_grad_("lora_" in name and frozen not in name)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    learner = make_lora_trainer(model, peft_config=None, beta=0.1).learner
    start = values(model)
    for _ in range(2):
        learner._with_reference(BATCH)
        learner.learn(BATCH)
        assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
    assert {name for name, value in values(model).items() if not torch.equal(value, start[name])} == trained


@pytest.mark.parametrize("zeroed", [("lora_B", "lora_embedding_A"), ("lora_B",), ("lora_embedding_A",)])
def test_a_new_adapter_that_came_along_has_its_base_as_reference(make_lora_trainer, adapted, zeroed):
    model = adapted("embedding")
    for name, parameter in model.named_parameters():
        if any(map(name.__contains__, zeroed)):
            parameter.data.zero_()
    start, is_new = completion_logprobs(model, BATCH).detach(), len(zeroed) == 2
    learner = make_lora_trainer(model, peft_config=None, beta=0.1).learner
    assert ("ref" in model.peft_config) != is_new
    learner.learn(BATCH)
    ref_logprobs = torch.cat(column(learner._with_reference(BATCH), "ref_logprobs"))
    torch.testing.assert_close(ref_logprobs, start, rtol=1e-5, atol=1e-5)
    assert (completion_logprobs(model, BATCH) - start).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["plain", "head trained"])
def test_stopped_and_resumed_is_the_same_run(make_lora_trainer, tmp_path, kind):
    whole = make_lora_trainer(kind=kind, output_dir=str(tmp_path / "whole"), max_steps=4, beta=0.1)
    whole.train()
    cut = make_lora_trainer(kind=kind, output_dir=str(tmp_path / "cut"), max_steps=4, save_steps=2, beta=0.1)
    cut.train()
    resumed = make_lora_trainer(
        kind=kind, output_dir=str(tmp_path / "cut"), overwrite_output_dir=False, max_steps=4, save_steps=2, beta=0.1
    )
    resumed.train(resume_from_checkpoint=tmp_path / "cut" / "checkpoint-2")
    expected = values(whole.model)
    assert all(torch.equal(value, expected[name]) for name, value in values(resumed.model).items())
    state = load_file(tmp_path / "cut" / "checkpoint-2" / "optimizer.safetensors")
    moments = {name.split("/")[2] for name in state}  # optimizer/state/<parameter>/<moment>
    trained = {f"model.{name}" for name, p in resumed.model.named_parameters() if p.requires_grad}
    assert moments == trained


def test_a_checkpoint_is_what_peft_loads(make_lora_trainer, make_model):
    trainer = make_lora_trainer(kind="head trained")
    trainer.learner.learn(BATCH)
    directory = trainer.save_model()
    assert not (directory / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(make_model(), directory)
    assert all(torch.equal(value, values(trainer.model)[name]) for name, value in values(loaded).items())
    assert json.loads((directory / "adapter_config.json").read_text())["r"] == 4


def test_a_checkpoint_of_another_adapter_is_refused(adapted, make_model, tmp_path):
    saver_of(adapted()).save_pretrained(str(tmp_path))
    other = get_peft_model(make_model(), LoraConfig(**{**PLAIN, "r": 2}))
    with pytest.raises(CheckpointError, match=r"lora_A.weight' is float32 \[4, .*\], where this run has float32 \[2, "):
        read_adapter(other, tmp_path)


def test_other_scales_are_another_run(make_lora_trainer, tmp_path):
    make_lora_trainer(max_steps=2).save_checkpoint()
    other = LoraConfig(**{**PLAIN, "lora_alpha": 16})
    trainer = make_lora_trainer(max_steps=2, peft_config=other, overwrite_output_dir=False)
    with pytest.raises(CheckpointError, match=r"'lora_alpha': 16.* to resume from .*'lora_alpha': 8"):
        trainer.train(resume_from_checkpoint=True)


def test_the_adapter_starts_from_the_seed_and_leaves_the_generator_alone(make_lora_trainer, adapted):
    starts, drawn = [], []
    for options in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {"seed": 1, "model": adapted(), "peft_config": None}):
        starts.append(values(make_lora_trainer(**options).model))
        drawn.append(torch.rand(()))
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert torch.equal(starts[0][name], starts[1][name])
    assert not torch.equal(starts[0][name], starts[2][name])
    assert drawn[0] == drawn[3]  # what is drawn next does not depend on whether an adapter was made


def test_dropout_before_the_adapter_does_not_look_like_a_stale_engine(make_lora_trainer):
    trainer = make_lora_trainer(peft_config=LoraConfig(**PLAIN, lora_dropout=0.2), max_steps=1)
    assert trainer.train().metrics["sampling/sampling_logp_difference/max"] > 1e-3


def test_the_transformers_engine_samples_from_the_adapter(adapted, tokenizer):
    model = adapted()
    engine = choose_engine("transformers", GRPOConfig(), model, tokenizer)
    assert isinstance(engine, TransformersEngine)
    rollouts = engine.generate([[2, 3, 4]], SamplingParams(n=4, max_tokens=6, seed=0))
    batch = batch_of(
        prompt_ids=rollouts.prompt_ids * 4,
        completion_ids=rollouts.completion_ids,
        sampling_logprobs=None,
        advantage=torch.zeros(4),
    )
    logprobs = torch.tensor([value for row in rollouts.sampling_logprobs for value in row])
    torch.testing.assert_close(logprobs, completion_logprobs(model, batch).detach(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (PrefixTuningConfig(num_virtual_tokens=2), UnsupportedError, "PrefixTuningConfig as peft_config"),
        (AdaLoraConfig(total_step=3), UnsupportedError, "AdaLoraConfig as peft_config"),  # no LoRA, but a LoraConfig
        ("lora", WrongTypeError, "got a str as peft_config"),
        (LoraConfig(init_lora_weights="pissa"), UnsupportedError, "init_lora_weights='pissa'"),
        (LoraConfig(trainable_token_indices=[3]), UnsupportedError, "trainable_token_indices"),
        (LoraConfig(lora_alpha=0), InputError, "learns nothing; fix: lora_alpha=r"),
        (LoraConfig(lora_alpha=math.nan), InputError, "learns nothing; fix: lora_alpha=r"),
        (LoraConfig(alpha_pattern=[1]), InputError, "PEFT refuses"),
        (LoraConfig(alpha_pattern={"q_proj": 0}), InputError, "learns nothing; fix: lora_alpha=r"),
        (
            LoraConfig(**KINDS["head"], lora_dropout=0.1),
            UnsupportedError,
            "dropout, a bias or a variant like DoRA on the head",
        ),
        (
            LoraConfig(**KINDS["head"], use_dora=True),
            UnsupportedError,
            "dropout, a bias or a variant like DoRA on the head",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(make_lora_trainer, config, error, message):
    with pytest.raises(error, match=message):
        make_lora_trainer(peft_config=config)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", ["head", "head trained", "embedding"])
def test_an_adapter_on_tied_ends_is_refused(make_lora_trainer, make_model, kind):
    with pytest.raises(InputError, match="tied"):
        make_lora_trainer(make_model(tie_word_embeddings=True), kind)


def test_arguments_that_contradict_each_other_are_refused(make_lora_trainer, adapted, make_model):
    with pytest.raises(InputError, match="has an adapter and a peft_config"):
        make_lora_trainer(adapted())
    with pytest.raises(UnsupportedError, match="sync_ref_model=True with an adapter"):
        make_lora_trainer(beta=0.1, sync_ref_model=True)
    for bias in ("all", "lora_only"):
        with pytest.raises(UnsupportedError, match=f"bias='{bias}'.* trains biases of the base, and a reference"):
            make_lora_trainer(peft_config=LoraConfig(**KINDS["plain"], bias=bias), beta=0.1)
    for beta in (0.0, 0.1):
        with pytest.raises(InputError, match="is_trainable=True"):
            make_lora_trainer(adapted().requires_grad_(False), peft_config=None, beta=beta)
    # As its `add_adapter` does, which in transformers 5.24 wants a PEFT that is not there yet.
    inside = inject_adapter_in_model(LoraConfig(**PLAIN), make_model())
    with pytest.raises(InputError, match=r"a Qwen2ForCausalLM that has an adapter, .*PeftModel.from_pretrained\("):
        make_lora_trainer(inside, peft_config=None)


@pytest.mark.parametrize("is_trainable", [False, True])
def test_a_disabled_adapter_is_refused_and_trains_once_enabled(make_lora_trainer, make_model, is_trainable):
    model = get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"]))
    model.base_model.disable_adapter_layers()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trainable and "lora_" in name)
    with pytest.raises(InputError, match=r"enable_adapter_layers\(\)"):
        make_lora_trainer(model, peft_config=None)
    model.base_model.enable_adapter_layers()
    make_lora_trainer(model, peft_config=None).train()
    assert any(parameter.any() for name, parameter in model.named_parameters() if "lora_B" in name)


CHANGES = {
    "merged": (lambda model: model.merge_adapter(), "adapter is merged", None),
    "gone": (lambda model: model.merge_and_unload(), "not as they were", "without 28 of the 28 trained weights"),
    "another": (lambda model: model.set_adapter("other"), "not as they were", "without 28 of the 28 trained"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_adapter_that_is_no_longer_the_trained_one(make_lora_trainer, adapted, tmp_path, name):
    change, untrained, unsaved = CHANGES[name]
    model = adapted()
    model.add_adapter("other", LoraConfig(**PLAIN))
    trainer = make_lora_trainer(model, peft_config=None, engine=TransformersEngine, max_steps=2)
    change(model)
    with pytest.raises(InputError, match=untrained):
        trainer.train()
    with nullcontext() if unsaved is None else pytest.raises(InputError, match=unsaved):
        trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved").exists() is (unsaved is None)


def test_an_adapter_that_a_callback_puts_in_the_place_of_the_trained_one(make_lora_trainer, adapted):
    model = adapted()
    model.add_adapter("other", LoraConfig(**PLAIN))
    trainer = make_lora_trainer(model, peft_config=None, engine=TransformersEngine)
    trainer.add_callback(
        type("Switch", (TrainerCallback,), {"on_step_end": lambda *args, **more: model.set_adapter("other")})
    )
    with pytest.raises(InputError, match=r"lora_A\.other\.weight, that are not as they were"):
        trainer.train()
    assert trainer.step == 1


@pytest.mark.parametrize("rslora", [False, True])
def test_a_scale_that_no_file_has_is_refused(make_lora_trainer, make_model, rslora):
    patterns = {"rank_pattern": {"0.self_attn.q_proj": 2}, "alpha_pattern": {"1.self_attn.q_proj": 3}}
    model = get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"], use_rslora=rslora, **patterns))
    make_lora_trainer(model, peft_config=None)
    for layer in (layer for layer in model.modules() if hasattr(layer, "set_scale")):
        layer.set_scale("default", 2.0)
        with pytest.raises(InputError, match=r"whose adapter is scaled by set_scale\(\)"):
            make_lora_trainer(model, peft_config=None)
        layer.set_scale("default", 1.0)


def test_a_missing_peft_is_named_with_its_command(make_lora_trainer, monkeypatch):
    config = LoraConfig(**PLAIN)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RuntimeError, match=r"pip install 'fused-grpo\[peft\]'"):
        make_lora_trainer(peft_config=config)


@pytest.mark.engine
@pytest.mark.parametrize(
    "kind", ["merged", "adapter alone", pytest.param("merged with a base in 4 bits", marks=pytest.mark.full)]
)
def test_vllm_and_trainer_agree_after_every_sync(make_model, tokenizer, make_lora_trainer, in_4bit, kind):
    adapter_sync = kind == "adapter alone"
    base = make_model(hidden_size=64, tie_word_embeddings=adapter_sync)
    model = get_peft_model(in_4bit(base) if "4 bits" in kind else base, LoraConfig(**PLAIN))
    args = GRPOConfig(vllm_max_model_length=32, vllm_adapter_sync=adapter_sync)
    engine = choose_engine("vllm", args, model, tokenizer)
    assert isinstance(engine, VLLMAdapterEngine) == adapter_sync
    trainer = make_lora_trainer(model, peft_config=None, engine=lambda *_: engine, max_steps=5)
    start = completion_logprobs(model, BATCH).detach()
    trainer.train()
    lines = [json.loads(line) for line in (trainer.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["weight_version"] for line in lines] == list(range(5))
    assert max(line["sampling/sampling_logp_difference/max"] for line in lines) < 1e-4
    # Far enough that stale weights would have shown, and that without the adapter nothing would agree.
    assert (completion_logprobs(model, BATCH) - start).abs().max() > 1e-2
    with as_reference(model):
        assert (completion_logprobs(model, BATCH) - start).abs().max() > 1e-2


@pytest.mark.engine
def test_an_engine_with_the_adapter_alone_sleeps_with_its_base_model(make_model, tokenizer, monkeypatch):
    # vLLM's CPU build cannot sleep: this is our side of it, the order of calls.
    model = get_peft_model(make_model(hidden_size=64), LoraConfig(**PLAIN))
    args = GRPOConfig(vllm_max_model_length=32, vllm_adapter_sync=True)
    engine, calls = choose_engine("vllm", args, model, tokenizer), []
    for name in ("sleep", "wake_up", "collective_rpc"):
        monkeypatch.setattr(engine._llm, name, lambda *a, name=name, **k: calls.append((name, *a, *k.values())))
    monkeypatch.setattr(engine, "_can_sleep", True)
    engine.sleep()
    with pytest.raises(WeightSyncError, match="on a sleeping vllm engine"):
        engine.load_weights([], version=1)
    engine.wake()
    engine.load_weights(adapter_stream(model), version=1)
    engine.close()
    assert calls == [("sleep", 1), ("wake_up",)]


@pytest.mark.engine
def test_a_rank_that_fails_at_its_base_takes_part_in_the_gathers_of_others(monkeypatch):
    base = WeightStream({}, [("a", torch.zeros(1))], is_gathered=True)
    monkeypatch.setattr(inprocess, "base_weights", lambda *_: base)
    engine = VLLMAdapterEngine.__new__(VLLMAdapterEngine)
    vars(engine).update(_llm=None, _asleep=False, _adapter=SimpleNamespace(model=None), weight_dtype=None)
    with pytest.raises(UnavailableError, match="closed"):
        engine._load_first(torch.nn.Identity())
    assert not list(base)


@pytest.mark.engine
def test_an_adapter_that_vllm_has_no_layers_for_is_refused(adapted, tokenizer):
    kinds = {"head trained": "modules_to_save", "embedding": "the embedding", "dora": "use_dora"}
    options = VLLMOptions(max_model_len=32, dtype=torch.float32)
    for kind, message in {**kinds, "parameter": "target_parameters"}.items():
        with pytest.raises(UnsupportedError, match=message):
            VLLMAdapterEngine(adapted(kind), tokenizer, options)
    with pytest.raises(UnsupportedError, match=r"in float32 on a GPU with vllm_adapter_sync, .*fix: vllm_dtype='bf"):
        VLLMAdapterEngine(adapted().to("meta"), tokenizer, options)
    with pytest.raises(InputError, match=r"with the engine 'transformers' .* want vLLM"):
        choose_engine("transformers", GRPOConfig(vllm_adapter_sync=True), adapted(), tokenizer)
