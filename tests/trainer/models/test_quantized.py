"""QLoRA: a run on a base in 4 bits is that on the weights that it stands for, and engines get just these."""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from numerics import logprobs_of
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel, Qwen2ForCausalLM

from fused_grpo.errors import CheckpointError, InputError, UnavailableError, UnsupportedError, WeightSyncError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.engines import weight_files
from fused_grpo.trainer.engines.checked_engine import WeightCheck
from fused_grpo.trainer.engines.engine_choice import choose_engine
from fused_grpo.trainer.engines.vllm import inprocess
from fused_grpo.trainer.engines.vllm.start_vllm import save_config
from fused_grpo.trainer.models.adapters import adapter_stream, base_codes, base_weights, checkpoint_weights
from fused_grpo.trainer.models.loading import load_teacher
from fused_grpo.trainer.models.memory_estimate import shape_of
from fused_grpo.trainer.models.quantized import check_quantization, keep_exact, layers_in_4bit
from fused_grpo.trainer.types import SamplingParams

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
ATTENTION = {**LORA, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
BASES = {"nf4, scales in 8 bits": {"bnb_4bit_use_double_quant": True}, "fp4": {"bnb_4bit_quant_type": "fp4"}}
IDS = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9]])


def digit_reward(completions, **columns) -> list[float]:
    return [sum(character.isdigit() for character in text) / (len(text) + 1) for text in completions]


@pytest.fixture
def start(tokenizer, served_engine, make_model, tmp_path):
    """A trainer whose engine has a plain model of its own, and checks its log-probs at every step."""

    def start(model, name="run", *, lora=LORA, **options) -> GRPOTrainer:
        engine = served_engine(make_model(hidden_size=64), tokenizer)
        engine.weight_version = -1
        given = {"peft_config": None if isinstance(model, PeftModel) else LoraConfig(**lora)}
        given |= {key: options.pop(key) for key in ("quantization_config", "peft_config") if key in options}
        defaults = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "max_steps": 4}
        defaults |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "adam_epsilon": 1e-4, "beta": 0.1}
        defaults |= {"overwrite_output_dir": True, "save_strategy": "no", "logprob_mismatch": "fail"}
        args = GRPOConfig(str(tmp_path / name), **{**defaults, **options})
        rows = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
        engine = {"rollout_engine": engine}
        return GRPOTrainer(model, digit_reward, args, rows, processing_class=tokenizer, **given, **engine)

    return start


def trained(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters() if value.requires_grad}


def plain_model(config, weights) -> Qwen2ForCausalLM:
    model = Qwen2ForCausalLM(config)
    model.load_state_dict(dict(weights))
    return model.eval()


def distance(model, rollouts) -> float:
    """Of a model's log-probs to the sampler's, the mean over tokens."""
    ours = [torch.tensor(logprobs_of(model, *rollouts.prompt_ids, ids, 1.0)) for ids in rollouts.completion_ids]
    return (torch.cat(ours) - torch.cat(list(map(torch.tensor, rollouts.sampling_logprobs)))).abs().mean().item()


def test_the_card_says_that_the_base_was_in_4_bits_and_loads_it_so(start, make_model, in_4bit, tokenizer):
    model = in_4bit(make_model(hidden_size=64), **BASES["fp4"])
    tokenizer.save_pretrained(model.name_or_path)
    trainer = start(model, max_steps=1)
    card = (trainer.train().checkpoint / "README.md").read_text()
    assert "The base was in 4 bits, and the adapter belongs to that one." in card
    scope = {}
    exec(card.split("```python\n")[1].split("```")[0].replace("run", str(trainer.output_dir / "final")), scope)
    loaded = layers_in_4bit(scope["model"])
    assert len(loaded) == len(layers_in_4bit(model)) > 0
    assert {layer.weight.quant_type for layer in loaded.values()} == {"fp4"}


@pytest.mark.parametrize("base", BASES)
def test_a_run_is_that_on_the_dequantised_base(start, make_model, in_4bit, base):
    model = in_4bit(make_model(hidden_size=64), **BASES[base])
    codes = {name: layer.weight.detach().clone() for name, layer in layers_in_4bit(model).items()}
    plain = plain_model(make_model(hidden_size=64).config, base_weights(model))
    runs = [start(one) for one in (model, plain)]
    logs = []
    for trainer in runs:
        before = trained(trainer)
        trainer.train()
        lines = (trainer.output_dir / "metrics.jsonl").read_text().splitlines()
        logs.append([json.loads(line) for line in lines])
        assert max((before[name] - value).abs().max() for name, value in trained(trainer).items()) > 1e-2
    # The same bits where bitsandbytes calls the GEMM of PyTorch. Its own rounds otherwise: 5e-6 for some last bits.
    torch.testing.assert_close(trained(runs[0]), trained(runs[1]), rtol=0, atol=2e-5)
    for ours, expected in zip(*logs, strict=True):
        for name in ("loss", "kl", "entropy", "grad_norm"):
            assert ours[name] == pytest.approx(expected[name], abs=1e-5), name
        assert ours["sampling/sampling_logp_difference/max"] < 1e-4
    assert max(line["kl"] for line in logs[0]) > 1e-4
    layers = layers_in_4bit(runs[0].model)
    assert all(torch.equal(layer.weight, kept) for layer, kept in zip(layers.values(), codes.values(), strict=True))


