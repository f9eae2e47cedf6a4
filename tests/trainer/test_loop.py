"""The loop's promises: one generation per effective batch, one update however it is cut, none at all on an error."""

import copy
import dataclasses
import json
import math
import re

import pytest
import torch
from accelerate import Accelerator
from small_runs import at
from transformers import AutoModelForCausalLM

from fused_grpo.errors import DataError, InputError, NonFiniteError, RewardError, WeightSyncError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.batching.micro_batch_metrics import quantile, threshold_of_uncertain
from fused_grpo.trainer.learner import Learner


def parameters(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.mark.parametrize("accumulation", [1, 4, 8])
@pytest.mark.parametrize(("iterations", "generations"), [(1, 4), (2, 2)])
def test_one_generate_call_per_effective_batch(make_trainer, accumulation, iterations, generations):
    trainer = make_trainer(gradient_accumulation_steps=accumulation, num_iterations=iterations, max_steps=4)
    trainer.train()
    assert trainer.step == 4
    assert len(trainer.engine.calls) == generations
    assert all(prompts * sampling.n == 4 * accumulation for prompts, sampling in trainer.engine.calls)


@pytest.mark.parametrize(
    "options", [{"loss_type": "dapo"}, {"loss_type": "grpo"}, {"beta": 0.1}, {"num_iterations": 3}]
)
def test_the_cut_into_micro_batches_does_not_change_the_update(make_trainer, options):
    results = []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        cut = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        # Adam turns the rounding of gradients that ought to be zero (k_proj.bias) into steps of up to learning_rate.
        trainer = make_trainer(**cut, learning_rate=1e-4, **options)
        start = parameters(trainer)
        trainer.train()
        results.append(parameters(trainer))
    for name, expected in results[0].items():
        for other in results[1:]:
            torch.testing.assert_close(other[name], expected, rtol=0, atol=1e-6)
    assert max((results[0][name] - start[name]).abs().max() for name in start) > 1e-4


def test_the_update_is_that_of_a_plain_padded_loop(make_trainer, make_model):
    """One step of textbook GRPO, with full logits and autograd, on the same rollouts."""
    trainer = make_trainer(max_steps=1, max_grad_norm=1e9)
    recorded = []
    generate = trainer.engine.generate
    trainer.engine.generate = lambda *arguments: recorded.append(generate(*arguments)) or recorded[-1]
    result = trainer.train()
    model, rollouts = make_model(), recorded[0]
    texts = trainer.processing_class.batch_decode(rollouts.completion_ids, skip_special_tokens=True)
    rewards = torch.tensor(trainer.rewards.functions[0](texts))
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    loss, tokens = 0.0, sum(map(len, rollouts.completion_ids))
    for ids, advantage in zip(rollouts.completion_ids, advantages, strict=True):
        prompt = rollouts.prompt_ids[0]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        loss = loss - (torch.exp(logprobs - logprobs.detach()) * advantage).sum() / tokens
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert result.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert result.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_a_second_iteration_uses_the_first_ones_logprobs(make_trainer):
    trainer = make_trainer(num_iterations=2, max_steps=2)
    trainer.train()
    first, second = (json.loads(line) for line in (trainer.output_dir / "metrics.jsonl").read_text().splitlines())
    assert first["ratio_min"] == first["ratio_max"] == 1
    assert second["ratio_min"] < 1 < second["ratio_max"]


@pytest.mark.parametrize("where", ["loss", "gradient", "second micro-batch"])
def test_a_step_that_fails_updates_nothing(make_trainer, where):
    # top_p switches the agreement check off: what is tested is the check behind it.
    trainer = make_trainer(top_p=0.9, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    weight, calls = trainer.model.lm_head.weight, []
    if where == "gradient":
        weight.register_hook(lambda gradient: gradient * float("inf"))
    else:
        forward = trainer.learner.policy.forward

        def failing(*args, **counts):
            calls.append(1)
            output = forward(*args, **counts)
            if where == "second micro-batch" and len(calls) == 2:
                raise NonFiniteError("from inside")
            return output._replace(loss=output.loss * (float("nan") if where == "loss" else 1.0))

        trainer.learner.policy.forward = failing
    start = parameters(trainer)
    with pytest.raises(NonFiniteError):
        trainer.train()
    # The rollouts of the failed step are in the log, to look for the cause.
    assert (trainer.output_dir / "rollouts.jsonl").read_text().count("\n") == 4
    assert all(torch.equal(start[name], tensor) for name, tensor in parameters(trainer).items())
    assert weight.grad is None
    assert trainer.engine.closed


def test_an_engine_with_stale_weights_is_noticed_before_the_update(make_trainer, make_model):
    trainer = make_trainer(learning_rate=0.05)
    stale = make_model()  # what the engine would serve if no sync ever reached it
    trainer.engine.model = stale
    trainer.engine.load_weights = lambda weights, version: setattr(trainer.engine, "weight_version", version)
    with pytest.raises(WeightSyncError, match="weight version 1"):
        trainer.train()
    assert trainer.step == 1


def raising(prompts, completions, **columns):
    if "3+1=" in prompts:
        raise ZeroDivisionError("no answer")
    return [0.0] * len(prompts)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raising, r"reward function 'raising' raised ZeroDivisionError: no answer; at prompt '3\+1='"),
        (lambda completions, **_: [1.0], r"'<lambda>' returned 1 rewards for 64 completions \(first prompt '.*='\)"),
        (lambda completions, **_: [float("nan")] * 64, "'<lambda>' returned nan at prompt '"),
        (lambda completions, **_: ["good"] * 64, "'<lambda>' returned 'good' at prompt '"),
    ],
)
def test_a_bad_reward_function_is_named_with_its_prompt(make_trainer, reward, message):
    trainer = make_trainer(reward, per_device_train_batch_size=64)
    start = parameters(trainer)
    with pytest.raises(RewardError, match=message):
        trainer.train()
    assert all(torch.equal(start[name], tensor) for name, tensor in parameters(trainer).items())
    assert trainer.step == 0


