"""A run that was killed and resumed ends bit for bit as the one that was not; other options are said or refused."""

import copy
import dataclasses
import itertools
import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from clocked import read_log
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.optim import SGD, Adam, lr_scheduler
from transformers import TrainerCallback

from fused_grpo.errors import CheckpointError, InputError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.checkpoint.checkpoint import checkpoints, newest_checkpoint, verify_checkpoint
from fused_grpo.trainer.checkpoint.resume import RULES, restore, rule_of
from fused_grpo.trainer.checkpoint.training_state import read_weights
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.models.loading import fingerprint

RUN = Path(__file__).parents[1] / "resume_run.py"
SEVERAL = {"steps_per_generation": 4, "num_iterations": 2}
OPTIONS = {
    "plain": {},
    "iterations": {"num_iterations": 2},
    "one generation for three steps": {"steps_per_generation": 3},
    "reference that follows": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "num_iterations": 2},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 5.0},
    "entropy quantile": {"top_entropy_quantile": 0.5},
    "dynamic sampling": {"dynamic_sampling": 2},
    "greedy baselines": {"advantage_estimator": "remax", "dynamic_sampling": 2, **SEVERAL},
    "truncated masked": {"mask_truncated_completions": True, "loss_type": "grpo"},
    "a teacher": {"teacher_model": "self", "distillation_coef": 0.5, "num_iterations": 2, "steps_per_generation": 4},
    "token baseline": {"advantage_estimator": "optimal_token_baseline", "steps_per_generation": 4, "num_iterations": 2},
    "kept tokens": {"engine": TransformersEngine, "top_p": 0.8, "steps_per_generation": 4, "num_iterations": 2},
    "centered on kept tokens": {"engine": TransformersEngine, "top_p": 0.8, "score_centering": "kept", **SEVERAL},
    "centered on likely tokens": {"engine": TransformersEngine, "score_centering": "topk", **SEVERAL},
    "an optimizer whose tensors are in mappings": {"optim": "adamw_bnb_8bit"},
}


def even_reward(completions: list[str], prompts: list[str], **columns: object) -> list[float]:
    """0 for prompts with an odd first digit."""
    return [len(text) * (prompt[0] in "02") for text, prompt in zip(completions, prompts, strict=True)]


def failing_reward(completions: list[str], prompts: list[str], **columns: object) -> list[float]:
    """Of two groups one fails, so that the first of two steps has no samples."""
    if any(prompt[2] in "13" for prompt in prompts):
        raise ValueError("odd")
    return [float(len(text)) for text in completions]


FAILING = {"reward": failing_reward, "reward_failure": "drop", "shuffle_dataset": False, "steps_per_generation": 2}
OPTIONS |= {"a step without samples": FAILING}
SUMS = [{"prompt": f"{a}+{b}=", "difficulty": a} for a in range(4) for b in range(4)]
DRAWS = {"reward": even_reward, "dataset": SUMS, "per_device_train_batch_size": 8, "steps_per_generation": 2}


class LeavesEpochs(TrainerCallback):
    """Within a generated batch, whose last prompt is of the next epoch."""

    def on_step_end(self, args, state, control, **unused) -> None:
        control.should_epoch_stop = state.global_step == 1


LEAVES = {"dataset": SUMS[:3], "curriculum": "unequal_rewards", "callbacks": [LeavesEpochs], "steps_per_generation": 2}
OPTIONS |= {"a curriculum that leaves the rest of an epoch": {**LEAVES, "per_device_train_batch_size": 8}}
OPTIONS |= {f"curriculum by {kind}": {**DRAWS, "curriculum": kind} for kind in ("difficulty", "unequal_rewards")}

SCHEDULES = {
    "steps by number": partial(lr_scheduler.MultiStepLR, milestones=[2, 4]),
    "cycles": partial(lr_scheduler.CyclicLR, base_lr=1e-4, max_lr=1e-3, step_size_up=2),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
}


def own_optimizers(schedule, model):
    optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return optimizer, schedule(optimizer)


def with_tensors(model):
    optimizer = Adam(model.parameters(), lr=torch.tensor(1e-3), foreach=False)
    return optimizer, lr_scheduler.LinearLR(optimizer)


