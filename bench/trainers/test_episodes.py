"""Episodes: what tokens of tools cost in the head, how long a batch waits for tools, and steps beside TRL's trainer.

    head       loss and gradients from given hidden states on, by the trainer's own code: of completions with a mask,
               and of the same without one, so that all tokens enter the head
    waiting    a batch of episodes and a single one, with vLLM in this process
    beside     steps of `train()` of TRL's trainer and ours: episodes with their tools, rewards, update and log

The model of the last two calls a tool in each turn because its weights say so (calling_model.py). It is tiny and its
turns are short: what is measured is the time of tools and of what plays episodes, and not that of a model. In all parts
a check comes before the clock, and everything that is compared runs in interleaved rounds.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo.bench.interleaved import interleaved_seconds, quotient
from fused_grpo.bench.memory import allocations_of
from fused_grpo.bench.trainers.calling_model import AsyncLookup, Calling, Lookup, player, vllm_engine, with_tool
from fused_grpo.bench.trainers.training_step import EOS, Problem, our_trainer, trl_trainer
from fused_grpo.bench.trainers.whole_steps import SteppedTrainer
from fused_grpo.config import GRPOLossConfig
from fused_grpo.trainer.batching.micro_batches import Packing, micro_batches
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.types import MicroBatch, Rollouts, with_fields

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# SmolLM2's head. To write the gradient of its weight takes as long for few tokens as for many: both are measured.
FEW, MANY = 120, 480  # tokens of a completion
HEAD = Problem(vocab=49152, hidden=576, layers=1, completions=8, longest=MANY)
SMALL_HEAD = Problem(vocab=500, hidden=32, layers=1, completions=8, longest=20)
OWN, ALL = "the model's own tokens", "all tokens (no completion_mask)"
# Three turns, of which two call.
CALLING = Calling(vocab=320, hidden=128, layers=2, completions=32, longest=256, turn_tokens=12, calls=2)
SMALL_CALLING = replace(CALLING, completions=8, turn_tokens=4)
TOOLS = {"plain": Lookup, "async": AsyncLookup}
NUMBERS = {"1 episode": 1, "64 episodes": 64}
ONE, BATCH = NUMBERS
WAITING = "episodes of three turns and two calls of a tool of 1 s, {}"
TRL, OURS, OURS_VLLM = "TRL, transformers", "fused-grpo trainer, transformers", "fused-grpo trainer, vLLM"
SETTINGS = {
    TRL: "turns of the batch in one call of generate; then its tools, one after the other",
    OURS: "turns of the batch in one call of generate; then its tools, at the same time",
    OURS_VLLM: "turns as they come, in process; tools at the same time",
}
LATENCIES = (0.0, 0.1)  # seconds of a tool
ROUNDS = 5

pytestmark = pytest.mark.trainer
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="the chat template is in TRL's files")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="fix: pip install 'fused-grpo[vllm]'")


@pytest.fixture(scope="module")
def tiny(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--tiny"))


@pytest.fixture(scope="module")
def calling(tiny: bool) -> Calling:
    return SMALL_CALLING if tiny else CALLING


class GivenStates(PolicyLoss):
    """A policy whose backbone takes no time: it returns given states."""

    states: Tensor

    def run(self, batch: MicroBatch, **options: Any) -> tuple[Tensor, Any]:
        return self.states, None

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Of the states and of the head's weight."""
        loss.backward()
        tensors = [self.states, self.model.get_output_embeddings().weight]
        gradients = [tensor.grad for tensor in tensors]
        for tensor in tensors:
            tensor.grad = None
        return gradients

    def step(self, part: MicroBatch) -> list[Tensor]:
        counts = {"num_tokens": float(len(part.targets)), "num_sequences": float(len(part.advantages))}
        return self.gradients(self(part, **counts).loss)


@dataclass(frozen=True)
class Head:
    problem: Problem
    actions: Mapping[str, Callable[[], object]]
    seconds: Mapping[str, list[float]]

    @property
    def group(self) -> str:
        tokens = self.problem.completions * self.problem.longest
        return f"head and loss, {tokens:,} completion tokens, 70 % of them of tools"


