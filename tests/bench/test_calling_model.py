"""The model of the benchmarks of episodes: it calls its tool whatever it reads, and trainers play the same with it."""

import pytest
import torch

from fused_grpo.bench.trainers.calling_model import CALL, END, Calling, Lookup, question, with_tool
from fused_grpo.bench.trainers.training_step import EOS, our_trainer, trl_trainer
from fused_grpo.bench.trainers.whole_steps import SteppedTrainer
from fused_grpo.trainer.episodes.conversation import Template

pytest.importorskip("trl", reason="TRL is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
PROBLEM = Calling(vocab=320, hidden=128, layers=2, completions=8, longest=256, turn_tokens=5, calls=2)


@pytest.mark.parametrize("number", [3, 47])
def test_a_turn_is_the_call_whatever_was_read(number):
    model, tokenizer = PROBLEM.model(), PROBLEM.tokenizer()
    prompt = tokenizer.apply_chat_template(
        question(number), add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.random.fork_rng():
        torch.manual_seed(number)
        whole = model.generate(**prompt, do_sample=True, max_new_tokens=20)[0].tolist()
    said = whole[prompt["input_ids"].shape[1] :]
    assert len(said) == PROBLEM.turn_tokens
    assert tokenizer.decode(said) == f"thought 0, thought 1, thought 2, {CALL}{END}"
    (call,) = Template(tokenizer, None, stop_ids=[EOS]).reply(said, [], [Lookup().look_up])["tool_calls"]
    assert call["function"] == {"name": "look_up", "arguments": {"word": "GRPO"}}


def test_trl_plays_the_episodes_that_we_play_a_step_at_a_time(monkeypatch):
    from trl import import_utils

    monkeypatch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
    seen = {make: set() for make in (our_trainer, trl_trainer)}
    for make, completions in seen.items():
        trainer = SteppedTrainer(PROBLEM, with_tool(make, Lookup(), completions))
        assert not completions, "it waits before its first step"
        trainer.step()
        trainer.stop()
        assert len(completions) == 1
    (said,) = set.union(*seen.values())
    text = PROBLEM.tokenizer().decode(list(said))
    assert text.count(CALL) == PROBLEM.calls + 1
    assert text.count("GRPO is here.") == PROBLEM.calls
