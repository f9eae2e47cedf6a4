"""The worker process of `isolated`: calls one reward function for requests that it reads from stdin.

    python -m fused_grpo.trainer.rewards.reward_worker <function> <seconds> <bytes>

A request is a line: its number, and the columns of one completion as JSON. The worker echoes the number before it
calls the function; then it replies with a line of JSON: the value of the completion, or an error. The function itself
has an empty stdin, and its stdout is stderr.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
from typing import Any

from fused_grpo.errors import shown
from fused_grpo.trainer.rewards.reward_call import RewardCaller, RewardInputs, load_reward, reward_name

FILE_BYTES = 1 << 30  # of one file: writing more raises OSError


def main(reference: str, seconds: float, memory: int) -> None:
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold prompts and columns
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    try:
        function = load_reward(reference)
    except Exception as error:
        print(json.dumps({"error": shown(error)}), file=replies)
        return
    call = RewardCaller(function, reward_name(function))
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    print(json.dumps({"ready": True}), file=replies)
    for request in requests:
        # Ends a call that never returns where the trainer, which would kill it, has ended.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)
        number, columns = request.split(" ", 1)
        print(number, file=replies)
        reply = answer(call, json.loads(columns))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(reply, file=replies)


def answer(call: RewardCaller, columns: dict[str, list[Any]]) -> str:
    """The reply to one request."""
    # `RewardInputs` counts the prompts, and the function may not take any.
    columns = columns if "prompts" in columns else {**columns, "prompts": next(iter(columns.values()))}
    try:
        scores = call(RewardInputs(columns=columns), pinpoint=False)
        value = None if math.isnan(scores.values[0]) else scores.values[0]
        return json.dumps({"value": value, "extra": scores.extra, "metrics": scores.metrics})
    except Exception as error:
        return json.dumps({"error": shown(error)})


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