@pytest.fixture(scope="module", params=[FEW, MANY], ids="completions of {}".format)
def head(request: pytest.FixtureRequest, tiny: bool) -> Head:
    problem = SMALL_HEAD if tiny else replace(HEAD, longest=request.param)
    model, parts = problem.model(), packed(problem)
    model = model.bfloat16() if DEVICE == "cuda" else model
    policy = GivenStates(model, GRPOLossConfig(loss_type="dapo"), temperature=1.0)
    shape = (*parts[ALL].input_ids.shape, problem.hidden)
    policy.states = torch.randn(shape, device=DEVICE, dtype=model.dtype).requires_grad_()
    if DEVICE == "cpu":  # on a GPU both round to bf16
        check_gradients(policy, parts, torch.tensor(mask_of(problem) * problem.completions))
    actions = {name: partial(policy.step, part) for name, part in parts.items()}
    interleaved_seconds(actions, rounds=1)
    return Head(problem, actions, interleaved_seconds(actions, rounds=2 if tiny else ROUNDS))


def mask_of(problem: Problem) -> list[bool]:
    """Three turns of the model and two answers: 30 % of the tokens are its own."""
    own, answer = problem.longest // 10, 7 * problem.longest // 20
    return ([True] * own + [False] * answer) * 2 + [True] * own


def packed(problem: Problem) -> dict[str, MicroBatch]:
    size = problem.completions, problem.longest
    ids = torch.randint(2, problem.vocab, size, generator=torch.Generator().manual_seed(0)).tolist()
    batch = with_fields(problem.batch(), {"completion_ids": ids})
    masked = with_fields(batch, {"completion_mask": [mask_of(problem)] * problem.completions})
    packing, device = Packing(one_row=True, sequences=problem.completions), torch.device(DEVICE)
    return {name: micro_batches(samples, packing, device=device)[0] for name, samples in ((OWN, masked), (ALL, batch))}


def check_gradients(policy: GivenStates, parts: Mapping[str, MicroBatch], own: Tensor) -> None:
    """They are those of the log-probs of all tokens, multiplied by the mask, as other trainers compute them."""
    every, logprobs = parts[ALL], policy(parts[ALL], "logprobs")
    advantages = every.advantages.repeat_interleave(every.cu_seqlens.diff())
    whole = policy.gradients(-((logprobs - logprobs.detach()).exp() * advantages * own).sum() / own.sum())
    for gradient, expected in zip(policy.step(parts[OWN]), whole, strict=True):
        assert (gradient - expected).norm() <= 1e-5 * expected.norm()
    assert len(parts[OWN].targets) * 10 == len(every.targets) * 3


@pytest.mark.parametrize("tokens", [OWN, ALL])
def test_head_of_masked_completions(benchmark: Any, replay: Any, head: Head, tokens: str) -> None:
    benchmark.group = head.group
    replay.into(benchmark, head.seconds[tokens])
    benchmark.extra_info |= {
        "implementation": tokens,
        "share_of_all": quotient(head.seconds, tokens, ALL),
        "peak_bytes": allocations_of(head.actions[tokens], DEVICE).peak,
        **vars(head.problem),
        "threads": torch.get_num_threads(),
    }


def test_promise_of_masked_tokens(figures: Any, head: Head) -> None:
    """With 0.3 of the tokens the head takes at most 0.35 of its time."""
    if head.problem.longest != MANY:
        pytest.skip("promised of many tokens")
    figures.promise("head: seconds of own tokens / all", head.group, quotient(head.seconds, OWN, ALL), "<= 0.35")