def test_a_base_that_dora_wraps_anew_in_each_pass_is_trained(start, make_model, in_4bit):
    trainer = start(in_4bit(make_model(hidden_size=64)), lora={**LORA, "use_dora": True}, max_steps=2)
    before, codes = trained(trainer), [id(layer.weight) for layer in layers_in_4bit(trainer.model).values()]
    trainer.train()
    assert [id(layer.weight) for layer in layers_in_4bit(trainer.model).values()] != codes
    assert max((before[name] - value).abs().max() for name, value in trained(trainer).items()) > 1e-2


def test_stopped_and_resumed_is_the_same_run(start, make_model, in_4bit):
    def prepared():
        model = in_4bit(make_model(hidden_size=64), bnb_4bit_use_double_quant=True)
        return prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})

    whole = start(prepared(), "whole")
    whole.train()
    cut = start(prepared(), "cut", max_steps=2, save_strategy="steps", save_steps=2)
    cut.train()
    assert not list(Path(cut.output_dir).glob("*/model.safetensors"))
    options = {"resume_from_checkpoint": True, "overwrite_output_dir": False}
    resumed = start(prepared(), "cut", **options)
    resumed.train()
    for other in (make_model(hidden_size=64), in_4bit(make_model(hidden_size=64))):
        with pytest.raises(CheckpointError, match="quantization_config="):
            start(other, "cut", **options).train()
    expected = trained(whole)
    assert all(torch.equal(value, expected[name]) for name, value in trained(resumed).items())
    loaded = PeftModel.from_pretrained(prepared(), resumed.save_model())
    with torch.no_grad():
        assert torch.equal(loaded.train()(IDS).logits, resumed.model.train()(IDS).logits)


@pytest.mark.parametrize(
    "kind", [ATTENTION, {**ATTENTION, "use_dora": True}, {**ATTENTION, "modules_to_save": ["lm_head"]}]
)
def test_merged_weights_are_what_the_model_computes_with(make_model, in_4bit, tokenizer, tmp_path, kind):
    model = get_peft_model(in_4bit(make_model(hidden_size=64)), LoraConfig(**kind))
    keep_exact(model)
    served = plain_model(make_model(hidden_size=64).config, checkpoint_weights(model.eval()))
    with torch.no_grad():
        torch.testing.assert_close(served(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
        with model.disable_adapter():
            assert (served(IDS).logits - model(IDS).logits).abs().max() > 0.1
    save_config(model.get_base_model(), tokenizer, folder=str(tmp_path / "of vLLM"), untie=False)
    assert "quantization_config" not in json.loads((tmp_path / "of vLLM" / "config.json").read_text())
    shapes = checkpoint_weights(model).shapes
    assert {name: (weight.shape, weight.dtype) for name, weight in shapes.items()} == {
        name: (weight.shape, weight.dtype) for name, weight in checkpoint_weights(model)
    }


def test_a_checkpoint_in_4_bits_is_merged_exactly(make_model, in_4bit, tmp_path):
    in_4bit(make_model(hidden_size=64), dtype=torch.bfloat16).save_pretrained(tmp_path / "codes")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "codes", dtype=torch.float32).train()
    model = get_peft_model(base, LoraConfig(**{**ATTENTION, "lora_bias": True}))
    keep_exact(model)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter) if "lora_B" in name and "bias" in name else None
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    served = plain_model(make_model(hidden_size=64).config, checkpoint_weights(model))
    with torch.no_grad():
        # transformers 5.24 computes in the dtype of the checkpoint, whatever it is asked for.
        own, error = model(IDS).logits, 1e-4 if base.dtype == torch.float32 else 0.1
        torch.testing.assert_close(served(IDS).logits, own.float(), rtol=error, atol=error)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    codes = dict(base_codes(model, torch.bfloat16))
    assert torch.equal(codes["model.layers.1.mlp.up_proj.weight"], base.model.layers[1].mlp.up_proj.weight)


