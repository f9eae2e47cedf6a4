"""The processes of a run end together, and each of them says why.

Two ways lead there. What a rank does by itself (starting an engine, sampling, rewards, handing weights over, writing
files) runs inside `together`: the ranks tell each other at its end whether it went well, so nobody enters a collective
that another will never reach. Whatever else goes wrong on a rank (making the model, a forward or backward pass), the
others see as a collective that fails under them. So a rank leaves its reason in the process group's store before it
goes, and the others look for it there: `last_words`. One that was killed leaves none, and that is what the others say
then.

`last_words` needs a transport that raises when a peer has gone. gloo does. NCCL does not: PyTorch's watchdog ends the
process in C++, no sooner than `ddp_timeout` unless the launcher does it first, and nothing here gets to speak.

A rank that hangs cannot be told from one that is slow: the others wait for it as long as `ddp_timeout`.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object
from torch import distributed

from fused_grpo.errors import FusedGRPOError, PeerError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.trackers import tracker_arguments
from fused_grpo.trainer.models.loading import wants_bf16

# How long to wait for the words of others: they were written before the collective failed, or are about to be.
PATIENCE = 2.0
SETTLING = 0.25
LONGEST_REASON = 2000  # characters
# What a rank without a reason of its own says when it goes.
GONE, TIMED_OUT = "gone", "timed out"

_numbers = itertools.count()


def make_accelerator(args: GRPOConfig) -> Accelerator:
    """Accelerate, as the options and the launcher's environment ask for it."""
    return Accelerator(
        mixed_precision="bf16" if wants_bf16(args) else "no",
        # Without it, Accelerate on a machine without an accelerator lets every rank train by itself.
        cpu=not torch.accelerator.is_available(),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.ddp_timeout))],
        **tracker_arguments(args),
    )


def anywhere(accelerator: Accelerator, here: bool) -> bool:
    """Whether it is so on any process. All have to ask."""
    if accelerator.num_processes == 1:
        return here
    flag = torch.tensor([float(here)], device=accelerator.device)
    return bool(accelerator.reduce(flag, reduction="sum").item())


@contextmanager
def together(accelerator: Accelerator, doing: str) -> Iterator[None]:
    """Around what each process does without the others: where it fails on one, it fails on all.

    No collectives inside: a process that fails before one comes to the exchange at the end, while the others wait in
    it. `VLLMServerEngine.load_weights` has one, which every process reaches and which brings a failure to all of them.

    Raises:
        PeerError: it went well here and failed elsewhere.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    try:
        failed = anywhere(accelerator, failure is not None)
        reasons = gather_object([None if failure is None else reason_of(failure)]) if failed else []
    except Exception as error:
        if failure is not None:
            raise failure from error  # the others are gone as well, but that is not what went wrong here
        raise
    if failed:
        if failure is not None:
            raise failure
        rank = next(rank for rank, reason in enumerate(reasons) if reason is not None)
        raise PeerError(
            f"rank {rank} of {accelerator.num_processes} failed while {doing}, and this one stopped with it: "
            f"{reasons[rank]}"
        )


@contextmanager
def last_words(accelerator: Accelerator) -> Iterator[None]:
    """Around everything with collectives in it: an error leaves its reason for the others, or is explained by theirs.

    Raises:
        PeerError: a collective failed, because another process has.
    """
    if accelerator.num_processes == 1:
        yield
        return
    words = _Words(accelerator)
    try:
        yield
    except PeerError:
        raise
    except BaseException as error:
        if not _is_of_a_collective(error):
            words.leave(reason_of(error))
            raise
        timed_out = "imed out" in str(error)
        words.leave(None, timed_out=timed_out)
        raise PeerError(words.explanation(timed_out=timed_out)) from error


def settle(accelerator: Accelerator) -> None:
    """Before a process may leave: nobody talks to it any more, and its own transport is at rest.

    gloo's thread lets go of a collective's tensor a moment after the caller has gone on, and needs the interpreter's
    lock for it. Whoever frees the process group before that waits for the thread, with the lock, for ever.
    """
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(SETTLING)


class _Words:
    """What processes leave in the store: that they go, each, and the first reason of all."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.rank, self.count = accelerator.process_index, accelerator.num_processes
        # The n-th on every process: what an earlier run of the same processes left is no news.
        self.prefix = f"fused-grpo/last-words/{next(_numbers)}"
        self.store = distributed.distributed_c10d._get_default_store()

    def leave(self, reason: str | None, *, timed_out: bool = False) -> None:
        """Say that this process goes; None: because another did, or was waited for in vain."""
        with suppress(RuntimeError):  # the store may be gone with the process that held it
            if reason is not None:
                self.store.compare_set(f"{self.prefix}/first", "", json.dumps([self.rank, reason]))
            self.store.set(f"{self.prefix}/{self.rank}", TIMED_OUT if timed_out else GONE)

    def explanation(self, *, timed_out: bool) -> str:
        """Why a collective failed here, as far as it can be known."""
        try:
            return self._heard(timed_out)
        except RuntimeError:
            return self._silence([0], timed_out)  # it held the store

    def _heard(self, timed_out: bool) -> str:
        deadline = time.monotonic() + PATIENCE
        while True:
            if self.store.check([f"{self.prefix}/first"]):
                rank, reason = json.loads(self.store.get(f"{self.prefix}/first"))
                return f"rank {rank} of {self.count} has failed, and this one stopped with it: {reason}"
            left = self._left()
            silent = [rank for rank in range(self.count) if rank not in left]
            if not silent or time.monotonic() > deadline:
                waited = [rank for rank, word in left.items() if word == TIMED_OUT and rank != self.rank]
                return self._silence(silent, timed_out or bool(waited)) if silent else self._given_up(waited)
            time.sleep(0.02)

    def _left(self) -> dict[int, str]:
        """The words of the ranks that have left any."""
        keys = {rank: f"{self.prefix}/{rank}" for rank in range(self.count)}
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}

    def _given_up(self, waited: list[int]) -> str:
        """All have left, and none of them for a reason of its own."""
        if not waited:
            return f"the connection between the {self.count} ranks broke, and none of them says why; fix: their logs"
        return (
            f"rank {' and '.join(map(str, waited))} of {self.count} waited longer than ddp_timeout for this one and "
            "left; fix: a time limit for what it waited for (reward_timeout, vllm_server_timeout), or a longer "
            "ddp_timeout"
        )

    def _silence(self, silent: list[int], timed_out: bool) -> str:
        who = f"rank {' or '.join(map(str, silent))} of {self.count}"
        if timed_out:
            return (
                f"{who} did not come to a collective within ddp_timeout; it hangs, or is slower than that; "
                "fix: a time limit for what it waits for (reward_timeout, vllm_server_timeout), or a longer ddp_timeout"
            )
        return (
            f"{who} is gone without a word, and this one stopped with it; killed, or out of memory? "
            "fix: its log and the kernel's say more; resume_from_checkpoint goes on from the last checkpoint"
        )


def reason_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST_REASON]


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether it is the transport that failed. gloo has no error class of its own, but names its source file."""
    if isinstance(error, FusedGRPOError):
        return False
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))
