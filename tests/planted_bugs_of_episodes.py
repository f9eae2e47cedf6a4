"""The bugs of `planted_bugs.py` in tools and environments: (file, old, new, caught by)."""

PLAY = ["tests/trainer/episodes/test_play.py", "-k", "what_was_said and Concurrent"]
TASKS = ["tests/trainer/episodes/test_environments.py", "-k", "writes_the_task"]
IDS = ["tests/trainer/episodes/test_conversation.py", "-k", "only_grow or calls_of_a_reply or in_an_argument"]
AROUND = ["tests/trainer/episodes/test_isolated_tools.py", "-k", "around_an_isolated_one"]
LOOP = ["tests/trainer/episodes/test_long_calls.py", "-k", "share_an_event_loop"]
ORDER = ["tests/trainer/episodes/test_play.py", "-k", "order_in_which"]

BUGS = {
    "what tools wrote is trained on": (
        "trainer/episodes/play.py",
        "self._append(unsampled, is_own=False)",
        "self._append(unsampled, is_own=True)",
        PLAY,
    ),
    "who answers first draws first": (
        "trainer/episodes/play.py",
        "[future for future in answering if future.done()]",
        "sorted((one for one in answering if one.done()), key=lambda one: one.result()[0][0].seconds)",
        ORDER,
    ),
    "members of a group have tasks of their own": (
        "trainer/episodes/play.py",
        'random.Random(f"{self._batch}/{number}")',
        'random.Random(f"{self._batch}/{seed}")',
        TASKS,
    ),
    "the end of a thought in an argument ends one": (
        "trainer/episodes/calls.py",
        'text.partition(end) if is_begun else ("", "", text)',
        "text.partition(end)",
        IDS,
    ),
    "a process calls the function around an isolated one": (
        "trainer/rewards/worker.py",
        'vars(around)["__wrapped__"] if is_isolated(around) else function',
        "function",
        AROUND,
    ),
    "the reward of an environment is awaited elsewhere than its tools": (
        "trainer/episodes/environments.py",
        "await in_loop_of_tools(one.get_reward())",
        "await one.get_reward()",
        LOOP,
    ),
    "the token that ends a turn comes twice": (
        "trainer/episodes/conversation.py",
        "ids[before if after is None",
        "ids[before - 1 if after is None",
        IDS,
    ),
}