OPTIONS |= {"a rate that is a tensor": {"optimizers": with_tensors}}
OPTIONS |= {
    f"a schedule of PyTorch: {name}": {"optimizers": partial(own_optimizers, schedule)}
    for name, schedule in SCHEDULES.items()
}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_stopped_and_resumed_is_the_same_run(make_trainer, tmp_path, options):
    options = {**options, "logging_steps": 4}
    whole = make_trainer(output_dir=str(tmp_path / "whole"), max_steps=6, lr_scheduler_type="linear", **options)
    whole.train()
    more = {"output_dir": str(tmp_path / "cut"), "overwrite_output_dir": False, "max_steps": 6, "save_steps": 3}
    cut = make_trainer(lr_scheduler_type="linear", **more, **options)
    learn = cut._learn

    def killed_in_step_6(buffer):
        if cut.step == 5:
            raise Killed
        return learn(buffer)

    cut._learn = killed_in_step_6
    with pytest.raises(Killed):
        cut.train()
    resumed = make_trainer(lr_scheduler_type="linear", **more, **options)
    resumed.train(resume_from_checkpoint=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    for log in ("metrics.jsonl", "rollouts.jsonl"):
        assert read_log(tmp_path / "whole" / log) == read_log(tmp_path / "cut" / log)
    assert history(whole) == history(resumed)


def history(trainer) -> list[dict[str, object]]:
    """The log's entries without what a clock said, and without the loss of this call of `train`."""
    timed = ("time", "train_", "per_second")
    return [
        {k: v for k, v in entry.items() if not any(part in k for part in timed)} for entry in trainer.state.log_history
    ]


@pytest.fixture(scope="module")
def undisturbed(fork_server, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    fork_server.run(RUN, output_dir, "transformers", "fresh", "nowhere", 0)
    return output_dir


def assert_same_end(first: Path, second: Path) -> None:
    """Weights, optimizer, random generators, and everything that was logged."""
    for name in ("model.safetensors", "optimizer.safetensors", "process-0.safetensors"):
        expected, actual = (load_file(path / "checkpoint-10" / name) for path in (first, second))
        assert expected.keys() == actual.keys()
        for key, value in expected.items():
            assert torch.equal(value, actual[key]), (name, key)
    for log in ("metrics.jsonl", "rollouts.jsonl"):
        assert read_log(first / log) == read_log(second / log)


@pytest.mark.parametrize(
    ("where", "step"),
    [("accumulation", 5), pytest.param("accumulation", 8, marks=pytest.mark.full), ("saving", 6), ("renaming", 9)],
)
def test_killed_anywhere_and_resumed_is_the_same_run(fork_server, undisturbed, tmp_path, where, step):
    output_dir = tmp_path / "run"
    assert fork_server.start(RUN, output_dir, "transformers", "fresh", where, step).wait() == -9
    verify_checkpoint(checkpoints(output_dir)[-1])
    fork_server.run(RUN, output_dir, "transformers", "resume", "nowhere", 0)
    assert_same_end(undisturbed, output_dir)


@pytest.mark.parametrize("step", [5, 9])
def test_killed_in_a_curriculum_and_resumed_is_the_same_run(fork_server, tmp_path, step):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fork_server.run(RUN, whole, "curriculum", "fresh", "nowhere", 0)
    assert fork_server.start(RUN, cut, "curriculum", "fresh", "accumulation", step).wait() == -9
    fork_server.run(RUN, cut, "curriculum", "resume", "nowhere", 0)
    assert_same_end(whole, cut)
    saved = json.loads((cut / "checkpoint-10" / "training.json").read_text())["collector"]["sampler"]
    assert set(saved["groups"]["unequal"]) == {0, 1}


@pytest.mark.full  # the demo's test kills it with vLLM by the command line
@pytest.mark.engine
def test_killed_with_vllm_and_resumed_is_the_same_run(fork_server, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fork_server.run(RUN, whole, "vllm", "fresh", "nowhere", 0, stage="vllm")
    assert fork_server.start(RUN, cut, "vllm", "fresh", "accumulation", 7, stage="vllm").wait() == -9
    fork_server.run(RUN, cut, "vllm", "resume", "nowhere", 0, stage="vllm")
    assert_same_end(whole, cut)


def test_a_damaged_checkpoint_is_ignored_and_named(make_trainer, tmp_path, caplog):
    make_trainer(max_steps=4, save_steps=2).train()
    newest = tmp_path / "run" / "checkpoint-4" / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path / "run").name == "checkpoint-2"
    assert "checkpoint-4" in caplog.text


@pytest.mark.parametrize(("resume", "number"), [(True, 4), ("run/checkpoint-2", 2), (None, None)])
def test_the_console_says_which_checkpoint_a_run_goes_on_from(
    make_trainer, tmp_path, monkeypatch, capsys, resume, number
):
    monkeypatch.chdir(tmp_path)
    make_trainer(output_dir="run", max_steps=4, save_steps=2).train()
    capsys.readouterr()
    make_trainer(output_dir="run", max_steps=5, overwrite_output_dir=False).train(resume_from_checkpoint=resume)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed")]
    assert said == ([f"resumed from run/checkpoint-{number}"] if number else [])


def test_nothing_to_resume_from(make_trainer, tmp_path):
    trainer = make_trainer(overwrite_output_dir=False)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    assert not (tmp_path / "run").exists()


def test_gradients_that_a_model_brings_along_change_nothing(make_trainer, tmp_path):
    """PyTorch initialises no optimizer state where there is a gradient: nothing to load a checkpoint into."""

    def run(name, *, resume=False, gradients=True):
        options = {"output_dir": str(tmp_path / name), "max_steps": 5, "save_steps": 2, "overwrite_output_dir": False}
        trainer = make_trainer(**options)
        for parameter in trainer.model.parameters() if gradients else ():
            parameter.grad = torch.full_like(parameter, 7.0)
        trainer.train(resume_from_checkpoint=tmp_path / name / "checkpoint-2" if resume else None)
        return trainer.model.state_dict()

    plain, brought, resumed = run("plain", gradients=False), run("brought"), run("brought", resume=True)
    for name, value in plain.items():
        assert torch.equal(value, brought[name]), name
        assert torch.equal(value, resumed[name]), name


def test_other_options_are_refused(make_trainer):
    make_trainer(max_steps=3, save_steps=2).train()
    other = make_trainer(max_steps=3, overwrite_output_dir=False, num_iterations=2)
    with pytest.raises(CheckpointError, match=r"got num_iterations=2 .* want num_iterations=1"):
        other.train(resume_from_checkpoint=True)


def test_each_weight_comes_back_in_its_own_dtype_bit_for_bit(make_trainer):
    def mixed(*, seed):
        trainer = make_trainer(max_steps=3, overwrite_output_dir=False)
        trainer.model.bfloat16().lm_head.float()
        torch.nn.init.normal_(trainer.model.lm_head.weight, generator=torch.Generator().manual_seed(seed))
        return trainer

    first, second = mixed(seed=0), mixed(seed=1)
    checkpoint = first.save_checkpoint()
    restore(checkpoint, second.learner, second.collector)
    assert torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)
    second.model.lm_head.bfloat16()
    expected = r"torch\.float32 as 'lm_head\.weight', where this run has .*bfloat16.*not damaged: its sums are right"
    with pytest.raises(CheckpointError, match=expected):
        read_weights(second.model, checkpoint)


def test_another_schedule_is_refused_before_anything_is_loaded(make_trainer):
    first, second = make_trainer(), make_trainer()
    checkpoint = first.save_checkpoint()
    torch.nn.init.zeros_(second.model.lm_head.weight)
    second.learner.scheduler = torch.optim.lr_scheduler.ConstantLR(second.learner.optimizer.optimizer)
    with pytest.raises(CheckpointError, match=r"got schedule='ConstantLR' .*want schedule='LambdaLR'"):
        restore(checkpoint, second.learner, second.collector)
    assert not second.model.lm_head.weight.any()


def test_a_model_alone_is_refused(make_trainer):
    make_trainer(max_steps=3, save_steps=2, save_only_model=True).train()
    resumed = make_trainer(max_steps=3, overwrite_output_dir=False)
    with pytest.raises(CheckpointError, match="a checkpoint of a model alone"):
        resumed.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_second_train_is_a_new_run_from_the_present_weights(make_trainer, served_engine, tmp_path, steps):
    options = {"engine": served_engine, "max_steps": steps, "beta": 0.1, "lr_scheduler_type": "linear"}
    first, again = make_trainer(**options), make_trainer(**options, output_dir=str(tmp_path / "again"))
    first.train()
    again.model.load_state_dict(first.model.state_dict())
    again._is_stale = True
    first.learner.reference.load_state_dict(again.learner.reference.state_dict())
    results = [trainer.train() for trainer in (first, again)]
    assert [result.steps for result in results] == [steps, steps]
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    assert history(first) == history(again)
    assert read_log(tmp_path / "run" / "rollouts.jsonl") == read_log(tmp_path / "again" / "rollouts.jsonl")


CHANGED = {"max_steps": 3, "num_train_epochs": 1, "learning_rate": 0.5, "temperature": 0.5, "beta": 0.1, "top_k": 5}
CHANGED |= {"max_completion_length": 3, "reward_weights": [2.0], "output_dir": "elsewhere", "bf16": True, "seed": 7}


@pytest.mark.parametrize("resume", [None, True])
def test_options_changed_after_the_trainer_is_made_are_refused(make_trainer, tmp_path, resume):
    trainer = make_trainer(max_steps=2, save_steps=1)
    trainer.train()
    files = sorted(path.name for path in (tmp_path / "run").iterdir())
    for name, changed in CHANGED.items():
        before = getattr(trainer.args, name)
        setattr(trainer.args, name, changed)
        with pytest.raises(InputError, match=rf"with {name}=.*, want {name}=.*; fix: a new GRPOTrainer, with resume_"):
            trainer.train(resume_from_checkpoint=resume)
        setattr(trainer.args, name, before)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == files
    assert trainer.train(resume_from_checkpoint=resume).steps == 2


def test_an_option_inside_of_a_mapping_is_seen_to_change(make_trainer):
    trainer = make_trainer(max_steps=2, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-6})
    trainer.args.lr_scheduler_kwargs["min_lr"] = 1e-5
    with pytest.raises(InputError, match=r"got args with lr_scheduler_kwargs=\{'min_lr': 1e-05\}"):
        trainer.train()


