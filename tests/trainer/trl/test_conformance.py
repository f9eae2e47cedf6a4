"""What TRL's own tests of `GRPOTrainer` ask for: cases of one form, which TRL's trainer passes too (`--full`)."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationMixin

from fused_grpo.trainer.common.warnings import warn_once

pytest.importorskip("trl", reason="TRL is not installed")
pytestmark = [pytest.mark.grid, pytest.mark.filterwarnings("ignore")]  # of TRL's, peft's and torch's

REWARD_MODEL, OTHER_REWARD_MODEL = "trl-lib/Qwen2-0.5B-Reward", "trl-lib/Other-Reward"
POLICY, MOE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-30B-A3B"
PLAIN, CONVERSATIONS = "trl-lib/tldr", "trl-lib/DeepMath-103K"
ACCUMULATED = {"gradient_accumulation_steps": 2}
EVERY_2 = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "conversations": {"data": CONVERSATIONS},
    **{
        f"{loss_type} accumulated": {"loss_type": loss_type, **ACCUMULATED}
        for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")
    },
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "two iterations": {"num_iterations": 2},
    "sequence-level ratio": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "reference": {"beta": 0.1},
    "KL that is biased": {"beta": 0.1, "use_bias_correction_kl": False, "num_iterations": 2},
    "off-policy mask": {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
    "head in fp32": {"cast_lm_head_to_fp32": True},
    "top entropy quantile": {"top_entropy_quantile": 0.2},
    "entropy bonus": {"entropy_coef": 0.01},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0},
    "sampling": {"top_p": 0.9, "top_k": 10, "min_p": 0.01, "repetition_penalty": 1.1},
    "no top_k": {"top_k": None},
    "generation options": {"generation_kwargs": {"min_new_tokens": 3}},
    "scaled by group": {"scale_rewards": "group"},
    "scaled by batch": {"scale_rewards": "batch"},
    "not scaled": {"scale_rewards": "none"},
    "scaled, True": {"scale_rewards": True},
    "not scaled, False": {"scale_rewards": False},
    "groups over micro-batches": {"num_generations": 6, **ACCUMULATED},
    "generation over steps": {"steps_per_generation": 4, **ACCUMULATED},
    "generations within a step": {"steps_per_generation": 1, **ACCUMULATED},
    "clipped twice": {"delta": 2.0},
    "delta where it has no use": {"delta": 2.0, "loss_type": "cispo"},
    "workers": {"dataloader_num_workers": 2},
    "no clipping of gradients": {"max_grad_norm": 0.0},
    "template options": {"data": CONVERSATIONS, "chat_template_kwargs": {"thinking": True}},
    "no checkpoints": {"save_strategy": "no"},
    "a checkpoint an epoch": {"save_strategy": "epoch", "logging_strategy": "epoch"},
    "a share of the steps": {"save_steps": 0.5, "logging_steps": 0.5, "save_total_limit": 1},
    "first step logged": {"logging_first_step": True, "disable_tqdm": True},
    "padded": {"pad_to_multiple_of": 8},
    "accelerator": {"accelerator_config": {"split_batches": False}},
    "SGD": {"optim": "sgd"},
    "on the CPU": {"use_cpu": True, "bf16": False},
    "completions logged": {"log_completions": True, "num_completions_to_print": 1, "log_unique_prompts": True},
    "recomputed by re-entering": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "loaded with options": {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"}},
}


def more(*values: Any) -> Any:
    """A case that `make test-full` runs."""
    return pytest.param(*values, marks=pytest.mark.full)


def train(trainer: Any, *, moved: bool = True) -> Any:
    """A run to its end, after which every parameter that requires a gradient is another; or none (`moved`)."""
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert before
    result = trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] is not None
    assert result.training_loss == trainer.state.log_history[-1]["train_loss"]
    assert result.global_step == trainer.state.global_step
    assert trainer.state.num_input_tokens_seen > 0
    after = dict(trainer.model.named_parameters())
    kept = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert kept == (set() if moved else before.keys())
    return trainer


def spread(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Rewards that differ between completions that differ."""
    return [sum(place * token for place, token in enumerate(ids, 1)) % 17 / 17 for ids in completion_ids]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_option_trains_everything(make, options):
    assert train(make(spread, **options)).state.global_step == 4


