"""What a trainer refuses when it is made, and the names of the weights that it serves."""

import ast
import inspect

import pytest
import torch
from accelerate import Accelerator
from peft import IA3Config, LoraConfig
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback

from fused_grpo.errors import InputError, UnsupportedError, WeightSyncError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.learner import Learner
from fused_grpo.trainer.transformers_face import TransformersFace

NAN = float("nan")


def test_an_effective_batch_of_broken_groups_is_refused_before_writing(make_trainer, tmp_path):
    with pytest.raises(
        InputError, match=r"= 6 sequences .* multiple of num_generations=4; fix: make the product 4 or 8"
    ):
        make_trainer(per_device_train_batch_size=3, gradient_accumulation_steps=2)
    assert not (tmp_path / "run").exists()


class Interrupts(TrainerCallback):
    """Raises at the last moment before a script has the trainer, and could close its engine."""

    def __init__(self, error):
        self.error = error

    def on_init_end(self, args, state, control, **_):
        raise self.error


@pytest.mark.parametrize("error", [ValueError("a typo"), StopIteration(), SystemExit(2), KeyboardInterrupt()])
def test_a_trainer_that_cannot_be_made_leaves_no_engine_open(make_trainer, served_engine, error):
    engines = []

    class Remembered(served_engine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            engines.append(self)

    with pytest.raises(type(error)):
        make_trainer(engine=Remembered, callbacks=[Interrupts(error)])
    assert [engine.closed for engine in engines] == [True]


def test_rows_that_a_list_gets_or_loses_later_are_not_those_of_a_run(make_trainer):
    rows, evaluated = [{"prompt": "1+1="}] * 4, {"one": [{"prompt": "2+2="}]}
    trainer = make_trainer(dataset=rows, eval_dataset=evaluated, max_steps=2, eval_strategy="steps", eval_steps=1)
    rows.clear()
    evaluated["one"].append({"prompt": ""})
    evaluated["two"] = []
    trainer.train()
    assert len(trainer.train_dataset) == 4
    assert {name: len(dataset) for name, dataset in trainer.eval_dataset.items()} == {"one": 1}


@pytest.mark.parametrize(("use_vllm", "corrects"), [(False, False), (True, True)])
def test_a_rollout_func_is_corrected_for_where_it_is_vllms(
    make_model, tokenizer, tmp_path, monkeypatch, use_vllm, corrects
):
    """TRL's rule. It is vLLM's with `use_vllm` alone: by itself, the log-probs are for the user to look at."""
    monkeypatch.setattr("fused_grpo.trainer.engines.engine_choice._make_engine", lambda *_: None)
    args = GRPOConfig(str(tmp_path), use_vllm=use_vllm)
    options = {"processing_class": tokenizer, "rollout_func": lambda prompts, trainer: None}
    trainer = GRPOTrainer(make_model(), lambda completions: completions, args, [{"prompt": "1+1="}], **options)
    assert (trainer.learner.loss_config.sampling_correction is not None) == corrects


def test_what_is_no_reward_function_is_refused(make_trainer):
    with pytest.raises(InputError, match="want a function or a non-empty list of functions"):
        make_trainer([])
    with pytest.raises(InputError, match="got 2 reward_weights for 1 reward functions"):
        make_trainer(reward_weights=[1.0, 2.0])
    with pytest.raises(InputError, match="want finite numbers"):
        make_trainer(reward_weights=[NAN])


def test_a_peft_config_stays_as_it_was_given(make_trainer):
    config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    before = config.to_dict()
    make_trainer(peft_config=config)
    assert config.to_dict() == before  # so that another model has its own layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 4}, "got a dict as peft_config"),
        (LoraConfig(target_modules=["qq_proj"]), "PEFT refuses for a Qwen2ForCausalLM .*qq_proj.* not found"),
        (LoraConfig(init_lora_weights="pissa"), "got init_lora_weights='pissa'"),
        (IA3Config(), "got a IA3Config as peft_config"),
    ],
)
def test_an_adapter_that_peft_refuses_is_so_before_its_base_is_loaded(model_path, monkeypatch, config, message):
    monkeypatch.setattr("fused_grpo.trainer.collect.start_checks.load_model", None)
    with pytest.raises((InputError, UnsupportedError), match=message):
        GRPOTrainer(model_path, "length=20", GRPOConfig(), [{"prompt": "1+1="}], peft_config=config)