def test_none_rewards_take_no_part(make_trainer):
    def sometimes(completions, **_):
        return [None if index % 4 == 0 else float(index) for index, _ in enumerate(completions)]

    trainer = make_trainer(sometimes, max_steps=1)
    metrics = trainer.train().metrics
    assert metrics["reward"] == pytest.approx(2.0)
    assert metrics["reward_std"] == pytest.approx(1.0)
    rows = [json.loads(line) for line in (trainer.output_dir / "rollouts.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [None, 1.0, 2.0, 3.0]
    assert rows[0]["advantage"] == 0
    assert rows[2]["advantage"] == pytest.approx(0, abs=1e-6)


def test_who_samples_or_scores_with_the_policy_has_it_without_dropout(make_trainer):
    """Before the first step, between two, and after an evaluation; so a resumed run samples as this one."""
    modes = []

    def reward(completions, **columns):
        modes.append(trainer.model.training)
        return list(map(len, completions))

    trainer = make_trainer(reward, eval_dataset=[{"prompt": "1+1=", "answer": "2"}], eval_at_ends=True)
    generate = trainer.engine.generate
    trainer.engine.generate = lambda *given: modes.append(trainer.model.training) or generate(*given)
    trainer.train()
    assert modes == [False] * 2 * 5


def test_every_part_of_a_step_is_trained_with_dropout(make_trainer):
    """Also where a callback evaluates between two parts."""
    trainer, modes = make_trainer(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2), []
    layer = trainer.model.model.layers[0]
    layer.register_forward_pre_hook(lambda *_: modes.append(layer.training) if torch.is_grad_enabled() else None)
    trainer.add_callback(at("on_substep_end", lambda *_: trainer.evaluate([{"prompt": "1+1=", "answer": "2"}])))
    trainer.train()
    assert modes == [True] * 4


def test_the_checkpoint_is_the_trained_model(make_trainer):
    trainer = make_trainer(save_steps=2)
    result = trainer.train()
    loaded = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    for name, tensor in parameters(trainer).items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert (trainer.output_dir / "checkpoint-2" / "model.safetensors").exists()


def test_metrics_say_what_happened(make_trainer):
    trainer = make_trainer(max_steps=2)
    trainer.train()
    lines = [json.loads(line) for line in (trainer.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["generate_calls"] for line in lines] == [1, 2]
    assert [line["weight_version"] for line in lines] == [0, 1]
    assert all(line["rollout_engine"] == "scripted" for line in lines)
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-4 for line in lines)
    assert lines[0]["reward"] == pytest.approx(lines[0]["rewards/digit_reward/mean"])


def test_a_sleeping_engine_is_woken_for_an_evaluation(make_trainer, served_engine):
    class Sleeper(served_engine):
        awake = False

        def wake(self) -> None:
            self.awake = True

        def sleep(self) -> None:
            self.awake = False

        def load_weights(self, named_weights, version) -> None:
            assert self.awake
            super().load_weights(named_weights, version)

    trainer = make_trainer(engine=Sleeper, eval_steps=1)
    trainer.eval_dataset = trainer.dataset[:2]
    assert trainer.train().eval_after is not None
    assert not trainer.engine.awake


@pytest.mark.parametrize(("can_sleep", "calls"), [(None, 2), (True, 2), (False, 0)])
def test_an_engine_sleeps_while_the_trainer_learns_unless_it_cannot(make_trainer, served_engine, can_sleep, calls):
    class Counting(served_engine):
        woken = slept = 0

        def wake(self) -> None:
            self.woken += 1

        def sleep(self) -> None:
            self.slept += 1

    if can_sleep is not None:
        Counting.can_sleep = can_sleep
    trainer = make_trainer(engine=Counting, max_steps=2)
    trainer.train()
    assert (trainer.engine.woken, trainer.engine.slept) == (calls, calls)


def test_a_reference_that_follows_is_mixed_once_also_where_ends_are_tied(make_model):
    model = make_model(tie_word_embeddings=True)
    args = GRPOConfig(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.6)
    learner = Learner(model, args, Accelerator(cpu=True), max_steps=1)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    learner._follow_with_reference()
    for name, value in learner.reference.model.state_dict().items():
        torch.testing.assert_close(value, start[name] + 0.6, msg=name)


def test_a_reference_that_follows_is_that_of_the_generation(make_trainer):
    """As in TRL, for all steps that use the generated batch: policy and reference are the same when it is made."""
    options = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "learning_rate": 0.1}
    trainer = make_trainer(steps_per_generation=2, max_steps=1, **options)
    trainer.train()
    for sample in trainer.buffer.current:
        torch.testing.assert_close(sample.ref_logprobs, sample.old_logprobs)


def test_a_quantile_is_that_of_torch_and_nothing_has_one_too():
    values = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    for share in (0.0, 0.2, 0.5, 0.8, 0.999):
        assert quantile(values, share) == torch.quantile(values.double(), share).float()
    assert quantile(torch.zeros(0), 0.5) == 0
    assert threshold_of_uncertain(torch.zeros(0), 0.5) == 0


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.5, 0.8, 0.999, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 81, 1000, 10_000])
def test_uncertain_tokens_are_those_at_or_above_the_quantile(count, share):
    """As TRL takes them."""
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(0)) * 3
    for values in (drawn, drawn**8, (drawn * 4).round() / 4, torch.zeros(count)):
        expected = values >= torch.quantile(values.double(), 1 - share)
        assert torch.equal(values >= threshold_of_uncertain(values, share), expected)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.25, 0.4, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("equal", [1, 4, 64])