def test_the_cheapest_call_trains_three_epochs(make):
    trainer = train(make(arguments={"train_dataset": rows("train").select(range(5))}, max_steps=-1))
    assert trainer.state.global_step == 15
    assert trainer.state.epoch == 3.0


def test_a_group_of_one_is_refused(make):
    with pytest.raises(ValueError, match="at least 2"):
        make(num_generations=1)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_generations_eval": 1}, {"eval_on_start": True, "loss_type": "grpo"}, {"eval_delay": 3}],
    ids=["every second step", "one completion", "on start", "delayed"],
)
def test_an_eval_set_is_evaluated_when_the_options_say(make, options):
    trainer = train(make(arguments={"eval_dataset": rows("test")}, **EVERY_2, **options))
    steps = [entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry]
    first = [0] if "eval_on_start" in options else []
    assert steps == ([4] if "eval_delay" in options else [*first, 2, 4])
    assert {"eval_runtime", "eval_completions/mean_length"} <= trainer.state.log_history[-2].keys()


def rows(split: str, *, stream: bool = False) -> Any:
    from datasets import load_dataset

    return load_dataset(PLAIN, split=split, streaming=stream)


@pytest.mark.parametrize("kind", ["dict", more("DatasetDict"), "stream"])
def test_an_eval_set_may_be_several_or_a_stream(make, kind):
    from datasets import DatasetDict

    sets = {"one": rows("test"), "other": rows("test")}
    given = {"dict": sets, "DatasetDict": DatasetDict(sets), "stream": rows("test", stream=True)}[kind]
    trainer = train(make(arguments={"eval_dataset": given}, **EVERY_2))
    for key in ("eval_runtime",) if kind == "stream" else ("eval_one_runtime", "eval_other_runtime"):
        entries = [entry for entry in trainer.state.log_history if key in entry]
        assert [entry["step"] for entry in entries] == [2, 4], key
        assert all(any(name.endswith("reward") for name in entry) for entry in entries)


def test_a_stream_is_trained_on(make):
    trainer = train(make(arguments={"train_dataset": rows("train", stream=True)}))
    assert trainer.state.global_step == 4


def test_a_stream_is_read_by_each_process_and_no_worker(make):
    stream = {"train_dataset": rows("train", stream=True)}
    args = make(arguments=stream, dataloader_num_workers=4).args
    assert (args.accelerator_config.dispatch_batches, args.dataloader_num_workers) == (False, 0)
    with pytest.raises(ValueError, match="Iterable datasets require `dispatch_batches=False`"):
        make(arguments=stream, accelerator_config={"dispatch_batches": True})
    assert make(dataloader_num_workers=4).args.dataloader_num_workers == 4


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"train_dataset": None}, ValueError, "`train_dataset` is required"),
        ({"train_dataset": {"train": [{"prompt": "1"}]}}, TypeError, "`train_dataset` must be a `Dataset` or `Iter"),
    ],
    ids=["no dataset", "several splits"],
)
def test_what_is_no_dataset_is_refused(make, arguments, error, text):
    with pytest.raises(error, match=text):
        make(arguments=arguments)


def test_a_run_without_rewards_and_one_of_too_few_are_refused(make):
    with pytest.raises(ValueError, match="No reward source provided"):
        make(None)
    with pytest.raises(ValueError, match="returned 1 rewards"):
        make(lambda completions, **_: [1.0]).train()


def test_the_entropy_coefficient_can_be_read_as_it_moves(make):
    options = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 15.0, "entropy_coef_delta": 0.005}
    trainer = make(**options, **ACCUMULATED, max_steps=2)
    assert trainer.entropy_coef == 0.01
    trainer.train()
    assert trainer.entropy_coef == pytest.approx(0.02)


def test_a_stream_without_a_number_of_steps_is_refused(make):
    with pytest.raises(ValueError, match="max_steps"):
        make(arguments={"train_dataset": rows("train", stream=True)}, max_steps=-1)


def test_evaluate_after_training_takes_another_set_and_another_prefix(make):
    trainer = make(arguments={"eval_dataset": rows("test")}, max_steps=1, per_device_eval_batch_size=3)
    trainer.train()
    names = {"reward", "reward_std", "runtime", "rewards/Qwen2-0.5B-Reward/mean", "completions/mean_length"}
    assert {f"eval_{name}" for name in names} <= trainer.evaluate().keys()
    metrics = trainer.evaluate(eval_dataset=rows("train").select(range(3)), metric_key_prefix="other")
    assert "other_runtime" in metrics
    assert trainer.state.log_history[-1].keys() >= metrics.keys()


