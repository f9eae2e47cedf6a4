"""The dry run: the trainer's own arithmetic, options that are a config file, and the measured memory."""

import copy
from functools import partial

import pytest
import torch
import yaml
from peft import LoraConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from tiny_models import tiny_config
from transformers import GPT2Config, GPT2LMHeadModel

from fused_grpo.errors import DataError, InputError
from fused_grpo.trainer.cli.main import main
from fused_grpo.trainer.cli.options import TrainOptions, parse_train_options
from fused_grpo.trainer.cli.train import dry_run, resolved
from fused_grpo.trainer.collect.plan import batch_table
from fused_grpo.trainer.collect.start_checks import Start
from fused_grpo.trainer.data.prompt_sampler import planned_steps
from fused_grpo.trainer.models.memory_estimate import memory_terms, micro_batch_tokens, shape_of


def sizes(shape, args, **options):
    facts = {"prompt_tokens": 10, "processes": 1, "engine": "server"}
    return {term.name: term.size for term in memory_terms(shape, args, **facts | options)}


def test_the_resolved_options_are_a_file_that_gives_the_same_options(tmp_path):
    arguments = ["--model", "m", "--learning-rate", "3e-6", "--reward-funcs", "a:b", "--generation-kwargs", '{"a": 1}']
    options = parse_train_options([*arguments, "--no-gradient-checkpointing", "--epsilon-high", "0.3", "--resume"])
    file = tmp_path / "again.yaml"
    file.write_text(resolved(options))
    assert set(yaml.safe_load(file.read_text())) == {
        "model", "learning_rate", "reward_funcs", "generation_kwargs", "gradient_checkpointing", "epsilon_high",
        "resume_from_checkpoint",
    }  # fmt: skip
    assert parse_train_options(["--config", str(file)]).trainer_args() == options.trainer_args()


def test_the_arithmetic_says_what_the_trainer_will_do():
    options = TrainOptions(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4, steps_per_generation=4,
        num_iterations=3, num_train_epochs=2,
    )  # fmt: skip
    shown = batch_table(options, processes=2, prompts=100)
    assert "16 sequences = 4 prompts x 4" in shown
    assert "2 micro-batches of 4 on each of 2 processes" in shown
    assert "generated for 2 steps at a time: 32 sequences = 8 prompts x 4" in shown
    assert "used 3 times" in shown
    assert "100 prompts = 75 optimizer steps" in shown
    assert "the run: 150 optimizer steps (num_train_epochs)" in shown
    with pytest.raises(InputError, match="effective batch"):
        batch_table(TrainOptions(per_device_train_batch_size=3), processes=1, prompts=None)


def test_planned_steps_are_those_of_the_trainer(make_trainer):
    options = {"max_steps": -1, "num_train_epochs": 1.5, "num_iterations": 2, "num_generations": 2}
    trainer = make_trainer(**options)
    shown = batch_table(TrainOptions(per_device_train_batch_size=4, **options), processes=1, prompts=16)
    assert f"{trainer.max_steps} optimizer steps (num_train_epochs)" in shown


def test_a_tenth_of_an_epoch_is_no_rounding_more():
    args = TrainOptions(num_train_epochs=1.1, per_device_train_batch_size=8, num_generations=8)
    assert planned_steps(args, 100, 1)[0] == 110


@pytest.mark.parametrize("tied", [True, False])
def test_weights_gradients_and_optimizer_state_are_exact(make_model, tied):
    model = make_model(tie_word_embeddings=tied)
    estimate = sizes(shape_of(model.config), TrainOptions(beta=0.1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2]])).logits.sum().backward()
    optimizer.step()
    held = sum(p.nbytes for p in model.parameters())
    assert estimate["weights, fp32"] == held == estimate["reference model, fp32"]
    assert estimate["gradients, fp32"] == sum(p.grad.nbytes for p in model.parameters())
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert estimate["AdamW state, fp32"] == sum(value.nbytes for value in moments)