def test_what_a_run_shows_evaluates_and_saves_may_change_meanwhile(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=2, save_strategy="no")
    trainer.args.save_strategy, trainer.args.save_steps, trainer.args.logging_steps = "steps", 1, 1
    trainer.train()
    assert (tmp_path / "run" / "checkpoint-1").is_dir()
    assert [entry["step"] for entry in trainer.state.log_history if "reward" in entry] == [1, 2]


@pytest.mark.parametrize("name", ["args", "model", "train_dataset", "beta", "reward_funcs", "optimizer", "state"])
def test_parts_of_a_trainer_that_would_be_ignored_cannot_be_replaced(make_trainer, name):
    trainer = make_trainer(max_steps=1)
    before = getattr(trainer, name)
    with pytest.raises(InputError, match=r"got another value for .*, want the one .*; fix: a new GRPOTrainer"):
        setattr(trainer, name, None)
    assert getattr(trainer, name) is before or getattr(trainer, name) == before


@pytest.mark.parametrize(("saved", "here"), itertools.permutations(("off", "unequal_rewards"), 2))
def test_another_curriculum_is_refused_by_its_name(make_trainer, saved, here):
    make_trainer(max_steps=2, save_steps=2, curriculum=saved).train()
    resumed = make_trainer(max_steps=3, overwrite_output_dir=False, curriculum=here)
    with pytest.raises(CheckpointError, match=f"^got curriculum='{here}' .*want curriculum='{saved}' as it was saved"):
        resumed.train(resume_from_checkpoint=True)