@pytest.fixture(scope="module")
def waiting(calling: Calling, tiny: bool) -> Mapping[Any, list[float]]:
    """Seconds by kind of tool and number of episodes."""
    tools = {kind: make() for kind, make in TOOLS.items()}
    with closing(vllm_engine(calling, sequences=NUMBERS[BATCH])) as engine:
        plays = {(kind, n): player(engine, calling, tools[kind], NUMBERS[n]) for kind in TOOLS for n in NUMBERS}
        for play in plays.values():
            check_episodes(play(), calling)
        for tool in tools.values():
            tool.seconds = 0.05 if tiny else 1.0
        return interleaved_seconds(plays, rounds=2 if tiny else ROUNDS)


def check_episodes(rollouts: Rollouts, problem: Calling) -> None:
    assert rollouts.episodes is not None
    assert rollouts.completion_masks is not None
    for episode, mask in zip(rollouts.episodes, rollouts.completion_masks, strict=True):
        assert [call.failed for call in episode.calls] == [False] * problem.calls
        assert sum(mask) == (problem.calls + 1) * problem.turn_tokens


@needs_trl
@needs_vllm
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", TOOLS)
def test_waiting_for_tools(
    benchmark: Any, replay: Any, waiting: Mapping[Any, list[float]], calling: Calling, kind: str, number: str
) -> None:
    benchmark.group = WAITING.format(kind)
    replay.into(benchmark, waiting[kind, number])
    benchmark.extra_info |= {
        "implementation": number,
        "times_one": quotient(waiting, (kind, number), (kind, ONE)),
        **vars(calling),
        "completions": NUMBERS[number],
        "threads": torch.get_num_threads(),
    }


@needs_trl
@needs_vllm
@pytest.mark.parametrize("kind", TOOLS)
def test_promise_of_waiting(figures: Any, waiting: Mapping[Any, list[float]], tiny: bool, kind: str) -> None:
    """64 episodes take at most 1.3 times as long as one."""
    if tiny:
        pytest.skip("promised of a tool of 1 s")
    value = quotient(waiting, (kind, BATCH), (kind, ONE))
    figures.promise("seconds of 64 episodes / 1", WAITING.format(kind), value, "<= 1.3")


@pytest.fixture(scope="module")
def beside(calling: Calling, tiny: bool) -> Mapping[float, Mapping[str, list[float]]]:
    """Seconds of the steps of each trainer, by those of the tool."""
    tool, seen = Lookup(), {name: set[tuple[int, ...]]() for name in SETTINGS}
    makers = {OURS: with_tool(our_trainer, tool, seen[OURS]), TRL: with_tool(trl_trainer, tool, seen[TRL])}
    if importlib.util.find_spec("vllm") is not None:
        engine = vllm_engine(calling, sequences=calling.completions)
        makers[OURS_VLLM] = with_tool(our_trainer, tool, seen[OURS_VLLM], rollout_engine=engine)
    trainers = {name: SteppedTrainer(calling, make) for name, make in makers.items()}
    steps = {name: trainer.step for name, trainer in trainers.items()}
    interleaved_seconds(steps, rounds=1)
    ((said,),) = {frozenset(seen[name]) for name in steps}  # one completion: all say the same, token by token
    assert said.count(EOS) == 2 * calling.calls + 1
    seconds = {}
    for latency in LATENCIES:
        tool.seconds = latency
        seconds[latency] = interleaved_seconds(steps, rounds=1 if tiny else 3)
    for trainer in trainers.values():
        trainer.stop()
    return seconds


@needs_trl
@pytest.mark.parametrize("trainer", [TRL, OURS, pytest.param(OURS_VLLM, marks=needs_vllm)])
@pytest.mark.parametrize("latency", LATENCIES)
def test_steps_with_tools(
    benchmark: Any, replay: Any, beside: Any, calling: Calling, latency: float, trainer: str
) -> None:
    benchmark.group = f"whole steps with {f'a tool of {latency} s' if latency else 'a tool that answers at once'}"
    replay.into(benchmark, beside[latency][trainer])
    benchmark.extra_info |= {
        "implementation": trainer,
        "setting": SETTINGS[trainer],
        "episodes_per_second": calling.completions / statistics.median(beside[latency][trainer]),
        **vars(calling),
        "threads": torch.get_num_threads(),
    }