# Adapters and mixtures of experts.


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


@pytest.mark.parametrize(
    ("given", "beta"),
    [("config", 0.1), ("model", 0.1), more("default config", 0.0), more("model", 0.0), more("instance", 0.0)],
)
def test_an_adapter_alone_is_trained(make, given, beta):
    from peft import LoraConfig, get_peft_model

    plain = {name: value.clone() for name, value in AutoModelForCausalLM.from_pretrained(POLICY).named_parameters()}
    model, arguments = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32), {}
    if given == "model":
        model = get_peft_model(model, adapter())
    else:
        arguments["peft_config"] = LoraConfig() if given == "default config" else adapter()
        model = model if given == "instance" else POLICY
    trainer = train(make(model=model, beta=beta, logging_steps=1, arguments=arguments))
    for name, value in trainer.model.named_parameters():
        original = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if original in plain:
            assert torch.equal(value, plain[original]), name
    assert ("kl" in trainer.state.log_history[-2]) == (beta > 0)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", more("PromptEncoderConfig")])
def test_virtual_tokens_alone_are_trained(make, kind):
    import peft

    own = {"tokenizer_name_or_path": POLICY} if kind == "PromptTuningConfig" else {"encoder_hidden_size": 16}
    prompt = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4, **own)
    trainer = make(arguments={"peft_config": prompt})
    before = {name: value.clone() for name, value in trainer.model.named_parameters() if not value.requires_grad}
    train(trainer)
    base = {f"base_model.{name}" for name, _ in AutoModelForCausalLM.from_pretrained(POLICY).named_parameters()}
    assert base == before.keys()
    assert all(torch.equal(value, trainer.model.get_parameter(name)) for name, value in before.items())


def test_a_batch_size_that_finds_itself_is_refused(make):
    with pytest.raises(ValueError, match="auto_find_batch_size"):
        make(auto_find_batch_size=True)


@pytest.mark.parametrize("coefficient", [None, more(0.0), more(0.1)])
def test_the_router_of_a_mixture_of_experts_has_its_loss(make, coefficient):
    trainer = train(make(model=MOE, router_aux_loss_coef=coefficient, logging_steps=1, per_device_train_batch_size=6))
    assert ("aux_loss" in trainer.state.log_history[0]) == (coefficient != 0.0)


def test_a_coefficient_for_a_router_that_is_not_there_is_refused(make):
    with pytest.raises(ValueError, match="router_aux_loss_coef"):
        make(router_aux_loss_coef=0.1)


