"""Plays the episodes of a batch: turns of the model and of its tools, until none calls a tool any more.

    for each of B episodes: reset its environment, encode its prompt, add its first turn to the engine's session
    while a turn is sampled or a tool is called:
        a turn is complete  -> its calls are made; without any, or cut, the episode ends
        tools have answered -> their answers are added as masked tokens, and the next turn is sampled

No episode waits for another one where the engine can sample turns as they come.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from fused_grpo.errors import DataError, InputError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.data.datasets import Row, is_conversational
from fused_grpo.trainer.data.prompts import CHARACTERS_OF_A_TOKEN
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.sampling import SEED_BITS, Completion, all_or_none, rollouts_of
from fused_grpo.trainer.engines.turns import TurnSession, turn_session
from fused_grpo.trainer.episodes.conversation import Message, Template
from fused_grpo.trainer.episodes.environments import NO_PROMPT, Environments, is_done, methods_of
from fused_grpo.trainer.episodes.tools import Answers, Slots, Tool, check_tools
from fused_grpo.trainer.types import Episode, EpisodeEnd, ListedTokens, Rollouts, SamplingParams, ToolCall, Turn


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What all episodes of a run have in common."""

    template: Template
    tools: Sequence[Tool]  # without an environment
    environments: Environments | None
    max_turns: int | None  # of tools, in an episode; None: any number
    timeout: float  # seconds of a call
    slots: Slots | None  # for calls at the same time

    @property
    def shown_tools(self) -> Sequence[Tool]:
        """Those that every prompt shows; of several environments, which have different ones, the shared ones."""
        if self.environments is None or self.environments.is_named:
            return self.tools
        return self.environments.tools_of[None]

    @property
    def own_tokens(self) -> int:
        """Tokens of what a prompt shows of its own environment's tools, where there are several environments."""
        if self.environments is None or not self.environments.is_named:
            return 0
        lengths = [len(self.template.encode(NO_PROMPT, tools)) for tools in self.environments.tools_of.values()]
        return max(lengths) - len(self.template.encode(NO_PROMPT, self.tools))


def rules_of(tools: Any, factory: Any, args: GRPOConfig, tokenizer: Any, stop_ids: Sequence[int]) -> Rules:
    """The rules of a run with tools or environments; errors as `check_tools`, `Environments` and `Template`."""
    functions = check_tools(tools or [])
    if taken := {"tools", "xml_tools"} & (args.chat_template_kwargs or {}).keys():
        raise InputError(
            f"got {min(taken)!r} in chat_template_kwargs beside tools, whose schemas the prompt has in its place, want "
            "one of the two; fix: leave it out"
        )
    return Rules(
        template=Template(tokenizer, args.chat_template_kwargs, stop_ids=stop_ids),
        tools=functions,
        environments=None if factory is None else Environments(factory, functions),
        max_turns=args.max_tool_calling_iterations,
        timeout=args.tool_timeout,
        slots=None if args.max_concurrent_tools is None else Slots(args.max_concurrent_tools),
    )


