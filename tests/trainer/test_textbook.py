"""Whole runs against textbook GRPO: full logits, autograd, one batch, on the rollouts that the trainer recorded.

In fp64, so that Adam does not turn the rounding of gradients that ought to be zero into updates.
"""

import copy
import json

import pytest
import torch

TEMPERATURE, BETA, LEARNING_RATE, STEPS, WARMUP = 0.8, 0.1, 2e-3, 6, 2
ADAM = {"betas": (0.7, 0.9), "weight_decay": 0.3}
RUN = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_generations": 4,
    "num_iterations": 3,
    "max_steps": STEPS,
    "beta": BETA,
    "temperature": TEMPERATURE,
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "linear",
    "warmup_steps": WARMUP,
    "adam_beta1": ADAM["betas"][0],
    "adam_beta2": ADAM["betas"][1],
    "weight_decay": ADAM["weight_decay"],
}


@pytest.fixture
def make_model(make_model):
    return lambda *arguments, **options: make_model(*arguments, **options).double()


def record(trainer) -> list:
    """The rollouts of the trainer's generate calls, as they come."""
    recorded, generate = [], trainer.engine.generate
    trainer.engine.generate = lambda *arguments: recorded.append(generate(*arguments)) or recorded[-1]
    return recorded


def lines(trainer, name="metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (trainer.output_dir / name).read_text().splitlines()]


def textbook_logprobs(model, rollouts) -> list[torch.Tensor]:
    """One tensor per completion, from one unpadded forward pass each."""
    logprobs = []
    for index, ids in enumerate(rollouts.completion_ids):
        prompt = rollouts.prompt_ids[index // 4]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        logprobs.append(logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0])
    return logprobs


def textbook_advantages(trainer, rollouts) -> torch.Tensor:
    texts = trainer.processing_class.batch_decode(rollouts.completion_ids, skip_special_tokens=True)
    groups = torch.tensor(trainer.rewards.functions[0](texts)).view(-1, 4)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def textbook_loss(logprobs, old, reference, advantages, *, loss_type) -> torch.Tensor:
    per_sequence = []
    for new, before, initial, A in zip(logprobs, old, reference, advantages, strict=True):
        ratio = torch.exp(new - before)
        kl = torch.exp(initial - new) - (initial - new) - 1
        per_sequence.append(-torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A) + BETA * ratio * kl)
    if loss_type == "dapo":
        return torch.cat(per_sequence).mean()
    return torch.stack([tokens.mean() for tokens in per_sequence]).mean()


def replay(model, trainer, recorded, *, loss_type, max_grad_norm) -> list[tuple[float, float, float]]:
    """Train `model` on the recorded rollouts; (loss, gradient norm, learning rate) of every step."""
    initial, parameters = copy.deepcopy(model), list(model.parameters())
    # As transformers has it: matrices decay, biases and norms do not.
    groups = [{"params": [p for p in parameters if p.ndim > 1]}]
    groups += [{"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}]
    optimizer, steps = torch.optim.AdamW(groups, **ADAM), []
    for step in range(STEPS):
        rollouts = recorded[step // 3]
        logprobs = textbook_logprobs(model, rollouts)
        if step % 3 == 0:
            old = [x.detach() for x in logprobs]
            reference = [x.detach() for x in textbook_logprobs(initial, rollouts)]
            advantages = textbook_advantages(trainer, rollouts)
        loss = textbook_loss(logprobs, old, reference, advantages, loss_type=loss_type)
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.cat([x.flatten() for x in gradients]).norm().item()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient * min(1.0, max_grad_norm / (norm + 1e-6))
        rate = LEARNING_RATE * (step / WARMUP if step < WARMUP else (STEPS - step) / (STEPS - WARMUP))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        steps.append((loss.item(), norm, rate))
    return steps


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("max_grad_norm", [0.2, 1e3])
def test_six_steps_are_those_of_the_textbook(make_trainer, make_model, loss_type, max_grad_norm):
    options = {"loss_type": loss_type, "max_grad_norm": max_grad_norm}
    trainer, model = make_trainer(**RUN, **options), make_model()
    start, recorded = copy.deepcopy(model.state_dict()), record(trainer)
    trainer.train()
    expected = replay(model, trainer, recorded, **options)
    assert len(recorded) == 2
    norms = [norm for _, norm, _ in expected]
    assert min(norms) > 2 * max_grad_norm or max(norms) < max_grad_norm / 2
    for line, step in zip(lines(trainer), expected, strict=True):
        assert [line[name] for name in ("loss", "grad_norm", "learning_rate")] == pytest.approx(
            step, rel=1e-5, abs=1e-6
        )
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], parameter, rtol=0, atol=1e-6)
    assert max((parameter - start[name]).abs().max() for name, parameter in model.state_dict().items()) > 1e-3


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_the_cut_into_micro_batches_changes_no_loss_and_no_gradient_norm(make_trainer, loss_type):
    runs = []
    for batch, accumulation in ((8, 1), (4, 2), (2, 4)):
        cut = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        trainer = make_trainer(**{**RUN, **cut}, loss_type=loss_type)
        trainer.train()
        runs.append([line[name] for line in lines(trainer) for name in ("loss", "grad_norm")])
    assert len(runs[0]) == 2 * STEPS
    assert runs[1] == pytest.approx(runs[0], rel=1e-5, abs=1e-6)
    assert runs[2] == pytest.approx(runs[0], rel=1e-5, abs=1e-6)


def test_every_generate_call_draws_anew_and_the_seed_decides(make_trainer):
    drawn = {}
    for run, seed in (("first", 1), ("same", 1), ("other", 2)):
        trainer = make_trainer(max_steps=4, seed=seed)
        recorded = record(trainer)
        trainer.train()
        drawn[run] = [sampling.seed for _, sampling in trainer.engine.calls], [r.completion_ids for r in recorded]
    seeds = drawn["first"][0] + drawn["other"][0]
    assert len(set(seeds)) == 8
    assert drawn["first"] == drawn["same"]
    assert drawn["first"][1] != drawn["other"][1]


def test_evaluation_is_one_greedy_completion_of_each_prompt(make_trainer):
    trainer = make_trainer(max_steps=2, eval_steps=1, max_completion_length=5)
    trainer.eval_dataset = trainer.dataset[:3]
    trainer.train()
    calls = [(count, s.n, s.temperature, s.max_tokens) for count, s in trainer.engine.calls]
    greedy, training = (3, 1, 0.0, 5), (1, 4, 1.0, 5)
    assert calls == [greedy, training, greedy, training, greedy]


def test_without_shuffling_prompts_come_in_the_order_of_the_dataset(make_trainer):
    rows = [{"prompt": f"{number}+1="} for number in range(6)]
    trainer = make_trainer(dataset=rows, shuffle_dataset=False, per_device_train_batch_size=8, max_steps=4)
    recorded = record(trainer)
    trainer.train()
    prompts = [trainer.processing_class.decode(ids) for rollouts in recorded for ids in rollouts.prompt_ids]
    assert prompts == [row["prompt"] for row in rows] + ["0+1=", "1+1="]


@pytest.mark.parametrize(("epochs", "batches"), [(0.5, 3), (1, 5), (2, 10)])
def test_an_epoch_is_every_prompt_once_times_the_iterations(make_trainer, epochs, batches):
    rows = [{"prompt": f"{number}+1="} for number in range(10)]
    options = {"max_steps": -1, "num_train_epochs": epochs, "num_iterations": 2, "per_device_train_batch_size": 8}
    trainer = make_trainer(dataset=rows, **options)
    recorded = record(trainer)
    assert trainer.train().steps == len(lines(trainer)) == 2 * batches
    prompts = [tuple(ids) for rollouts in recorded for ids in rollouts.prompt_ids]
    assert len(recorded) == batches
    assert len(set(prompts)) == min(10, 2 * batches)