def test_rounding_moves_no_token_over_the_threshold_of_uncertain_ones(share, equal):
    """Of 81 tokens the quantile is the entropy of one of them; where `equal` begin alike, of several."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.rand(81, generator=generator, dtype=torch.float64) * 3
    exact[:equal] = exact[:equal].mean()
    is_uncertain = exact >= torch.quantile(exact, 1 - share) - 1e-12
    for _ in range(20):
        measured, loss_entropy = ((exact * (1 + 2e-7 * torch.randn(81, generator=generator))).float() for _ in range(2))
        assert torch.equal(loss_entropy >= threshold_of_uncertain(measured, share), is_uncertain)


def test_a_long_run_does_not_keep_every_step_in_memory(make_trainer):
    trainer = make_trainer(max_steps=5, logging_steps=2)
    trainer.train()
    assert [record["step"] for record in trainer.state.log_history] == [2, 4, 5]  # the last one is transformers'


def test_a_step_of_nothing_but_truncated_completions_changes_nothing(make_trainer):
    options = {"mask_truncated_completions": True, "top_entropy_quantile": 0.5, "use_adaptive_entropy": True}
    trainer = make_trainer(max_steps=1, **options)
    generate = trainer.engine.generate
    trainer.engine.generate = lambda *a: dataclasses.replace(generate(*a), finish_reasons=["length"] * 4)
    start = parameters(trainer)
    metrics = trainer.train().metrics
    assert metrics["completion_tokens"] == 0
    assert "ratio_max" not in metrics  # there is none, and -inf would be in means over steps
    assert not any(value in (math.inf, -math.inf) for value in metrics.values())
    assert all(torch.equal(start[name], tensor) for name, tensor in parameters(trainer).items())
    assert trainer.learner.entropy.coefficient == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "a schedule that depends on the number of the step alone"),
        ({"vllm_mode": "server", "vllm_engine_kwargs": {"max_num_seqs": 4}}, "with vLLM in the trainer's process"),
        ({"use_vllm": False, "vllm_enable_sleep_mode": True}, "with vLLM in the trainer's process"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        GRPOConfig(**options)


@pytest.fixture
def restored_dtype():
    yield
    torch.set_default_dtype(torch.float32)


RUNS = {
    "several steps of a generation": {"steps_per_generation": 2, "num_iterations": 2, "beta": 0.1, "max_steps": 4},
    "norms of tokens": {"advantage_estimator": "optimal_token_baseline", "dynamic_sampling": 1},
    "greedy baselines": {"advantage_estimator": "remax", "top_entropy_quantile": 0.5, "dynamic_sampling": 1},
}


@pytest.mark.usefixtures("restored_dtype")
@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_the_default_dtype_of_torch_changes_no_number(make_trainer, served_engine, tmp_path, options):
    """A script may have set it, to load its models in."""
    logs = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.set_default_dtype(torch.float32)
        trainer = make_trainer(engine=served_engine, eval_dataset=[{"prompt": "1+2="}], **options)
        torch.set_default_dtype(dtype)
        trainer.train()
        records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        kept = [{name: record[name] for name in record if not re.search("time|per_second", name)} for record in records]
        logs.append(kept)
    assert logs[0] == logs[1] == logs[2]


def test_an_engine_that_cannot_be_closed_leaves_no_lock(make_trainer):
    trainer = make_trainer(max_steps=1)
    trainer.engine.close = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not (trainer.output_dir / ".lock").exists()
    trainer.engine.close = lambda: None
    assert trainer.train().steps == 1


def test_a_trainer_whose_engine_cannot_be_closed_ends_its_trackers(make_trainer):
    trainer, ended = make_trainer(max_steps=1), []
    trainer.engine.close, trainer.output.close = lambda: 1 / 0, lambda: ended.append("output")
    with pytest.raises(ZeroDivisionError):
        trainer.end()
    assert ended == ["output"]


@pytest.mark.parametrize("when", ["on_train_end", "behind train"])
def test_an_evaluation_of_the_best_model_samples_with_its_weights(make_trainer, served_engine, when):
    def evaluate(*_) -> None:
        trainer.evaluate()
        for name, weight in trainer.engine.model.state_dict().items():
            assert torch.equal(weight, trainer.model.state_dict()[name])

    def better_and_worse(completions, **_):  # the first evaluation behind a step is the best
        return [float(trainer.step == 1) + 0.1 * (place % 2) for place in range(len(completions))]

    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    callbacks = [at(when, evaluate)] if when == "on_train_end" else []
    data = {"eval_dataset": [{"prompt": "1+1="}], "metric_for_best_model": "reward", "callbacks": callbacks}
    trainer = make_trainer(better_and_worse, engine=served_engine, learning_rate=0.1, **options, **data)
    trainer.train()
    assert trainer.state.best_global_step == 1
    evaluate()


def test_weights_that_a_script_changes_behind_a_run_are_sampled_with(make_trainer, served_engine):
    trainer = make_trainer(engine=served_engine, max_steps=1, eval_dataset=[{"prompt": "1+1="}])
    trainer.train()
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(2.0)
    trainer.evaluate()
    assert torch.equal(trainer.engine.model.lm_head.weight, trainer.model.lm_head.weight)


@pytest.mark.parametrize("call", ["train", "evaluate"])
def test_weights_that_a_script_changes_before_a_run_are_sampled_with(make_trainer, served_engine, call):
    """As a script does that loads a checkpoint into the model of a trainer that is made."""
    trainer = make_trainer(engine=served_engine, max_steps=1, eval_dataset=[{"prompt": "1+1="}])
    trainer.model.load_state_dict({name: 2 * value for name, value in trainer.model.state_dict().items()})
    changed = trainer.model.lm_head.weight.detach().clone()
    seen = []
    trainer.engine.sleep = lambda: seen.append(trainer.engine.model.lm_head.weight.detach().clone())
    getattr(trainer, call)()
    assert torch.equal(seen[0], changed)


def test_an_eval_set_that_a_script_has_set_is_checked_before_a_step(make_trainer):
    trainer = make_trainer(eval_strategy="steps", eval_steps=2, eval_dataset=[{"prompt": "1+1="}])
    trainer.eval_dataset = [{"question": "1+1="}]
    with pytest.raises(DataError, match="got eval_dataset without a 'prompt' column in row 0"):
        trainer.train()
    assert (trainer.step, trainer.engine.calls) == (0, [])


@pytest.mark.parametrize("optim", ["adagrad", "adamw_torch", "sgd"])
def test_a_second_run_begins_with_the_first_state_of_any_optimizer(make_trainer, optim):
    trainer = make_trainer(max_steps=1, optim=optim)
    first = copy.deepcopy(trainer.optimizer.state_dict())
    trainer.train()
    seen = []
    trainer.add_callback(at("on_train_begin", lambda *_: seen.append(copy.deepcopy(trainer.optimizer.state_dict()))))
    assert trainer.train().steps == 1
    torch.testing.assert_close(seen[0]["state"], first["state"], rtol=0, atol=0)


def test_a_resumed_run_syncs_an_engine_with_another_model_of_its_step(make_trainer, served_engine):
    options = {"engine": served_engine, "max_steps": 1, "overwrite_output_dir": False}
    make_trainer(model_seed=1, **options).save_checkpoint()  # of step 0, as the engine's own weights
    assert make_trainer(**options).train(resume_from_checkpoint=True).steps == 1


def test_an_argument_of_false_resumes_nothing_whatever_the_option_says(make_trainer):
    options = {"max_steps": 2, "save_steps": 1, "overwrite_output_dir": False}
    make_trainer(**options).train()
    trainer = make_trainer(resume_from_checkpoint=True, **options)
    assert trainer.train(resume_from_checkpoint=False).steps == 2
    assert len(trainer.engine.calls) == 2  # both steps again, where a resumed run has none to make
    assert (trainer.output_dir / "former-run-1" / "checkpoint-2").is_dir()
