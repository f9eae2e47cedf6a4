"""What a reward changes of the process is as it was for the run, which draws from no generator that a reward moves."""

import locale
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from fused_grpo.trainer.common.process_state import KEPT, process_kept

CHANGES: dict[str, Callable[[], Any]] = {
    "recursion limit": lambda: sys.setrecursionlimit(250),
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8"),
    "umask": lambda: os.umask(0o777),
    "signal handlers": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "gradients": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "precision of products": lambda: torch.set_float32_matmul_precision("medium"),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
}


@pytest.fixture(autouse=True)
def _as_it_was():
    """For the tests behind this one, where a change is not put back."""
    before = {name: get() for name, (get, _) in KEPT.items()}
    yield
    for name, (_, put) in KEPT.items():
        put(before[name])


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_reward_changes_is_put_back_for_the_run(make_trainer, name):
    seen = list[Any]()

    def changes(completions: list[str], **columns: Any) -> list[float]:
        seen.append(KEPT[name][0]())
        rewards = [float(len(text)) for text in completions]
        CHANGES[name]()
        assert KEPT[name][0]() != seen[-1]
        return rewards

    assert make_trainer(changes, max_steps=2, save_steps=1).train().steps == 2
    assert len(seen) == 2
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_put_back_where_the_function_fails(name):
    before = KEPT[name][0]()
    with suppress(ZeroDivisionError), process_kept():
        CHANGES[name]()
        _ = 1 / 0
    assert KEPT[name][0]() == before


def weights(make_trainer: Any, act: Callable[[], Any], rate: float = 0.5, **options: Any) -> Any:
    """After three steps with dropout of that rate, where the reward acts before it scores."""

    def acts(completions: list[str], **columns: Any) -> list[float]:
        act()
        return [float(len(text)) for text in completions]

    trainer = make_trainer(acts, logprob_mismatch="warn", **options)
    for layer in trainer.model.model.layers:
        layer.self_attn.attention_dropout = rate
    trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    return {name: value.tolist() for name, value in trainer.model.state_dict().items()}


ACTS = {"seeds": lambda: torch.manual_seed(42), "draws": lambda: torch.rand(3)}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_reward_that_seeds_or_draws_moves_no_dropout(make_trainer, act):
    assert weights(make_trainer, act) == weights(make_trainer, lambda: None)


def test_a_reward_draws_other_numbers_in_each_step_as_after_a_resume(make_trainer, tmp_path):
    whole, again = list[float](), list[float]()
    weights(make_trainer, lambda: whole.append(float(torch.rand(()))), rate=0.0, save_steps=2)
    place = tmp_path / "run" / "checkpoint-2"
    options = {"overwrite_output_dir": False, "resume_from_checkpoint": str(place)}
    weights(make_trainer, lambda: again.append(float(torch.rand(()))), rate=0.0, **options)
    assert len(set(whole)) == 3
    assert again == whole[2:]