def test_a_checkpoint_beyond_the_last_step_is_refused(make_trainer):
    make_trainer(max_steps=4, save_steps=2).train()
    with pytest.raises(CheckpointError, match=r"checkpoint-4 of step 4, want one of max_steps=3 at most; fix: "):
        make_trainer(max_steps=3, overwrite_output_dir=False).train(resume_from_checkpoint=True)


def test_only_the_newest_are_kept(make_trainer, tmp_path):
    make_trainer(max_steps=6, save_steps=1, save_total_limit=2).train()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-5", "checkpoint-6"]


LR = "learning_rate: 0.001 in the checkpoint, 0.5 now; the checkpoint's counts: it is in the state of the optimizer"


@pytest.fixture
def saved(make_trainer):
    """A checkpoint between two batches; with `steps_per_generation` in the middle of one."""

    def save(**options):
        trainer = make_trainer(max_steps=3, save_steps=3, **options)
        trainer.train()
        return trainer.output_dir / "checkpoint-3"

    return save


@pytest.fixture
def resumed(make_trainer, caplog):
    """Resumes in another trainer: its learner, and the lines that were logged."""

    def resume(checkpoint, **options):
        trainer = make_trainer(**{"max_steps": 3, "save_steps": 3, "overwrite_output_dir": False, **options})
        with caplog.at_level(logging.WARNING):
            restore(checkpoint, trainer.learner, trainer.collector)
        return trainer.learner, [line.strip() for line in caplog.text.splitlines()]

    return resume


KEPT = {
    "reference": {"beta": 0.1},
    "self-distillation": {"teacher_model": "self", "distillation_coef": 0.5},
    "base of an adapter": {"peft_config": LoraConfig(r=2, target_modules=["q_proj"]), "engine": TransformersEngine},
}


@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
def test_a_model_that_no_checkpoint_has_must_be_the_same(saved, resumed, options):
    """The reference, or the base of an adapter, would be another one in silence."""
    checkpoint = saved(**options)
    assert resumed(checkpoint, **options)
    with pytest.raises(CheckpointError, match=r"got frozen_weights=.* fix: .*the model that the run began with"):
        resumed(checkpoint, model_seed=1, **options)