@pytest.mark.parametrize(("options", "copies"), [({}, 3), ({"vllm_adapter_sync": True}, 1)])
def test_weights_on_their_way_to_a_server_beside_the_trainer_are_counted(make_model, options, copies):
    model, name = make_model(), "weights on their way, float32"
    held = sum(parameter.nbytes for parameter in model.parameters())
    args = TrainOptions(use_cpu=True, generate_ahead=3, **options)
    assert sizes(shape_of(model), args, engine="vllm")[name] == copies * held
    assert name not in sizes(shape_of(model), TrainOptions(use_cpu=True), engine="vllm")


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_the_layers_keep(make_model, bf16, checkpointing):
    model = make_model(hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_key_value_heads=2).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    kept, weights = {}, {p.data_ptr() for p in model.parameters()}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", enabled=bf16):
        model.get_decoder()(torch.ones(4, 64, dtype=torch.int64), use_cache=False)
    shape, args = shape_of(model.config), TrainOptions(gradient_checkpointing=checkpointing, num_generations=4)
    args.per_device_train_batch_size, args.max_completion_length, args.bf16 = 4, 54, bf16
    estimate = sizes(shape, args)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    if bf16 and not checkpointing:
        measured -= estimate["bf16 copies of matrices"]  # autograd keeps these too
    if checkpointing:  # and the one layer that is being recomputed
        one_layer = sizes(shape, args)["activations, roughly"] - 256 * 4 * 64 * (4 + 2)
        measured += one_layer
    assert measured == pytest.approx(estimate["activations, roughly"], rel=0.25)


def test_an_adapter_has_its_own_count_and_no_reference(make_model):
    options = TrainOptions(use_peft=True, lora_r=4, beta=0.1)
    model = make_model()
    shape = shape_of(model.config, options.peft_config())
    wrapped = get_peft_model(copy.deepcopy(model), options.peft_config())
    assert shape.trained == wrapped.get_nb_trainable_parameters()[0]
    estimate = sizes(shape, options)
    assert "reference model, fp32" not in estimate
    assert "the head's new gradient" not in estimate
    only_queries = shape_of(model.config, LoraConfig(r=4, target_modules=["q_proj"]))
    assert only_queries.trained == 2 * 4 * (32 + 32)


LORA = partial(LoraConfig, task_type="CAUSAL_LM", r=4)
CONV1D = GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=2)


@pytest.mark.parametrize(
    ("peft_config", "config"),
    [
        (LORA(target_modules=["layers.0.self_attn.q_proj"]), None),
        (LORA(target_modules=r".*\.q_proj", use_dora=True), None),
        (LORA(), None),
        (LORA(target_modules=["q_proj"], layers_to_transform=[0], rank_pattern={"q_proj": 16}), None),
        (LORA(target_modules=["q_proj"], modules_to_save=["lm_head"]), None),
        (LORA(target_modules=["embed_tokens"]), None),
        (LORA(target_modules=["c_attn"], bias="all", fan_in_fan_out=True), CONV1D),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), None),
        (PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16), None),
    ],
)
@pytest.mark.parametrize("loaded", [False, True])
def test_every_kind_of_adapter_has_pefts_count(make_model, peft_config, config, loaded):
    model = make_model() if config is None else GPT2LMHeadModel(config)
    shape = shape_of(model if loaded else model.config, peft_config)
    assert all(weight.requires_grad and not weight.is_meta for weight in model.parameters())
    adapted = get_peft_model(model, copy.deepcopy(peft_config))
    assert (shape.trained, shape.parameters) == adapted.get_nb_trainable_parameters()


def test_a_teacher_is_counted_with_its_chunk_and_the_reference_once(make_model):
    shape, wider = (shape_of(make_model(hidden_size=size).config) for size in (32, 64))
    options = TrainOptions(
        teacher_model="self", distillation_coef=1.0, per_device_train_batch_size=1, num_generations=1
    )
    self_sizes, wider_sizes = (sizes(shape, options, teacher=teacher) for teacher in ("self", wider))
    assert self_sizes["reference model, fp32"] == self_sizes["weights, fp32"]
    assert not any(name.startswith("teacher") for name in self_sizes)
    assert wider_sizes["teacher, float32"] == sum(p.nbytes for p in make_model(hidden_size=64).parameters())
    assert "reference model, fp32" not in wider_sizes
    tokens = options.max_completion_length
    assert (self_sizes["hidden states of the teacher"], wider_sizes["hidden states of the teacher"]) == (
        4 * tokens * 32,
        4 * tokens * 64,
    )
    assert wider_sizes["one chunk of its logits"] == 4 * tokens * 22
    wider = shape_of(make_model(hidden_size=64).config, dtype="bfloat16")
    assert sizes(shape, options, teacher=wider)["teacher, bfloat16"] == wider_sizes["teacher, float32"] / 2


