"""The other end of `isolated`: a process that calls one reward function, as it is told on stdin.

    python -m fused_grpo.trainer.rewards.worker <function> <seconds> <bytes>

A request is a line: its number, and in JSON the columns of one completion. The number is repeated before anything else;
then comes the reply, a line of JSON with the completion's value, or with an error. Both pipes are kept out of the
function's way: what it prints goes to stderr, and it reads an empty stdin.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
from typing import Any

from fused_grpo.trainer.rewards.calling import RewardCaller, RewardInputs, reward_name
from fused_grpo.trainer.rewards.loading import load_reward

# Of one file: far more than a function that looks at one completion has to write, far less than a disk.
FILE_BYTES = 1 << 30
# Of an error: it quotes the prompt, which may be longer than a reply may be.
ERROR_CHARACTERS = 20_000


def main(reference: str, seconds: float, memory: int) -> None:
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    # Of a process that is killed, a dump would hold prompts and columns. Writing beyond the limit raises OSError.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    try:
        function = load_reward(reference)
    except Exception as error:
        print(json.dumps({"error": str(error)}), file=replies)
        return
    call = RewardCaller(function, reward_name(function))
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    print(json.dumps({"ready": True}), file=replies)
    for request in requests:
        # Should the trainer be gone by then, nobody else ends a call that never returns.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)
        number, columns = request.split(" ", 1)
        print(number, file=replies)
        reply = answer(call, json.loads(columns))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(reply, file=replies)


def answer(call: RewardCaller, columns: dict[str, list[Any]]) -> str:
    """The reply to one request."""
    # The caller tells B by the prompts, which the function may not have asked for.
    columns = columns if "prompts" in columns else {**columns, "prompts": next(iter(columns.values()))}
    try:
        scores = call(RewardInputs(columns=columns), pinpoint=False)
        value = None if math.isnan(scores.values[0]) else scores.values[0]
        return json.dumps({"value": value, "extra": scores.extra, "metrics": scores.metrics})
    except Exception as error:
        return json.dumps({"error": str(error)[:ERROR_CHARACTERS]})


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
