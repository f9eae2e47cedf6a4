"""Options out of range are refused by name, with what is allowed."""

import pytest

from fused_grpo.errors import InputError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.checks import _warn_of_unusual_losses, check_arguments

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0, want > 0"),
        ({"num_generations": 1}, "num_generations=1"),
        ({"epsilon": -1}, "epsilon=-1"),
        ({"loss_type": "ppo"}, "loss_type='ppo'"),
        (
            {"vllm_importance_sampling_mode": "tokn", "use_vllm": False},
            "vllm_importance_sampling_mode='tokn', want",
        ),
        ({"max_steps": 0}, "max_steps=0"),
        ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size=0, want"),
        ({"per_device_eval_batch_size": "8 rows"}, "per_device_eval_batch_size='8 rows', want int"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers=-1, want at least 0"),
        ({"scale_rewards": "std"}, "scale_rewards='std'"),
        ({"top_k": -1}, "top_k=-1"),
        ({"chunk_bytes": 0}, "chunk_bytes=0"),
        ({"adam_beta2": 2.0}, "adam_beta2=2.0"),
        ({"ddp_timeout": 10**18}, "ddp_timeout=1000000000000000000, want seconds, 100000000 at most"),
        ({"reward_timeout": INF}, "reward_timeout=inf"),
        ({"num_train_epochs": INF}, "num_train_epochs=inf, want a finite number"),
        ({"warmup_steps": INF}, "warmup_steps=inf"),
        ({"seed": -1}, "seed=-1, want a number from 0 to 2147483647"),
        ({"data_seed": 2**31}, "data_seed=2147483648"),
        ({"entropy_target": NAN}, "entropy_target=nan"),
        ({"entropy_coef_delta": NAN}, "entropy_coef_delta=nan"),
        ({"entropy_coef_min": NAN}, "entropy_coef_min=nan"),
        ({"score_centering": "all"}, "score_centering='all', want one of"),
        ({"score_centering_topk": 0}, "score_centering_topk=0, want at least 1"),
        ({"score_centering": "topk", "distillation_coef": 0.5}, "score_centering='topk' with distillation_coef=0.5"),
        ({"score_centering": "kept"}, "score_centering='kept' with top_p=1.0, .*'auto', want truncated .*fix: "),
        (
            {"score_centering": "kept", "top_p": 0.9, "sampling_support": "off"},
            "score_centering='kept' with top_p=0.9, .*='off', want .*fix: .* sampling_support='auto'",
        ),
        (
            {"score_centering": "topk", "top_k": 9},
            "score_centering='topk' with .*top_k=9, .*fix: score_centering='kept', or sampling_support='off'",
        ),
        ({"advantage_estimator": "gae"}, "advantage_estimator='gae', want "),
        ({"advantage_estimator": "rloo", "scale_rewards": "batch"}, "scale_rewards='batch' with advantage_estimator"),
        ({"advantage_estimator": "pkpo", "num_generations": 4, "pkpo_k": 5}, "got pkpo_k=5 with num_generations=4"),
        ({"advantage_estimator": "pkpo", "pkpo_k": 1}, "want a number from 2 to that"),
        (
            {"advantage_estimator": "maxrl", "multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation='normalize_then_sum' with advantage_estimator='maxrl'",
        ),
        (
            {"advantage_estimator": "reinforce_plus_plus", "num_generations": 1, "dynamic_sampling": 1},
            "num_generations=1, want at least 2",
        ),
    ],
)
def test_a_config_out_of_range_is_refused(option, message):
    with pytest.raises(InputError, match=message):
        GRPOConfig(**option)


@pytest.mark.parametrize(
    ("processes", "options", "part", "prompts"),
    [
        (8, {"per_device_train_batch_size": 1}, 1, 1),  # a group on eight processes
        (2, {"per_device_train_batch_size": 12}, 4, 3),  # three groups on two: 8 + 4, 4 + 8
        (2, {"per_device_train_batch_size": 16}, 8, 2),
        (1, {"per_device_train_batch_size": 4, "steps_per_generation": 2}, 8, 1),  # a group for two optimizer steps
    ],
)
def test_a_process_samples_the_part_of_a_group_that_fits(processes, options, part, prompts):
    args = GRPOConfig(num_generations=8, **options)
    assert (args.group_part(processes), args.prompts_per_process(processes)) == (part, prompts)
    assert part * prompts * processes == 8 * args.prompts_per_generation(processes)