def test_weights_count_in_the_dtype_that_they_are_loaded_in(make_model):
    model, options = make_model(hidden_size=64), TrainOptions(beta=0.1)
    whole = [size for name, size in sizes(shape_of(model.config), options).items() if name.endswith(", fp32")]
    for half in (shape_of(model.config, dtype="bfloat16"), shape_of(copy.deepcopy(model).bfloat16())):
        assert [2 * size for name, size in sizes(half, options).items() if name.endswith(", 16 bits")] == whole
    codes = shape_of(model.config, quantization_config={"load_in_4bit": True})
    estimate = sizes(shape_of(model.config), options, teacher=codes)
    assert (estimate["teacher, float32"], estimate["teacher in 4 bits"]) == (
        4 * (codes.parameters - codes.quantized),
        codes.quantized * 9 // 16,
    )


def test_the_chunk_is_never_larger_than_the_logits():
    shape = shape_of(parse_config(vocab_size=1000))
    few = TrainOptions(per_device_train_batch_size=1, gradient_accumulation_steps=8, max_completion_length=10)
    assert sizes(shape, few)["one chunk of logits"] == 4 * 10 * 1000
    assert sizes(shape, TrainOptions(chunk_bytes=12345))["one chunk of logits"] == 12345
    assert micro_batch_tokens(TrainOptions(max_tokens_per_micro_batch=2048), 512) == (2048, 1024)
    assert micro_batch_tokens(TrainOptions(max_tokens_per_micro_batch=1), 512) == (1024, 512)


def test_a_prompt_counts_as_often_as_it_is_computed():
    def tokens(shape=None, **options):
        return micro_batch_tokens(TrainOptions(per_device_train_batch_size=8, **options), 512, shape)[0]

    shape = shape_of(parse_config())
    short = {"num_generations": 4, "max_completion_length": 8}
    assert tokens(shape, **short) == 2 * 512 + 8 * 8
    whole = 8 * (512 + 8)
    assert tokens(**short) == tokens(shape, **short, share_prompts=False) == whole
    assert tokens(shape, **short, model_init_kwargs={"attn_implementation": "flash_attention_2"}) == whole
    assert tokens(shape_of(tiny_config("qwen3_moe")), **short) == whole


def parse_config(**options):
    from transformers import Qwen2Config

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen2Config(**small | options)


def test_what_cannot_be_had_ends_the_dry_run_after_what_can():
    def missing():
        raise DataError("no such file")

    shown = []
    with pytest.raises(DataError, match="no such file"):
        shown.extend(dry_run(TrainOptions(), missing))
    assert len(shown) == 2
    shown.clear()
    options = TrainOptions(model="/no/such/model")
    given = Start(args=options, model=options.model, reward_funcs=[], train_dataset=[{"prompt": "1"}])
    with pytest.raises(DataError, match="got model '/no/such/model', a path that does not exist; want"):
        shown.extend(dry_run(options, lambda: given))
    assert "one epoch" in shown[1]


def test_what_would_happen_to_another_run_is_shown_and_does_not_happen(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name in ("metrics.jsonl", "run.json"):
        (tmp_path / name).write_text("{}\n")
    fates = {(): f"would be moved to {tmp_path / 'former-run-1'}", ("--overwrite-output-dir",): "would be removed"}
    for options, fate in fates.items():
        main(["train", "--dry-run", "--output-dir", str(tmp_path), *options])
        shown = " ".join(capsys.readouterr().out.split())
        assert f"holds another run (metrics.jsonl, run.json), which {fate}" in shown
    with pytest.raises(SystemExit, match="which has no complete checkpoint"):
        main(["train", "--dry-run", "--output-dir", str(tmp_path), "--resume"])
    assert "another run" not in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "run.json"]


def test_the_demo_is_shown_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    main(["train", "--dry-run"])
    shown = capsys.readouterr().out
    assert "1024 sequences = 128 prompts x 8" in shown
    assert "P = 133,568" in shown
    assert "an estimate" in shown
    assert "Left out:" in shown
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "1")
    main(["train", "--dry-run"])
    assert capsys.readouterr().out == ""
