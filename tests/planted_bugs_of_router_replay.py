"""The bugs of `planted_bugs.py` in the replay of a sampler's experts: (file, old, new, caught by)."""

FORCED = ["tests/trainer/models/test_router_replay.py", "-k", "forced_routers and Qwen3Moe and (alone or shared)"]
TREES = ["tests/trainer/models/test_router_replay.py", "-k", "are_not_shared"]
AGAIN = ["tests/trainer/models/test_router_replay.py", "-k", "computed_again"]
REFUSED = ["tests/trainer/models/test_router_replay.py", "-k"]
RUNS = "tests/trainer/test_router_replay.py"
EPISODES = ["tests/trainer/episodes/test_play.py", "-k", "experts_of_the_turn"]

BUGS = {
    "routers weigh their own experts": (
        "trainer/models/router_replay.py",
        "topk((scores.gather(1, indices), indices))",
        "topk((own.values, indices))",
        FORCED,
    ),
    "a completion behind another one gets the prompt's experts": (
        "trainer/batching/micro_batches.py",
        "sample.routed_experts[0 if sample is batch[tree[0]] else len(sample.prompt_ids) :]",
        "sample.routed_experts[0 if sample is batch[tree[0]] else 0 :]",
        FORCED,
    ),
    "prompts are shared wherever they went": (
        "trainer/batching/micro_batches.py",
        "by_prompt.setdefault((tuple(prompt), routing), [])",
        'by_prompt.setdefault((tuple(prompt), b""), [])',
        TREES,
    ),
    "layers that are computed again choose for themselves": (
        "trainer/policy.py",
        "output.metrics.update(self.routing.counts())",
        "output.metrics.update(self.routing.counts())\n            self.routing.start(None)",
        AGAIN,
    ),
    "experts stay behind a step": (
        "trainer/models/router_replay.py",
        "def __exit__(self, *error: object) -> None:\n        self._experts = None\n        self._hooks.close()\n",
        "def __exit__(self, *error: object) -> None:\n",
        [RUNS, "-k", "left_behind"],
    ),
    "an interrupted step goes on replacing": (
        "trainer/models/router_replay.py",
        "        self._mode.close()  # hooks do not run behind a KeyboardInterrupt\n",
        "",
        [*REFUSED, "interrupted_pass"],
    ),
    "experts of masked groups have weight 0": (
        "trainer/models/router_replay.py",
        "others += [one.expand(-1, k) for one in least.indices[:, :2].split(1, 1)]",
        "pass",
        [*REFUSED, "masked_group"],
    ),
    "zeros are experts": (
        "trainer/engines/checked_engine.py",
        "range(1, len(chosen))",
        "range(0)",
        [RUNS, "-k", "does_not_have and zeros"],
    ),
    "the reference replays": (
        "trainer/learner.py",
        'own_experts = with_fields(batch, {"routed_experts": [None] * len(batch)})',
        "own_experts = batch",
        [RUNS, "-k", "own_routers"],
    ),
    "prompts are apart without replay": (
        "trainer/batching/micro_batches.py",
        "if packing.replays and experts is not None",
        "if experts is not None",
        TREES,
    ),
    "an engine is told to return no experts": (
        "trainer/engines/vllm/inprocess.py",
        "if got != want and not is_more:",
        "if False:",
        ["tests/trainer/engines/test_engine_choice.py", "-k", "contradicts and router_replay"],
    ),
    "a checkpoint has no experts": (
        "trainer/batching/rollout_buffer.py",
        '    "routed_experts": None,  # as it is\n',
        "",
        [RUNS, "-k", "resumed_run"],
    ),
    "the last turn's experts are those of all turns": (
        "trainer/episodes/play.py",
        "torch.cat([self.experts, turn.routed_experts[len(self.experts) :]])",
        "turn.routed_experts",
        EPISODES,
    ),
}
