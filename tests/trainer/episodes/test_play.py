"""Episodes from prompt to loss: tokens, masks, limits, metrics, records, and how little they wait."""

import itertools
import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from talkers import END, ConcurrentTalker, Talker, call

from fused_grpo.errors import DataError, InputError, UnsupportedError, WeightSyncError
from fused_grpo.trainer.common.threads import in_thread
from fused_grpo.trainer.engines import turns
from fused_grpo.trainer.episodes.play import _play
from fused_grpo.trainer.types import Sample, SamplingParams, Turn


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: One.
        b: Another.
    """
    return a * b


def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return f"after {seconds}"


def say(read: str, member: int) -> str:
    """Of a group of four: a call and what came of it, a wrong call, two calls at once, no call."""
    a = re.search(r"(\d+) \* 7", read)[1]
    answers = re.findall(r"<answer>(.*?)</answer>", read)
    if answers:
        return f"It is {answers[-1][:20]}."
    return (
        call("multiply", a=int(a), b=7),
        call("multiply", a=int(a), c=7),
        f"Both. {call('multiply', a=int(a), b=7)}{call('multiply', a=1, b=1)}",
        "No idea.",
    )[member % 4]


def records(trainer) -> list:
    return [json.loads(line) for line in Path(trainer.args.output_dir, "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("engine", [Talker, ConcurrentTalker])
def test_a_token_has_the_experts_of_the_turn_that_read_it_first(make_trainer, tokenizer, engine):
    def routed(prompt_ids, sampling):
        """Each turn says how many turns of the model it has read."""
        made = own(prompt_ids, sampling)
        lengths = [len(prompt_ids[place // sampling.n]) + len(ids) for place, ids in enumerate(made.completion_ids)]
        turns = [tokenizer.decode(prompt_ids[place // sampling.n]).count("<answer>") for place in range(len(lengths))]
        experts = [torch.full((length - 1, 2, 1), turn) for length, turn in zip(lengths, turns, strict=True)]
        return replace(made, routed_experts=experts)

    twice = lambda read, _: call("multiply", a=2, b=7) if read.count("<answer>") < 2 else "done"  # noqa: E731
    trainer = make_trainer(twice, engine=engine, tools=[multiply], max_steps=1)
    own, trainer.engine.generate = trainer.engine.generate, routed
    trainer.train()
    for sample in trainer.scored.samples:
        ends = [
            place
            for place, is_own in enumerate(sample.completion_mask[:-1])
            if is_own > sample.completion_mask[place + 1]
        ]
        first, second = (
            len(sample.prompt_ids) + end for end in ends
        )  # the last token of a turn is read by the next one
        counts = first, second - first, len(sample.prompt_ids) + len(sample.completion_ids) - 1 - second
        expected = torch.arange(3).repeat_interleave(torch.tensor(counts))
        assert torch.equal(sample.routed_experts[:, 1, 0].long(), expected)


@pytest.mark.parametrize("engine", [Talker, ConcurrentTalker])
def test_an_episode_is_what_was_said_and_what_tools_answered(make_trainer, tokenizer, engine):
    # Each turn's place in its call says who speaks: concurrent calls have one place, so members are told by the clock.
    members = iter(range(10**6))
    speak = say if engine is Talker else (lambda read, _: say(read, 3 if "<answer>" in read else next(members)))
    trainer = make_trainer(speak, engine=engine, tools=[multiply], max_steps=1, logging_steps=1)
    trainer.train()
    samples = sorted(trainer.scored.samples, key=lambda sample: len(sample.episode.messages))
    assert [len(sample.episode.calls) for sample in samples] == [0, 1, 1, 2]
    sample = samples[-1]
    assert tokenizer.decode(sample.completion_ids) == (
        f"Both. {call('multiply', a=int(re.search('[0-9]+', tokenizer.decode(sample.prompt_ids))[0]), b=7)}"
        f"{call('multiply', a=1, b=1)}{END}\n<|im_start|>user<answer>{sample.episode.calls[0].result}</answer>"
        f"<answer>1</answer>{END}\n<|im_start|>assistant\nIt is 1.{END}"
    )
    own = tokenizer.decode(
        [token for token, is_own in zip(sample.completion_ids, sample.completion_mask, strict=True) if is_own]
    )
    assert own.count(END) == 2
    assert "<answer>" not in own
    assert own.endswith(f"It is 1.{END}")
    assert [message["role"] for message in sample.episode.messages] == ["assistant", "tool", "tool", "assistant"]
    assert sample.finish_reason == "stop"
    log = trainer.state.log_history[0]
    assert log["tools/call_frequency"] == 1.0
    assert log["tools/failure_frequency"] == 0.25
    assert log["tools/turns"] == 1.75
    assert log["completions/max_length"] == max(one.num_own for one in trainer.scored.samples)


def test_records_have_messages_calls_and_how_an_episode_ended(make_trainer):
    trainer = make_trainer(say, tools=[multiply], max_steps=1)
    trainer.train()
    first, wrong, both, none = records(trainer)
    assert [one["turns"] for one in (first, wrong, both, none)] == [2, 2, 2, 1]
    assert [one["ended"] for one in (first, wrong, both, none)] == ["stop"] * 4
    assert first["tool_calls"][0].keys() == {"name", "arguments", "result", "failed", "seconds"}
    assert [call["failed"] for call in (*wrong["tool_calls"], *both["tool_calls"])] == [True, False, False]
    assert first["messages"][1] == {"role": "tool", "name": "multiply", "content": first["tool_calls"][0]["result"]}


def test_rewards_get_messages_and_columns(make_trainer):
    seen = []

    def reward(prompts, completions, completion_ids, answer, **columns):
        seen.extend(zip(prompts, completions, answer, strict=True))
        return [float(str(a) in messages[-1]["content"]) for messages, a in zip(completions, answer, strict=True)]

    trainer = make_trainer(say, tools=multiply, reward=reward, max_steps=1)
    trainer.train()
    prompt, messages, answer = seen[0]
    assert prompt == [{"role": "user", "content": f"{answer // 7} * 7?"}]
    assert messages[-1]["content"] == f"It is {answer}."
    assert [one["rewards"]["reward"] for one in records(trainer)] == [1.0, 0.0, float(answer == 1), 0.0]


def test_a_first_turn_may_go_on_with_what_a_prompt_begins(make_trainer):
    begun = [{"role": "user", "content": "3 * 7?"}, {"role": "assistant", "content": "I ask: "}]
    options = {"chat_template_kwargs": {"continue_final_message": True}, "rows": [{"prompt": begun, "answer": 21}] * 4}
    trainer = make_trainer(say, tools=multiply, max_steps=1, **options)
    trainer.train()
    for sample in trainer.scored.samples:
        assert trainer.processing_class.decode(sample.prompt_ids).endswith("I ask: ")
    assert [len(told["tool_calls"]) for told in records(trainer)] == [1, 1, 2, 0]


def loops(read: str, member: int) -> str:
    """Calls for ever."""
    return call("multiply", a=1, b=member + 1)


def test_turns_of_tools_are_limited(make_trainer):
    options = {"max_tool_calling_iterations": 2, "max_steps": 1, "max_completion_length": 900}
    trainer = make_trainer(loops, tools=[multiply], **options)
    trainer.train()
    for one in records(trainer):
        assert (one["ended"], one["turns"], len(one["tool_calls"])) == ("turn limit", 3, 2)
        assert [message["role"] for message in one["messages"]] == ["assistant", "tool"] * 2 + ["assistant"]


@pytest.mark.parametrize("longest", [75, 135, 200, 290])
def test_answers_without_room_are_taken_back(make_trainer, tokenizer, longest):
    trainer = make_trainer(loops, tools=[multiply], max_completion_length=longest, max_steps=1)
    trainer.train()
    for sample in trainer.scored.samples:
        assert len(sample.completion_ids) <= longest
        assert sample.completion_mask[-1]
        assert sample.episode.ended in ("no room", "length")
        assert sample.episode.messages[-1]["role"] == "assistant"
        assert sample.finish_reason == ("length" if sample.episode.ended == "length" else "stop")
        assert (sample.completion_ids[-1] == tokenizer.eos_token_id) is (sample.finish_reason == "stop")


def test_an_answer_of_megabytes_is_not_tokenised(make_trainer):
    def large(size: int) -> str:
        """Make text.

        Args:
            size: Characters.
        """
        return "x" * size

    trainer = make_trainer(lambda *_: call("large", size=50_000_000), tools=[large], max_steps=1)
    start = time.perf_counter()
    trainer.train()
    assert time.perf_counter() - start < 20
    assert {one["ended"] for one in records(trainer)} == {"no room"}
    assert max(map(len, Path(trainer.args.output_dir, "rollouts.jsonl").read_text().splitlines())) < 20_000


def test_tools_of_a_batch_are_called_at_the_same_time(make_trainer):
    all_there = threading.Barrier(16, timeout=50)

    def search(query: str) -> str:
        """Search.

        Args:
            query: For what.
        """
        all_there.wait()
        return query

    def talk(read: str, member: int) -> str:
        return "done" if "<answer>" in read else call("search", query=str(member))

    trainer = make_trainer(talk, tools=[search], per_device_train_batch_size=16, max_steps=1)
    trainer.train()
    assert [one["tool_calls"][0]["failed"] for one in records(trainer)] == [False] * 16


def test_no_episode_waits_for_the_slowest_where_the_engine_can_go_on(make_trainer):
    """The tool of one group answers when the other has had all its turns."""
    others, finished = threading.Event(), []

    def look(number: int) -> str:
        """Look.

        Args:
            number: Where.
        """
        assert number == 2 or others.wait(timeout=50)
        return str(number)

    def speak(read: str, _: int) -> str:
        number = int(re.search(r"(\d+) \* 7", read)[1])
        if read.count("<answer>") < (1 if number == 1 else 4):
            return call("look", number=number)
        finished.append(number)
        if finished == [2, 2]:
            others.set()
        return "done"

    rows = [{"prompt": [{"role": "user", "content": f"{a} * 7?"}]} for a in (1, 2)]
    options = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 1, "max_completion_length": 800}
    trainer = make_trainer(speak, engine=ConcurrentTalker, tools=[look], rows=rows, shuffle_dataset=False, **options)
    trainer.train()
    assert not any(one["failed"] for record in records(trainer) for one in record["tool_calls"])


def test_the_order_in_which_tools_answer_changes_nothing(make_trainer, tmp_path):
    """Where all are waited for: a turn's place in its call is that of its episode, and so are its random numbers."""

    def run(name: str, delays: list[float]) -> list:
        def look(number: int) -> str:
            """Look.

            Args:
                number: Where.
            """
            time.sleep(delays[number])
            return str(number)

        def talk(read: str, member: int) -> str:
            return f"done{'!' * member}" if "<answer>" in read else call("look", number=member)

        trainer = make_trainer(talk, tools=[look], output_dir=str(tmp_path / name))
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        trainer.train()
        after = list(trainer.model.parameters())
        assert not all(map(torch.equal, before, after))
        return after

    assert all(map(torch.equal, run("a", [0.0, 0.1, 0.2, 0.3]), run("b", [0.3, 0.2, 0.1, 0.0])))