@pytest.mark.parametrize("options", [{}, {"beta": 0.1, "sync_ref_model": True}], ids=["alone", "and its reference"])
def test_a_model_that_the_checkpoint_has_may_be_any(saved, resumed, options):
    resumed(saved(**options), model_seed=1, **options)


def test_a_base_in_another_dtype_is_the_same(make_model):
    model = make_model()
    assert fingerprint(model) == fingerprint(copy.deepcopy(model).bfloat16()) != fingerprint(make_model(1))


def test_what_an_adapter_learns_is_not_its_base(make_model):
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)  # at random, anew each time
    first, second, other = (fingerprint(get_peft_model(make_model(seed), config)) for seed in (0, 0, 1))
    assert first == second != other


def test_other_numbers_of_a_users_optimizer_are_said(saved, make_trainer, caplog):
    checkpoint = saved()
    trainer = make_trainer(max_steps=3, save_steps=3, overwrite_output_dir=False)
    for group in trainer.learner.optimizer.param_groups:  # as one has that the user made
        group["weight_decay"] = 0.5
    with caplog.at_level(logging.WARNING):
        restore(checkpoint, trainer.learner, trainer.collector)
    assert "weight_decay of the optimizer: 0.0 in the checkpoint, 0.5 now; the checkpoint's counts" in caplog.text
    assert trainer.learner.optimizer.param_groups[0]["weight_decay"] == 0.0


def test_every_option_has_a_rule_with_a_reason():
    args, names = GRPOConfig(), {field.name for field in dataclasses.fields(GRPOConfig)}
    assert not RULES.keys() - names
    for name in names:
        rule = rule_of(name, args, mid_batch=True)
        assert rule.wins in ("checkpoint", "new", "refused", "none")
        assert rule.why


def test_what_is_loaded_is_the_checkpoints_and_the_rest_is_new(saved, resumed):
    learner, said = resumed(saved(), learning_rate=0.5, weight_decay=0.1, adam_beta1=0.5, epsilon=0.3, save_steps=1)
    assert any(LR in line for line in said)
    for name in ("weight_decay: 0.0", "adam_beta1: 0.9"):
        assert any(line.startswith(name) and "the checkpoint's counts" in line for line in said)
    for name in ("epsilon: 0.2 in the checkpoint, 0.3 now; the new one counts: from the next step on", "save_steps: 3"):
        assert any(line.startswith(name) for line in said)
    group = learner.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], *group["betas"], learner.args.epsilon) == (1e-3, 0.0, 0.9, 0.999, 0.3)
    assert not any(line.startswith(("resume_from", "overwrite", "output_dir")) for line in said)


def test_score_centering_is_not_turned_on_for_rollouts_in_progress(make_trainer, tmp_path):
    options = {"steps_per_generation": 4, "save_steps": 1, "max_steps": 1, "output_dir": str(tmp_path / "run")}
    make_trainer(**options).train()
    options |= {"overwrite_output_dir": False, "max_steps": 2}
    with pytest.raises(CheckpointError, match=r"got score_centering='topk' .* want score_centering='off' .*fix: "):
        make_trainer(score_centering="topk", **options).train(resume_from_checkpoint=True)


def test_nothing_is_said_where_nothing_has_changed(saved, resumed):
    assert resumed(saved())[1] == []


@pytest.mark.parametrize("options", [{"num_iterations": 3}, {"loss_type": "grpo"}, {"beta": 0.1}, {"seed": 1}])
def test_what_cannot_be_continued_is_refused(saved, resumed, options):
    (name,) = options
    with pytest.raises(CheckpointError, match=rf"got {name}=.* want {name}=.*fix: "):
        resumed(saved(), **options)


def test_another_temperature_is_refused_in_the_middle_of_a_batch_alone(saved, resumed):
    with pytest.raises(CheckpointError, match=r"got temperature=0\.5 .* want temperature=1\.0"):
        resumed(saved(steps_per_generation=2), steps_per_generation=2, temperature=0.5)
    assert any(line.startswith("temperature: 1.0") for line in resumed(saved(), temperature=0.5)[1])


def test_an_adaptive_coefficient_goes_on_and_a_fixed_one_is_the_new_runs(saved, resumed):
    adaptive = {"use_adaptive_entropy": True, "entropy_target": 5.0}
    learner, said = resumed(saved(**adaptive), **adaptive, entropy_coef=0.5)
    assert learner.entropy.coefficient == pytest.approx(0.015)
    assert any(line.startswith("entropy_coef") and "the checkpoint's counts" in line for line in said)
    assert resumed(saved(entropy_coef=0.1), entropy_coef=0.2)[0].entropy.coefficient == 0.2