def test_rounding_to_the_compute_dtype_passes_the_check(make_model, in_4bit):
    model = in_4bit(make_model(hidden_size=64), bnb_4bit_compute_dtype="bfloat16")
    check = WeightCheck(GRPOConfig(bf16=False), model, torch.device("cpu"))
    engine = SimpleNamespace(name="vllm", weight_version=3, weight_dtype=torch.float32)
    check(0.001, 0.009, engine=engine)
    with pytest.raises(WeightSyncError, match="in bfloat16"):
        check(0.2, 0.5, engine=engine)


def test_the_trainer_loads_and_samples_from_a_base_in_4_bits(start, make_model, tmp_path, tokenizer):
    make_model(hidden_size=64).save_pretrained(tmp_path / "saved")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    trainer = start(str(tmp_path / "saved"), quantization_config=config)
    assert len(layers_in_4bit(trainer.model)) == 2 * 7
    engine = choose_engine("transformers", GRPOConfig(), trainer.model, tokenizer)
    rollouts = engine.generate(IDS.tolist(), SamplingParams(n=1, max_tokens=4, seed=0))
    tokens = rollouts.completion_ids[0]
    with torch.no_grad():
        logits = trainer.model(torch.cat([IDS, torch.tensor([tokens])], 1)).logits[0, IDS.shape[1] - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(rollouts.sampling_logprobs[0]), expected, rtol=0, atol=1e-5)


def test_sampling_does_not_round_the_scales(start, make_model, in_4bit):
    model = in_4bit(make_model(hidden_size=64))
    for layer in layers_in_4bit(model).values():  # as on a CPU with AVX512-BF16
        layer.support_avx512bf16_for_cpu = True
    trainer = start(model)
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers_in_4bit(trainer.model).values())
    teacher = in_4bit(make_model(hidden_size=64))
    for layer in layers_in_4bit(teacher).values():
        layer.support_avx512bf16_for_cpu = True
    alone, sharded = (
        SimpleNamespace(device=torch.device("cpu"), distributed_type=DistributedType[kind]) for kind in ("NO", "FSDP")
    )
    load_teacher(teacher, GRPOConfig(), alone, None)
    with pytest.raises(UnsupportedError, match="under FSDP, want whole codes"):
        load_teacher(teacher, GRPOConfig(), sharded, None)
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers_in_4bit(teacher).values())
    packed = in_4bit(make_model(hidden_size=64))
    packed.model.layers[1].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(InputError, match=r"layers.1.mlp.up_proj bitsandbytes has packed .*fix: load it again"):
        start(packed)