@pytest.mark.parametrize(
    ("options", "micro_batches"),
    [
        ({}, 6),
        ({"steps_per_generation": 12, "num_iterations": 2}, 12),
        ({"steps_per_generation": 2}, 6),  # three generations with the same weights
        ({"generation_batch_size": 8 * 2 * 12, "num_iterations": 2}, 12),
        ({"generation_batch_size": 8 * 2}, 6),
    ],
)
def test_a_generation_is_for_whole_optimizer_steps(options, micro_batches):
    args = GRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=6, **options)
    assert args.micro_batches_per_generation(2) == micro_batches
    assert args.optimizer_steps_per_generation(2) * 6 == micro_batches


@pytest.mark.parametrize(
    ("options", "count", "rounded"),
    [
        ({"steps_per_generation": 4}, 4, 6),
        ({"steps_per_generation": 7}, 7, 12),
        ({"steps_per_generation": 2, "num_iterations": 2}, 2, 6),  # the second pass comes before the weights change
        ({"generation_batch_size": 8 * 8}, 8, 12),
    ],
)
def test_a_generation_that_ends_within_a_step_is_rounded_up_with_a_warning(options, count, rounded, caplog):
    warn_once.cache_clear()
    args = GRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=6, **options)
    assert [args.micro_batches_per_generation(1) for _ in range(2)] == [rounded] * 2
    (record,) = caplog.records
    given = "{}={}".format(*next(iter(options.items())))
    assert f"got {given} with gradient_accumulation_steps=6" in record.message
    assert f"has {rounded} micro-batches instead of {count}" in record.message


@pytest.mark.parametrize(
    "options", [{}, {"steps_per_generation": 2}, {"steps_per_generation": 12, "num_iterations": 2}]
)
def test_a_generation_of_the_same_samples_gets_no_warning(options, caplog):
    warn_once.cache_clear()
    GRPOConfig(gradient_accumulation_steps=6, **options).micro_batches_per_generation(1)
    assert caplog.records == []


@pytest.mark.parametrize("size", [8 * 6 + 4, 4])
def test_a_generation_of_parts_of_micro_batches_is_refused(size):
    args = GRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=6, generation_batch_size=size)
    with pytest.raises(InputError, match=rf"got generation_batch_size={size}, want a multiple of 8 sequences"):
        args.micro_batches_per_generation(1)


def test_groups_on_several_processes_are_not_replaced():
    args = GRPOConfig(per_device_train_batch_size=4, num_generations=8, dynamic_sampling=1)
    with pytest.raises(InputError, match=r"got dynamic_sampling=1 with 4 sequences on each of 2 .* want whole groups"):
        args.prompts_per_process(2)


def test_a_loss_of_the_completion_length_gets_it():
    assert GRPOConfig(loss_type="dr_grpo", max_completion_length=77).loss_config().max_completion_length == 77


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ({"reward_failure": "give up"}, "'fail', 'retry', 'drop'"),
        ({"logprob_mismatch": 1}, "'fail', 'warn' or None"),
        ({"scale_rewards": "std"}, "'group', 'batch', 'none'"),
        ({"kl_estimator": "k4"}, "'k1', 'k2', 'k3'"),
        ({"sequence_rejection": "k4"}, "'ratio', 'geometric_ratio', 'k1', 'k2', 'k3' or None"),
    ],
)
def test_an_option_with_choices_says_what_they_are(option, wanted):
    with pytest.raises(InputError, match=f"got {'{}={!r}'.format(*next(iter(option.items())))}, want one of {wanted}$"):
        GRPOConfig(**option)


UNUSUAL = {
    "bounds a log-ratio there; fix for GMPO as published: epsilon=0.4": {"loss_type": "gmpo"},
    "bounds a change of probability there; fix for IPO as published: epsilon=0.1": {"loss_type": "ipo"},
    "whose paper takes the ratio of a sequence": {"loss_type": "luspo"},
}


@pytest.mark.parametrize(("warning", "options"), UNUSUAL.items(), ids=lambda value: str(value)[:30])
def test_a_default_that_is_not_the_papers_gets_a_warning(warning, options, caplog):
    warn_once.cache_clear()
    _warn_of_unusual_losses(GRPOConfig(**options))
    assert warning in caplog.text
    caplog.clear()
    warn_once.cache_clear()
    _warn_of_unusual_losses(GRPOConfig(**options, epsilon=0.1, importance_sampling_level="token"))
    assert ("epsilon" in warning) is (caplog.text == "")


@pytest.mark.parametrize("given", [{"tools": [len]}, {"environment_factory": object}])
def test_a_function_beside_tools_or_environments_says_which(given):
    alone = {"rollout_func": len, "eval_dataset": None, "teacher_model": None}
    with pytest.raises(InputError, match=f"got rollout_func with {next(iter(given))}, want one way to .*fix: "):
        check_arguments(GRPOConfig(), **alone, **given)