@pytest.fixture
def model_path(make_model, tokenizer, tmp_path) -> str:
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("dtype", ["float32", "auto", None, torch.float32])
def test_the_arguments_of_trls_script_are_taken(model_path, tmp_path, dtype):
    """By position, with what trl/scripts/grpo.py sets after parsing."""
    args = GRPOConfig(str(tmp_path / "run"), use_vllm=False, use_cpu=True)
    args.model_init_kwargs = {"revision": None, "trust_remote_code": False, "attn_implementation": None, "dtype": dtype}
    rows = [{"prompt": "1+1=", "answer": "2"}]
    trainer = GRPOTrainer(model_path, ["accuracy"], args, rows, None, None, None, None, (None, None), None, None)
    assert trainer.accelerator.device.type == "cpu"
    assert next(trainer.model.parameters()).dtype == torch.float32


def test_options_for_loading_a_loaded_model_are_a_warning(make_trainer, caplog):
    warn_once.cache_clear()
    make_trainer(model_init_kwargs={"dtype": "float32"}, use_vllm=False)
    make_trainer(model_init_kwargs={"dtype": "float32"}, use_vllm=False)
    assert caplog.text.count("got model_init_kwargs ['dtype'] with a Qwen2ForCausalLM") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance_sampling_level": "sequence"}, "loss_type='dapo', which weights each sequence"),
        ({"importance_sampling_level": "sequence", "loss_type": "vespo"}, "fix: importance_sampling_level='token'"),
        ({"loss_type": "luspo"}, "fix: importance_sampling_level='sequence'"),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, None),
        ({}, None),
    ],
)
def test_a_ratio_of_another_level_than_the_losss_is_a_warning(make_trainer, caplog, options, message):
    warn_once.cache_clear()
    make_trainer(**options)
    assert message in caplog.text if message else "importance_sampling_level" not in caplog.text


def test_tokenizers_of_rewards_that_do_not_match_them_are_refused(make_model, tokenizer, tmp_path):
    options = {"processing_class": tokenizer, "reward_processing_classes": [tokenizer, tokenizer]}
    with pytest.raises(ValueError, match="must match"):
        GRPOTrainer(make_model(), lambda **columns: [], GRPOConfig(str(tmp_path)), [{"prompt": "1"}], **options)


def test_an_engine_is_given_the_names_of_a_checkpoint(tokenizer, tmp_path):
    """Experts lie in one tensor while they are trained, and one by one in a checkpoint."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(tokenizer), **sizes, **experts))
    model.save_pretrained(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    learner = Learner(model, GRPOConfig(), Accelerator(cpu=True), max_steps=1)
    served = dict(learner.served_weights())
    assert served.keys() == saved.keys() != model.state_dict().keys()
    assert all(torch.equal(served[name], tensor) for name, tensor in saved.items())


def test_an_engine_on_the_model_itself_is_sent_no_weights(make_trainer, monkeypatch):
    trainer, given = make_trainer(max_steps=2, engine=TransformersEngine), []
    monkeypatch.setattr(trainer.engine, "load_weights", lambda weights, version: given.append(list(weights)))
    with pytest.raises(WeightSyncError):  # since this does not store the version
        trainer.train()
    assert given == [[]]


def test_a_type_checker_knows_the_options_that_a_trainer_has():
    names = ast.walk(ast.parse(inspect.getsource(TransformersFace)))
    fields = {node.id for node in names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    copied = {name for name in vars(GRPOConfig()) if isinstance(vars(TransformersFace).get(name), property)}
    assert {"num_generations", "beta", "temperature", "min_p", "shuffle_dataset"} <= copied <= {*fields, "epsilon_high"}


class CallableEngine(TransformersEngine):
    def __call__(self, prompts, trainer):
        raise AssertionError("it is no rollout_func")


def test_an_engine_that_can_be_called_is_no_function(make_trainer):
    assert type(make_trainer(engine=CallableEngine, max_steps=1).engine) is CallableEngine


def test_the_model_gets_the_padding_token_of_its_tokenizer(make_model, tokenizer, tmp_path):
    model = make_model(pad_token_id=None)
    assert model.config.pad_token_id is None
    args = GRPOConfig(str(tmp_path), use_vllm=False)
    GRPOTrainer(model, lambda completions: completions, args, [{"prompt": "1+1="}], processing_class=tokenizer)
    assert model.config.pad_token_id == model.generation_config.pad_token_id == tokenizer.pad_token_id
