"""The processes of a run end together, and each of them says why.

Two ways lead there. What a rank does by itself (sampling, rewards, handing weights over, writing files) runs inside
`together`: the ranks tell each other at its end whether it went well, so nobody enters a collective that another will
never reach. Whatever else goes wrong on a rank, the others see as a collective that fails under them. So a rank leaves
its reason in the process group's store before it goes, and the others look for it there: `last_words`. One that was
killed leaves none, and that is what the others say then.

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
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.models import wants_bf16
from fused_grpo.trainer.trackers import tracker_arguments

# How long to wait for the words of others: they were written before the collective failed, or are about to be.
PATIENCE = 2.0
SETTLING = 0.25
LONGEST_REASON = 2000  # characters

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
    """Around what each process does without the others: where it fails on one, it fails on all. No collectives inside.

    Raises:
        PeerError: it went well here and failed elsewhere.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if anywhere(accelerator, failure is not None):
        reasons = gather_object([None if failure is None else reason_of(failure)])
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
        words.leave(None)
        raise PeerError(words.explanation(timed_out="imed out" in str(error))) from error


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

    def leave(self, reason: str | None) -> None:
        """Say that this process goes; None: because another did."""
        with suppress(RuntimeError):  # the store may be gone with the process that held it
            if reason is not None:
                self.store.compare_set(f"{self.prefix}/first", "", json.dumps([self.rank, reason]))
            self.store.set(f"{self.prefix}/{self.rank}", "gone")

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
            silent = [rank for rank in range(self.count) if not self.store.check([f"{self.prefix}/{rank}"])]
            if not silent or time.monotonic() > deadline:
                return self._silence(silent, timed_out)
            time.sleep(0.02)

    def _silence(self, silent: list[int], timed_out: bool) -> str:
        who = f"rank {' or '.join(map(str, silent)) or '?'} of {self.count}"
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