def test_what_cannot_be_trained_or_merged_is_refused(start, make_model, in_4bit, tmp_path, monkeypatch):
    config = BitsAndBytesConfig(load_in_4bit=True)
    make_model().save_pretrained(tmp_path / "saved")
    with pytest.raises(InputError, match="quantised by bitsandbytes and no adapter"):
        start(str(tmp_path / "saved"), quantization_config=config, peft_config=None)
    with pytest.raises(InputError, match="quantization_config twice"):
        start(str(tmp_path / "saved"), quantization_config=config, model_init_kwargs={"quantization_config": config})
    with pytest.raises(UnsupportedError, match="in 8 bits, want 4"):
        start(str(tmp_path / "saved"), quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    other = make_model(hidden_size=64)
    other.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(InputError, match="a quantised model and no adapter"):
        start(other, peft_config=None)
    eight = get_peft_model(in_4bit(make_model(), load_in_4bit=False, load_in_8bit=True), LoraConfig(**ATTENTION))
    for make in (checkpoint_weights, base_weights):
        with pytest.raises(UnsupportedError, match="quantised otherwise than in 4 bits"):
            dict(make(eight))
    with pytest.raises(UnsupportedError, match=r"a Linear4bit of [\w.]+ as the head of"):
        start(in_4bit(make_model(hidden_size=64), llm_int8_skip_modules=["nothing"]))
    with pytest.raises(UnsupportedError, match="under FSDP, want whole codes"):
        check_quantization(config.to_dict(), has_adapter=True, is_sharded=True)
    rounding = in_4bit(make_model(hidden_size=64), bnb_4bit_compute_dtype="bfloat16")
    with pytest.raises(InputError, match=r"trained biases .* fix: bias='none'"):
        start(rounding, lora={**LORA, "bias": "lora_only"})
    merged = get_peft_model(make_model(), LoraConfig(**ATTENTION))
    merged.merge_adapter()
    with pytest.raises(InputError, match=r"adapter is merged.*unmerge_adapter\(\)"):
        start(merged)


@pytest.mark.parametrize("module", [None, SimpleNamespace(__version__="0.46.1")], ids=["missing", "old"])
def test_bitsandbytes_is_checked_before_anything_is_loaded(start, make_model, tmp_path, monkeypatch, module):
    make_model().save_pretrained(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(
        UnavailableError, match=r"want version 0.48.1 or later; fix: pip install -U 'fused-grpo\[bnb\]'"
    ):
        start(str(tmp_path / "saved"), quantization_config=BitsAndBytesConfig(load_in_4bit=True))


def test_memory_counts_codes_and_scales(make_model, in_4bit):
    config = make_model(hidden_size=64).config
    planned, loaded = (
        shape_of(config, quantization_config={"load_in_4bit": True}),
        shape_of(in_4bit(make_model(hidden_size=64))),
    )
    assert planned.quantized == loaded.quantized == shape_of(config).matrices
    assert planned.parameters == loaded.parameters == shape_of(config).parameters


def test_vllm_reads_the_codes_of_the_trainer(make_model, in_4bit, tokenizer, monkeypatch):
    """All but vLLM itself, which needs its plugin for this: the options, and a checkpoint that bitsandbytes reads."""
    model = get_peft_model(in_4bit(make_model(hidden_size=64), bnb_4bit_use_double_quant=True), LoraConfig(**ATTENTION))
    keep_exact(model)
    args = GRPOConfig(vllm_max_model_length=32, vllm_adapter_sync=True, vllm_dtype="bfloat16")
    monkeypatch.setattr(weight_files, "_PLUGIN", "no_such_plugin")
    with pytest.raises(UnavailableError, match="pip install vllm-bnb-plugin"):
        choose_engine("vllm", args, model, tokenizer)
    monkeypatch.setattr(weight_files, "_PLUGIN", "json")
    with pytest.raises(UnsupportedError, match="want 16 bits"):
        choose_engine("vllm", GRPOConfig(vllm_max_model_length=32, vllm_adapter_sync=True), model, tokenizer)

    def started(folder, *, options, **more):
        assert (options["quantization"], options["load_format"]) == ("bitsandbytes", "bitsandbytes")
        (file,) = Path(folder).glob("*.safetensors")
        file.rename(file.with_name("model.safetensors"))  # vLLM takes any name, and transformers this one
        read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        with torch.no_grad(), model.disable_adapter():
            torch.testing.assert_close(read(IDS).logits, model(IDS).logits, rtol=0.02, atol=0.1)
        for name, layer in layers_in_4bit(model).items():
            own = read.get_submodule(name.removeprefix("base_model.model.").removesuffix(".base_layer"))
            assert torch.equal(own.weight, layer.weight)
            assert torch.equal(own.weight.quant_state.absmax, layer.weight.quant_state.absmax)
        raise KeyboardInterrupt(folder)

    monkeypatch.setattr(inprocess, "start_vllm", started)
    with pytest.raises(KeyboardInterrupt) as stopped:
        choose_engine("vllm", args, model, tokenizer)
    assert not Path(str(stopped.value)).exists()


@pytest.mark.full
@pytest.mark.engine
def test_vllm_with_its_plugin_follows_the_adapter(make_model, in_4bit, tokenizer):
    pytest.importorskip("vllm_bnb_plugin", reason="vLLM's plugin for bitsandbytes is not installed")
    torch.manual_seed(0)
    model = get_peft_model(in_4bit(make_model(hidden_size=64), bnb_4bit_use_double_quant=True), LoraConfig(**ATTENTION))
    keep_exact(model)
    args = GRPOConfig(vllm_max_model_length=32, vllm_adapter_sync=True, vllm_dtype="bfloat16")
    engine, start = choose_engine("vllm", args, model.eval(), tokenizer), copy.deepcopy(model)
    for version in range(3):
        rollouts = engine.generate(IDS.tolist(), SamplingParams(n=4, max_tokens=8, seed=0))
        current, stale = distance(model, rollouts), distance(start, rollouts)
        assert current < 0.1
        assert version == 0 or stale > 5 * current
        for name, parameter in model.named_parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter) if "lora_" in name else 0)
        engine.load_weights(adapter_stream(model), version=version + 1)
    engine.close()


@pytest.mark.parametrize(("engine", "adapter_sync"), [("vllm", False), ("vllm", True), ("server", False)])
def test_a_layer_that_checkpoints_have_transposed_is_refused_by_name(in_4bit, tokenizer, engine, adapter_sync):
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": len(tokenizer)}
    model = get_peft_model(in_4bit(GPT2LMHeadModel(GPT2Config(**sizes))), LoraConfig(r=4, target_modules=["c_attn"]))
    args = GRPOConfig(vllm_max_model_length=32, vllm_adapter_sync=adapter_sync)
    with pytest.raises(UnsupportedError, match=r"^got transformer\.h\.0\.attn\.c_attn.* in 4 bits, a Conv1D .*; fix: "):
        choose_engine(engine, args, model, tokenizer)
