"""On-policy distillation: whole runs against full logits of both models, and what it cannot be combined with."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from transformers import OPTConfig, OPTForCausalLM

from fused_grpo.errors import CheckpointError, InputError, UnsupportedError, WrongTypeError
from fused_grpo.trainer import GRPOConfig

TEMPERATURE, COEF, BETA = 0.8, 0.7, 0.3
WIDER = {"hidden_size": 48, "num_hidden_layers": 3, "num_key_value_heads": 2}
RUN = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_iterations": 2,
    "max_steps": 4,
    "temperature": TEMPERATURE,
    "max_grad_norm": 1e9,
    "distillation_coef": COEF,
    "distillation_beta": BETA,
}


def lines(trainer) -> list[dict]:
    return [json.loads(line) for line in (trainer.output_dir / "metrics.jsonl").read_text().splitlines()]


def recorded(trainer) -> list:
    rollouts, generate = [], trainer.engine.generate
    trainer.engine.generate = lambda *arguments: rollouts.append(generate(*arguments)) or rollouts[-1]
    return rollouts


def log_softmax(model, rollouts) -> list[torch.Tensor]:
    """Log-probs [T, V] for each completion, from one unpadded forward pass each."""
    found = []
    for index, ids in enumerate(rollouts.completion_ids):
        prompt = rollouts.prompt_ids[index // rollouts.num_generations]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        found.append((logits / TEMPERATURE).log_softmax(-1))
    return found


def divergence(p: torch.Tensor, q: torch.Tensor, kind: str) -> torch.Tensor:
    """[T] from log-probs [T, V] of student and teacher, by the formulas of docs/divergence.md."""

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)

    if kind == "reverse_kl":
        return kl(p, q)
    m = ((1 - BETA) * p.exp() + BETA * q.exp()).log()
    return kl(q, p) if kind == "forward_kl" else BETA * kl(q, m) + (1 - BETA) * kl(p, m)


def replay(model, teacher, trainer, rollouts, *, kind: str, loss_type: str) -> list[tuple[float, float, float]]:
    """Train `model` on the rollouts; (loss, gradient norm, mean divergence) of every step."""
    optimizer, done = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), []
    for step in range(RUN["max_steps"]):
        some = rollouts[step // 2]
        texts = trainer.processing_class.batch_decode(some.completion_ids, skip_special_tokens=True)
        groups = torch.tensor(trainer.rewards.functions[0](completions=texts)).view(-1, 4)
        A = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        student = log_softmax(model, some)
        chosen = [x.gather(1, torch.tensor(ids)[:, None])[:, 0] for x, ids in zip(student, some.completion_ids)]
        old = [x.detach() for x in chosen] if step % 2 == 0 else old
        with torch.no_grad():
            of_teacher = log_softmax(teacher, some)
        apart = [divergence(p, q, kind) for p, q in zip(student, of_teacher, strict=True)]
        terms = []
        for new, before, a, d in zip(chosen, old, A, apart, strict=True):
            ratio = (new - before).exp()
            terms.append(COEF * d - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a))
        means = torch.stack([x.mean() for x in terms])
        loss = torch.cat(terms).mean() if loss_type == "dapo" else means.mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        done.append((loss.item(), norm.item(), torch.cat(apart).mean().item()))
    return done


@pytest.fixture
def double(make_model):
    return lambda *arguments, **options: make_model(*arguments, **options).double()


@pytest.mark.parametrize(
    ("kind", "loss_type", "reward"),
    [("reverse_kl", "dapo", "digits"), ("forward_kl", "grpo", "digits"), ("jsd", "dapo", None)],
)
def test_steps_are_those_of_full_logits_of_both_models(make_trainer, double, kind, loss_type, reward):
    """In fp64, from a teacher with another width and depth; without a reward the divergence is the whole loss."""
    teacher, start = double(seed=3, **WIDER), double()
    options = {"distillation_kind": kind, "loss_type": loss_type, **RUN}
    rewards = () if reward else (None,)
    trainer = make_trainer(*rewards, teacher_model=copy.deepcopy(teacher), **options)
    trainer.model.double()
    trainer.model.load_state_dict(start.state_dict())
    rollouts = recorded(trainer)
    trainer.train()
    expected = replay(start, teacher, trainer, rollouts, kind=kind, loss_type=loss_type)
    for line, step in zip(lines(trainer), expected, strict=True):
        found = [line[name] for name in ("loss", "grad_norm", "distillation")]
        assert found == pytest.approx(step, rel=1e-5, abs=1e-6)
    for name, parameter in start.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], parameter, rtol=0, atol=1e-6)
