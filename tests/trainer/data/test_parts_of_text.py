"""Contents that are parts of text: reward functions get the parts, as in TRL, and the chat template one string."""

import json

import pytest
from datasets import Dataset

PARTS = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]
PROMPT = [{"role": "system", "content": PARTS[:1]}, {"role": "user", "content": PARTS}]


@pytest.mark.parametrize("kind", [list, Dataset.from_list])
def test_rewards_and_logs_have_the_prompt_as_it_was_given(tokenizer, make_trainer, tmp_path, kind):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content is not string %}{{ raise_exception('parts') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    seen = []

    def reward(prompts, completions, **columns):
        seen.extend(zip(prompts, completions, strict=True))
        return [float(len(completion[0]["content"])) for completion in completions]

    trainer = make_trainer(reward, dataset=kind([{"prompt": PROMPT}] * 4), max_steps=1)
    trainer.train()
    assert all(prompt == PROMPT for prompt, _ in seen)
    assert {(message["role"], type(message["content"])) for _, (message,) in seen} == {("assistant", str)}
    assert all(prompt == PROMPT for prompt in trainer._logs["prompt"])
    assert {trainer.processing_class.decode(sample.prompt_ids) for sample in trainer.scored.samples} == {"1+1+1"}
    lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    assert {json.loads(line)["prompt"] for line in lines} == {"system: 1+\nuser: 1+1"}