class EpisodeEngine:
    """For one batch, in the place of an engine: its completions are episodes, whose turns `inner` samples.

    Args:
        most: tokens of the longest prompt. None: no limit.
        batch: seeds what environments draw, with the number of the row: members of a group may be on several ranks.
    """

    own_prompts = True

    def __init__(self, inner: RolloutEngine, rules: Rules, *, most: int | None, batch: str) -> None:
        self._inner, self._rules, self._most, self._batch = inner, rules, most, batch
        self.name, self.why_no_support = inner.name, getattr(inner, "why_no_support", None)
        if rules.environments is not None:
            rules.environments.free_all()

    @property
    def weight_version(self) -> int:
        return self._inner.weight_version

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams, *, rows: Sequence[tuple[int, Row]] = ()
    ) -> Rollouts:
        """`sampling.n` episodes of each row, which come with their numbers in the dataset; see RolloutEngine.

        DataError for a prompt that is a string, or leaves no room for a completion with what `reset` returned;
        UnavailableError for an environment that cannot begin.
        """
        played = [
            self._begin(list(ids), *row, sampling, seed=f"{sampling.seed}/{sampling.first_prompt + place}/{member}")
            for place, (ids, row) in enumerate(zip(prompt_ids, rows, strict=True))
            for member in range(sampling.n)
        ]
        most = None if self._most is None else self._most + sampling.max_tokens
        with turn_session(self._inner, sampling, most=most) as session:
            _play(played, session)
        # Each is a completion of a prompt of its own: what `reset` adds may differ.
        prompts, completions = [one.prompt_ids for one in played], [one.completion() for one in played]
        rollouts = rollouts_of(prompts, completions, replace(sampling, n=1), weight_version=self.weight_version)
        masks, episodes = [one.mask for one in played], [one.episode() for one in played]
        return replace(rollouts, num_generations=sampling.n, completion_masks=masks, episodes=episodes)

    def _begin(self, ids: list[int], number: int, row: Row, sampling: SamplingParams, *, seed: str) -> _Played:
        if not is_conversational(row):
            raise DataError("got a string as the prompt of an episode, want a conversation; fix: a list of messages")
        rules, prompt = self._rules, list(row["prompt"])
        environment, tools = None, rules.tools
        if rules.environments is not None:
            environment = rules.environments.take(row)
            tools = [*rules.tools, *methods_of(environment)]
            task = random.Random(f"{self._batch}/{number}").getrandbits(32)
            if begun := rules.environments.reset(environment, row, seed=task):
                self._check_length(len(begun) // CHARACTERS_OF_A_TOKEN)  # megabytes are not tokenised
                content = prompt[-1].get("content") or ""
                added: Any = begun if isinstance(content, str) else [{"type": "text", "text": begun}]
                prompt[-1] = {**prompt[-1], "content": content + added}
            ids = rules.template.encode(prompt, tools)
        self._check_length(len(ids))
        return _Played(rules, prompt, ids, environment, tools, sampling.max_tokens, random.Random(seed))

    def _check_length(self, tokens: int) -> None:
        if self._most is not None and tokens > self._most:
            raise DataError(
                f"got {tokens} tokens for a prompt with what reset() returned, want at most {self._most}; fix: a "
                "larger vllm_max_model_length, as far as the model goes, or a shorter text"
            )


def _play(episodes: Sequence[_Played], session: TurnSession) -> None:
    answering = dict[Future[list[tuple[ToolCall, str]]], int]()
    for number, episode in enumerate(episodes):
        session.add(episode.next_turn(number))
    when = ALL_COMPLETED if session.is_together else FIRST_COMPLETED
    try:
        while answering or session.pending or session.has_work:
            goes_on = session.has_work and not session.is_together
            wait([*answering, *session.pending], timeout=0 if goes_on else None, return_when=when)
            # Where all are waited for, this is the order of the batch: who answered first decides nothing.
            for complete in [future for future in answering if future.done()]:
                number = answering.pop(complete)
                if episodes[number].hear(complete.result()):
                    session.add(episodes[number].next_turn(number))
            for number, turn in session.step() if session.has_work or session.pending else ():
                if answers := episodes[number].say(turn):
                    answering[answers] = number
    finally:  # where the engine failed, or the user stopped the run, calls go on
        for number in answering.values():
            episodes[number].leave_environment()


@dataclass
class _Played:
    """An episode that is being played: what `Episode` says, and its tokens."""

    rules: Rules
    prompt: list[Message]
    prompt_ids: list[int]
    environment: Any
    tools: Sequence[Tool]
    max_tokens: int
    seeds: random.Random
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    listed: list[ListedTokens | None] = field(default_factory=list)  # of turns and answers; None: a turn has none
    experts: Tensor | None = None  # of all that was read, each token's of the turn that read it first
    messages: list[Message] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    turns: int = 0
    ended: EpisodeEnd = "stop"

    def __post_init__(self) -> None:
        self.answers = Answers(self.tools, timeout=self.rules.timeout, slots=self.rules.slots)

    def next_turn(self, number: int) -> Turn:
        room, seed = self.max_tokens - len(self.ids), self.seeds.getrandbits(SEED_BITS)
        return Turn(number, self.prompt_ids + self.ids, room, seed)

    def say(self, turn: Completion) -> Future[list[tuple[ToolCall, str]]] | None:
        """The model's turn; the answers to come, or None where the episode ends."""
        message = self.rules.template.reply(turn.token_ids, self.prompt_ids + self.ids, self.tools or None)
        self._append(turn, is_own=True)
        if self.experts is None or turn.routed_experts is None:
            self.experts = turn.routed_experts
        else:
            self.experts = torch.cat([self.experts, turn.routed_experts[len(self.experts) :]])
        self.messages.append(message)
        self.turns += 1
        calls: list[Mapping[str, Any]] = message.get("tool_calls", []) if self.tools else []
        if turn.finish_reason == "length":  # what is cut is not called: its answer has no room
            self.ended = "length"
        elif calls and self.rules.max_turns is not None and self.turns > self.rules.max_turns:
            self.ended = "turn limit"
        elif calls:
            return self.answers.start(calls, most=(self.max_tokens - len(self.ids)) * CHARACTERS_OF_A_TOKEN)
        return None

    def hear(self, answers: Sequence[tuple[ToolCall, str]]) -> bool:
        """The tools' answers; whether the model has a further turn."""
        self.calls += [call for call, _ in answers]
        if self.answers.has_timed_out:
            self.leave_environment()
        messages = [{"role": "tool", "name": call.name, "content": text} for call, text in answers]
        if self.environment is not None and is_done(self.environment):
            # No token bounds these: as they are in the records.
            self.messages += [{"role": "tool", "name": call.name, "content": call.result} for call, _ in answers]
            self.ended = "done"
            return False
        room = self.max_tokens - len(self.ids)
        is_long = sum(len(text) for _, text in answers) > room * CHARACTERS_OF_A_TOKEN
        added = [] if is_long else self.rules.template.added(messages, after=self.ids[-1])
        if is_long or len(added) >= room:  # a turn of the model has a token at least
            self.ended = "no room"
            return False
        self.messages += messages
        unsampled = Completion(added, [0.0] * len(added), "stop", ListedTokens.of([()] * len(added)))
        self._append(unsampled, is_own=False)
        return True

    def leave_environment(self) -> None:
        """A call may still change it: no later episode has it."""
        if self.rules.environments is not None:
            self.rules.environments.discard(self.environment)

    def _append(self, part: Completion, *, is_own: bool) -> None:
        """A turn of the model, or its tools' answers. What one part lacks, the completion lacks."""
        self.ids += part.token_ids
        self.mask += [is_own] * len(part.token_ids)
        self.logprobs = None if part.logprobs is None or self.logprobs is None else self.logprobs + part.logprobs
        self.listed.append(part.listed_tokens)

    def completion(self) -> Completion:
        tables = all_or_none(self.listed)
        listed = None if tables is None else ListedTokens.joined(tables)
        return Completion(self.ids, self.logprobs, "length" if self.ended == "length" else "stop", listed, self.experts)

    def episode(self) -> Episode:
        return Episode(**{entry.name: getattr(self, entry.name) for entry in fields(Episode)})