def test_a_run_that_resumes_in_a_buffer_calls_no_tool_again(make_trainer, tmp_path):
    calls = []

    def counted(a: int, b: int) -> int:
        """Multiply.

        Args:
            a: One.
            b: Another.
        """
        calls.append(a)
        return a * b

    talk = lambda read, member: say(read, member).replace("multiply", "counted")  # noqa: E731
    options = {"tools": [counted], "num_iterations": 2, "max_steps": 4, "save_steps": 1, "save_strategy": "steps"}
    whole = make_trainer(talk, output_dir=str(tmp_path / "whole"), **options)
    whole.train()
    made = len(calls)
    calls.clear()
    resumed = make_trainer(talk, output_dir=str(tmp_path / "whole"), **options, overwrite_output_dir=False)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert calls == []
    assert made == 2 * 3  # two batches; the wrong calls never came that far
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tools": [lambda: 1]}, InputError, "no schema"),
        ({"tools": [multiply], "rows": [{"prompt": "3 * 7?"}] * 4}, DataError, "tools and strings as prompts"),
        ({"tools": [multiply], "tool_timeout": 0.0}, InputError, "tool_timeout"),
        *(
            ({"tools": [multiply], "chat_template_kwargs": {name: [{}]}}, InputError, f"got '{name}' in chat_template")
            for name in ("tools", "xml_tools")
        ),
        ({"tools": [multiply], "max_tool_calling_iterations": 0}, InputError, "max_tool_calling_iterations"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(make_trainer, options, error, text):
    with pytest.raises(error, match=text):
        make_trainer(say, **options)


def test_a_template_without_tools_is_refused(make_trainer, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    with pytest.raises(UnsupportedError, match="does not support tool calling"):
        make_trainer(say, tools=[multiply])


@pytest.mark.parametrize("failure", ["retry", "drop"])
def test_episodes_of_a_group_that_fails_are_played_again_or_dropped(make_trainer, failure):
    """A log-prob that is none, in the second turn of one member, once."""
    broken = [True]

    class Breaks(Talker):
        def generate(self, prompt_ids, sampling):
            rollouts = super().generate(prompt_ids, sampling)
            if len(prompt_ids) == 5 and broken.pop():  # those of two groups that have called
                broken.append(False)
                rollouts.sampling_logprobs[0][0] = float("nan")
            return rollouts

    def talk(read: str, member: int) -> str:
        if "<answer>" in read or member in (3, 6, 7):
            return f"done {member}"
        return call("multiply", a=1, b=member)

    options = {"per_device_train_batch_size": 8, "rollout_failure": failure, "max_steps": 1, "shuffle_dataset": False}
    trainer = make_trainer(talk, engine=Breaks, tools=[multiply], **options)
    trainer.train()
    samples = trainer.scored.samples
    assert len(samples) == 8
    assert [sample.dropped for sample in samples] == [failure == "drop"] * 4 + [False] * 4
    assert all(sample.episode is not None for sample in samples)
    assert all(len(one.completion_mask) == len(one.completion_ids) > 0 for one in samples if not one.dropped)


def test_names_of_an_episodes_records_cannot_be_logged_by_a_reward(make_trainer):
    def logs(completions, log_extra, **columns):
        log_extra("turns", ["mine"] * len(completions))
        return turns_of(completions)

    def turns_of(completions):
        return [float(len(one)) for one in completions]

    trainer = make_trainer(say, tools=[multiply], reward=logs, max_steps=1)
    trainer.train()
    assert [one["turns"] for one in records(trainer)] == [2, 2, 2, 1]
    assert records(trainer)[0]["logged/turns"] == "mine"


def test_episodes_are_played_while_the_batch_before_is_trained_on(make_trainer):
    calls = itertools.count()  # that differ in a group, so that weights change
    talk = lambda read, _: "done" if "<answer>" in read else call("multiply", a=next(calls) % 9, b=2)  # noqa: E731
    reward = lambda completions, **columns: [float(said[-2]["content"]) for said in completions]  # noqa: E731
    options = {"reward": reward, "generate_ahead": True, "vllm_mode": "server", "max_steps": 3}
    trainer = make_trainer(talk, engine=ConcurrentTalker, tools=[multiply], **options)
    trainer.train()
    steps = [json.loads(line) for line in Path(trainer.args.output_dir, "metrics.jsonl").read_text().splitlines()]
    assert [one["off_policy_steps"] for one in steps if "off_policy_steps" in one] == [0, 1, 1]
    assert [len(one["tool_calls"]) for one in records(trainer)] == [1] * 12
    assert steps[-1]["sampling/sampling_logp_difference/turn_2/max"] > 1e-4  # of weights that are a step old


class Drifting(Talker):
    """Reads one more token than it says before turns that follow a tool's answer."""

    def logprobs(self, prompt, completion, temperature):
        more = self.tokenizer(" ")["input_ids"] if "<answer>" in self.tokenizer.decode(prompt) else []
        return super().logprobs(prompt + more, completion, temperature)


def test_a_turn_sampled_from_other_tokens_ends_the_run_before_it_updates(make_trainer):
    trainer = make_trainer(say, engine=Drifting, tools=[multiply], logprob_mismatch="fail")
    before = [weight.clone() for weight in trainer.model.parameters()]
    with pytest.raises(WeightSyncError, match="turn 2 differs, and the turns before it agree"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))


class Waiting:
    """An episode of three turns of a token, with a tool that takes so long."""

    def __init__(self, start: int, seconds: float) -> None:
        self.length, self.seconds, self.turns = start, seconds, 0

    def next_turn(self, number: int) -> Turn:
        return Turn(number, [0] * self.length, 110 - self.length, self.turns)

    def say(self, turn):
        self.turns, self.length = self.turns + 1, self.length + 1
        return in_thread(lambda: time.sleep(self.seconds)) if self.turns < 3 else None

    def hear(self, answers) -> bool:
        return True


@pytest.mark.parametrize("seconds", [(0.0, 0.0, 0.0), (0.02, 0.0, 0.0), (0.0, 0.01, 0.02)])
def test_turns_without_room_for_the_longest_are_sampled_in_one_order(monkeypatch, seconds):
    batches = []

    def generated(engine, prompts, options):
        batches.append([len(ids) for ids in prompts])
        return [Sample(prompt_ids=ids, completion_ids=[1], finish_reason="stop", weight_version=0) for ids in prompts]

    monkeypatch.setattr(turns, "generated", generated)
    monkeypatch.setattr(Turn, "__eq__", None)  # thousands of them, each with each other, took seconds
    session = turns.BatchSession(None, SamplingParams(n=1, max_tokens=100), most=115)
    _play([Waiting(*one) for one in zip((10, 30, 50), seconds, strict=True)], session)
    assert batches == [[10], [11], [12], [30], [31], [32], [50], [51], [52]]