# Rewards.


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def sometimes(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    return [None if sum(ids) % 3 == 0 else 1.0 for ids in completion_ids]


def never(completions: list[str], **columns: Any) -> list[None]:
    return [None for _ in completions]


async def slow(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return spread(completion_ids)


def with_state(completion_ids: list[list[int]], trainer_state: Any, **columns: Any) -> list[float]:
    assert trainer_state.max_steps == 4
    return [reward * (1 + trainer_state.global_step) for reward in spread(completion_ids)]


def of_column(completion_ids: list[list[int]], solution: list[str], **columns: Any) -> list[float]:
    assert all(answer.startswith("$") for answer in solution)
    return spread(completion_ids)


@pytest.mark.parametrize(
    "functions",
    [[slow, spread], [spread, sometimes], *map(more, ([spread], [slow], [spread, length], [with_state, of_column]))],
    ids=lambda functions: " ".join(function.__name__ for function in functions),
)
def test_reward_functions_are_logged_by_name(make, functions):
    trainer = train(make([*functions], logging_steps=1))
    for function in functions:
        assert f"rewards/{function.__name__}/mean" in trainer.state.log_history[-2]
        assert f"rewards/{function.__name__}/std" in trainer.state.log_history[-2]


@pytest.mark.full
def test_a_reward_model_beside_a_function(make):
    trainer = train(make([REWARD_MODEL, spread], logging_steps=1))
    assert {"rewards/Qwen2-0.5B-Reward/mean", "rewards/spread/mean"} <= trainer.state.log_history[-2].keys()


def test_weights_of_rewards_weigh(make):
    trainer = train(make([spread, length], reward_weights=[0.7, 0.3], logging_steps=1))
    for entry in trainer.state.log_history[:-1]:
        expected = 0.7 * entry["rewards/spread/mean"] + 0.3 * entry["rewards/length/mean"]
        assert entry["reward"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_rewards_are_normalised_one_by_one(make):
    train(make([spread, length], multi_objective_aggregation="normalize_then_sum"))


def test_rows_that_no_function_scores_are_named_and_teach_nothing(make, caplog):
    with caplog.at_level(logging.WARNING):
        train(make([never, never], gradient_accumulation_steps=2), moved=False)
    assert "All reward functions returned None for the following kwargs:" in caplog.text


def test_a_reward_model_may_have_another_tokenizer(make):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(OTHER_REWARD_MODEL, num_labels=1)
    own = AutoTokenizer.from_pretrained(OTHER_REWARD_MODEL)
    train(make(model, arguments={"reward_processing_classes": own}))


@pytest.mark.full
def test_processing_classes_come_as_a_list_with_gaps(make):
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(OTHER_REWARD_MODEL)
    train(make([spread, OTHER_REWARD_MODEL], data=CONVERSATIONS, arguments={"reward_processing_classes": [None, own]}))


def test_too_many_processing_classes_are_refused(make):
    from transformers import AutoTokenizer

    with pytest.raises(ValueError, match="must match"):
        make(arguments={"reward_processing_classes": [AutoTokenizer.from_pretrained(POLICY)] * 2})


def test_too_many_weights_are_refused(make):
    with pytest.raises(ValueError, match="must match"):
        make([length], reward_weights=[1.0, 2.0])


# The reference, the warnings, truncated completions, checkpoints.


def test_the_reference_follows_the_policy(make):
    trainer = make(beta=0.1, sync_ref_model=True, ref_model_sync_steps=2)
    before = {name: value.clone() for name, value in trainer.ref_model.named_parameters()}
    train(trainer)
    assert not any(torch.equal(value, before[name]) for name, value in trainer.ref_model.named_parameters())


def test_without_a_penalty_there_is_no_reference(make):
    assert make().ref_model is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"importance_sampling_level": "sequence", "loss_type": "dapo"},
            "weights each sequence by its completion length",
        ),
        ({"loss_type": "luspo"}, "luspo"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "vespo"),
    ],
    ids=lambda options: "" if isinstance(options, str) else options["loss_type"],
)
def test_options_that_do_not_suit_each_other_are_named(make, caplog, options, text):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        make(**options)
    assert text in caplog.text.lower()


@pytest.fixture
def sampled(monkeypatch) -> Callable[[list[list[int]]], None]:
    """Have `generate` return the prompts followed by these tokens, as a plain tensor."""

    def patch(completions: list[list[int]]) -> None:
        def generate(self: Any, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
            return torch.cat([input_ids, torch.tensor(completions, device=input_ids.device)], dim=1)

        monkeypatch.setattr(GenerationMixin, "generate", generate)

    return patch


def test_truncated_completions_are_left_out(make, sampled):
    sampled([[9, 10, 11, 12, 13, 14, 15, 16], [9, 10, 11, 1, 0, 0, 0, 0], [12, 13, 14, 15, 16, 17, 18, 1]])
    trainer = train(make(mask_truncated_completions=True, logging_steps=1))
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert trainer.state.log_history[0]["completions/mean_terminated_length"] == pytest.approx(6.0)


def test_where_all_are_truncated_nothing_moves(make, sampled):
    sampled([[9, 10, 11, 12, 13, 14, 15, 16], [9, 10, 11, 12, 9, 10, 11, 12], [12, 13, 14, 15, 16, 17, 18, 19]])
    train(make(mask_truncated_completions=True), moved=False)


def test_a_checkpoint_is_resumed_from(make, hub: Path):
    make(save_steps=2).train()
    assert (hub / "run" / "checkpoint-2").is_dir()
    assert (hub / "run" / "checkpoint-4").is_dir()
    trainer = make(save_steps=2, max_steps=6)
    trainer.train(resume_from_checkpoint=str(hub / "run" / "checkpoint-4"))
    assert trainer.state.global_step == 6


@pytest.mark.full
def test_a_finished_run_is_saved_where_the_script_says(make, hub: Path):
    trainer = train(make())
    trainer.save_model("saved")
    again = AutoModelForCausalLM.from_pretrained(hub / "saved", dtype=torch.float32)
    for name, value in trainer.model.named_parameters():
        assert torch.equal(value, again.get_parameter(name)), name
