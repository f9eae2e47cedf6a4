"""What ends a run: a failure of one rank, steps that are not finite, signals. All ranks go on, or all end alike.

docs/trainer.md says what a user sees. Work that a rank does alone (starting an engine, sampling, rewards, writing
files) runs inside `all_ranks_succeed`: at its end the ranks compare results, so none enters a collective that another
one never reaches. Any other error breaks the collective that the other ranks are in. `report_failure` puts the reason
into the process group's store before its rank ends, and the other ranks read it there; of a rank that was killed there
is none. It also writes the error file of torch.distributed.elastic: with NCCL, whose collectives do not raise when a
rank has ended, that is the only report.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from transformers import TrainerControl

from fused_grpo.errors import FusedGRPOError, InputError, NonFiniteError, PeerError, show_causes, shown
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.common.file_names import NONFINITE_FOLDER
from fused_grpo.trainer.common.formatting import to_json
from fused_grpo.trainer.logging.console import live

# How long to wait for the reason of another rank. It was written before the collective failed, or will be soon.
REASON_SECONDS = 2.0
GLOO_SECONDS = 0.25
SAME_REQUEST_SECONDS = 2.0
DIFFERENCES = 5  # between ranks, in an error

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_uses = itertools.count()
_last_keys = list[str]()  # where the last `report_failure` that ended well here would have read why another rank failed
_reports: ContextVar[bool] = ContextVar("reports", default=False)  # whether this is inside `report_failure`
_log = logging.getLogger(__name__)


def gather_objects(doing: str, value: T) -> list[T]:
    """The `value` of each rank, in their order. A collective: every rank has to call it.

    PeerError, on all ranks, where `doing` is not the same on all: else each would take the values of another place in
    the run for those that it asked for.
    """
    ranks: list[tuple[str, T]] = gather_object([(doing, value)])
    places = {place: [rank for rank, (other, _) in enumerate(ranks) if other == place] for place, _ in ranks}
    if len(places) > 1:
        got = ", ".join(f"rank {' and '.join(map(str, numbers[:8]))} {place}" for place, numbers in places.items())
        raise PeerError(
            f"got ranks at different places of the run ({got}), want all at the same; fix: call train(), evaluate() "
            "and what saves on every rank, in callbacks too, and let no condition depend on the rank"
        )
    return [value for _, value in ranks]


def compare_ranks(doing: str, own: Mapping[str, str]) -> None:
    """InputError, on all ranks, where what each has under some name is not the same on all. A collective."""
    first, *others = gather_objects(doing, dict(own))
    if not (rank := next((rank for rank, values in enumerate(others, 1) if values != first), 0)):
        return
    other = others[rank - 1]
    # Of what one rank has none of, the fields (`name.field`) say nothing more.
    names = (name for name in first | other if "." not in name or (name in first and name in other))
    differ = [name for name in names if first.get(name) != other.get(name)][:DIFFERENCES]
    got, want = (", ".join(f"{name}={values.get(name)}" for name in differ) for values in (first, other))
    raise InputError(
        f"got {got} on rank 0 and {want} on rank {rank}, want the same on every rank; fix: let nothing of it depend on "
        "the rank, the machine or the time, and give whatever shuffles or draws a seed"
    )


def any_rank(accelerator: Accelerator, condition: bool, doing: str) -> bool:
    """Whether the `condition` is true on any rank. A collective, as `gather_objects`."""
    return condition if accelerator.num_processes == 1 else any(gather_objects(doing, condition))


def agree(accelerator: Accelerator, control: TrainerControl) -> None:
    """Set on this rank what callbacks have set on any rank: to stop, log, evaluate or save. A collective.

    Callbacks run on every rank. Without this, ranks would wait for each other in different collectives.
    """
    if accelerator.num_processes > 1:
        ranks = gather_objects("agreeing on what callbacks decided", dataclasses.asdict(control))
        for name in ranks[0]:
            setattr(control, name, any(decisions[name] for decisions in ranks))


def barrier(accelerator: Accelerator, doing: str) -> None:
    """Wait for all ranks, and until this rank may leave the process group. A collective, as `gather_objects`.

    gloo's thread releases the tensor of a collective shortly after the collective has returned, and takes the
    interpreter's lock for it. To free the process group before that is a deadlock.
    """
    gather_objects(doing, None)
    if accelerator.num_processes > 1:
        time.sleep(GLOO_SECONDS)


@contextmanager
def all_ranks_succeed(accelerator: Accelerator, doing: str) -> Iterator[None]:
    """Around what each rank does alone: where it raises on one rank, it raises on all of them.

    No collectives inside: a rank that fails before one would come to the exchange at the end while the others wait in
    it. `VLLMServerEngine.load_weights` has one, which every rank reaches and which reports a failure to all of them,
    and a `WeightStream` has gathers, all of which every rank reaches, whatever fails.

    PeerError where this rank succeeded and another one failed.
    """
    failure: Exception | None = None
    try:
        with live(doing):
            yield
    except Exception as error:
        failure = error
    try:
        reasons = gather_objects(doing, None if failure is None else _reason(failure))
    except Exception as error:
        if failure is not None:
            raise failure from error  # the other ranks have ended too, but this is what went wrong here
        raise
    if failure is not None:
        raise failure
    rank = next((rank for rank, reason in enumerate(reasons) if reason is not None), None)
    if rank is not None:
        raise PeerError(
            f"rank {rank} of {accelerator.num_processes} failed while {doing}, and this one stopped with it: "
            f"{reasons[rank]}"
        )


@contextmanager
def report_failure(accelerator: Accelerator) -> Iterator[None]:
    """Around all code with collectives: report an error of this rank to the other ranks and to the launcher.

    PeerError where a collective failed because another rank did; the message has that rank's reason. Inside another
    one, as an evaluation inside of a run, it does nothing.
    """
    if _reports.get():
        yield
        return
    if accelerator.num_processes > 1 and not distributed.is_initialized():
        raise InputError(
            "got a call of a trainer behind end(), with which these processes have left their group; want end() as the "
            "last call of a script; fix: call it once, of the last trainer"
        )
    token = _reports.set(True)
    try:
        with _shared_reasons(accelerator) if accelerator.num_processes > 1 else nullcontext():
            yield
    except Exception as error:
        show_causes(error)
        with suppress(OSError):  # on a full disk the error itself says more
            get_error_handler().record_exception(error)
        raise
    finally:
        _reports.reset(token)


def reported(method: F) -> F:
    """`report_failure` around a method with collectives that a script calls, of an object with an `accelerator`."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with report_failure(self.accelerator):
            return method(self, *args, **options)

    return cast(F, call)


@contextmanager
def _shared_reasons(accelerator: Accelerator) -> Iterator[None]:
    store = _FailureStore(accelerator)
    try:
        yield
    except BaseException as error:
        _last_keys.clear()
        if not _is_of_a_collective(error):
            store.report(_reason(error))
            raise
        raise PeerError(store.explanation(timed_out="imed out" in str(error))) from error
    _last_keys[:] = [store.first]


class _FailureStore:
    """In the process group's store: the reason of the first failure, and which ranks have seen one."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.rank, self.count = accelerator.process_index, accelerator.num_processes
        # The same number on every rank: failures of an earlier run in these processes do not count.
        self.prefix = f"fused-grpo/failure/{next(_uses)}"
        self.first = f"{self.prefix}/first"
        self.before = list(_last_keys)  # another rank may still be in it
        self.store = distributed.distributed_c10d._get_default_store()

    def report(self, reason: str) -> None:
        """Store the reason, unless another rank has stored one before."""
        with suppress(RuntimeError):  # the store ends with the process that holds it
            self.store.compare_set(self.first, "", json.dumps([self.rank, reason]))

    def _reason_key(self) -> str | None:
        """Where the reason of the first failure is."""
        return next((key for key in (self.first, *self.before) if self.store.check([key])), None)

    def explanation(self, *, timed_out: bool) -> str:
        """Why a collective failed on this rank, as far as the store tells."""
        # Without a launcher that keeps the store, it ends with rank 0.
        silent, ended = [0], "ended, and with it the store of what it may have reported"
        with suppress(RuntimeError):
            self.store.set(f"{self.prefix}/{self.rank}", "")
            deadline = time.monotonic() + REASON_SECONDS
            while not (key := self._reason_key()) and time.monotonic() < deadline:
                time.sleep(0.02)
            if key:
                rank, reason = json.loads(self.store.get(key))
                return f"rank {rank} of {self.count} has failed, and this one stopped with it: {reason}"
            silent = [rank for rank in range(self.count) if not self.store.check([f"{self.prefix}/{rank}"])]
            ended = "ended without reporting an error"
        silent_text = f"rank {' or '.join(map(str, silent))} of {self.count}"
        if not silent:
            return f"the connection between the {self.count} ranks broke, and none of them reported why"
        if not timed_out:
            return (
                f"{silent_text} {ended}, and this one stopped with it; killed, or out of memory? "
                "fix: read its log and the kernel's, and call there what this one calls; resume_from_checkpoint goes "
                "on from the last checkpoint"
            )
        reason = (
            f"{silent_text} did not reach a collective within ddp_timeout; it hangs, or is slower than that; "
            "fix: a time limit for what it waits for (reward_timeout, vllm_server_timeout), or a longer ddp_timeout"
        )
        self.report(reason)  # a rank that is only slow reads it there
        return reason


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {shown(error)}"


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether the transport failed. gloo has no error class of its own, but names its source file."""
    if isinstance(error, FusedGRPOError):
        return False
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


class NonFiniteSteps:
    """Decides whether a step may update the policy, and counts those that were skipped, at most `limit` in a row."""

    def __init__(self, output_dir: Path, rank: int, *, limit: int) -> None:
        self.output_dir, self.rank, self.limit = output_dir, rank, limit
        self.in_a_row = self.total = 0

    def may_update(self, metrics: Mapping[str, float], step: int, evidence: Callable[[], Mapping[str, Tensor]]) -> bool:
        """Whether the optimizer may make step `step`. `evidence` returns the tensors to keep of one that it may not.

        NonFiniteError where it may not, and `limit` steps before it were skipped already.
        """
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            self.in_a_row = 0
            return True
        folder = self.output_dir / f"{NONFINITE_FOLDER}{step}"
        what = f"got loss {metrics['loss']} and gradient norm {metrics['grad_norm']} in step {step}"
        kept = self._keep(folder, {"step": step, "rank": self.rank, "metrics": dict(metrics)}, evidence)
        if self.in_a_row >= self.limit:
            before = f" and in {self.in_a_row} step(s) before it" if self.in_a_row else ""
            raise NonFiniteError(
                f"{what}{before}, want finite ones; nothing was updated, and its batch is {kept}; fix: a lower "
                "learning_rate, look at that batch, or skip a few such steps with max_skipped_steps"
            )
        self.in_a_row, self.total = self.in_a_row + 1, self.total + 1
        _log.warning("%s: skipped (%d in a row of at most %d), its batch is %s", what, self.in_a_row, self.limit, kept)
        return False

    def state(self) -> dict[str, int]:
        """The counters, as JSON."""
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state(self, state: Mapping[str, int]) -> None:
        """The inverse of `state`."""
        self.in_a_row, self.total = state["in_a_row"], state["total"]

    def _keep(self, folder: Path, facts: Mapping[str, object], evidence: Callable[[], Mapping[str, Tensor]]) -> str:
        """Write the batch; returns where it is. A full disk must neither hide the error nor make the ranks differ."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: value.contiguous() for name, value in evidence().items()}
            save_file(tensors, folder / f"rank-{self.rank}.safetensors")
            text = json.dumps(to_json(facts), indent=2, allow_nan=False) + "\n"
            (folder / f"rank-{self.rank}.json").write_text(text, encoding="utf-8")
        except Exception as error:  # safetensors has an error class of its own for a full disk
            return f"lost ({error})"
        return f"in {folder}"


class StopOnSignal:
    """`with StopOnSignal() as stop:` sets `stop.requested` on a signal; the handlers that were there come back.

    In the main thread only: Python runs signal handlers nowhere else. The first signal is answered at once on stderr if
    it `answers`: a step may take minutes.
    """

    exit_status = 128 + signal.SIGTERM

    def __init__(self, *, answers: bool = False) -> None:
        self._answers = answers
        self._process, self._before = 0, dict[int, Any]()  # process: which is inside of it; 0: none
        self.requested, self._since = False, dict[int, float]()  # when each signal came first

    @property
    def reason(self) -> str:
        """The name of the first signal."""
        return next((signal.Signals(number).name for number in self._since), "a signal to another process")

    def refuse_inner(self, directory: Path) -> None:
        """InputError inside of its `with`: a second run would end the first one's engine, lock and handlers."""
        if self._process == os.getpid():
            raise InputError(
                f"got a run in {directory} inside of the same run, as of a callback that calls train(), want one after "
                "the other; fix: call it when train() has returned, or make another trainer"
            )

    def __enter__(self) -> StopOnSignal:
        self._process, self.requested, self._since = os.getpid(), False, {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                if number == signal.SIGTERM or signal.getsignal(number) == signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # None: a handler that was not installed from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._process = 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = time.monotonic() - self._since.setdefault(number, time.monotonic()) > SAME_REQUEST_SECONDS
        if self._answers and not self.requested and os.getpid() == self._process:
            name = signal.Signals(number).name
            text = f"{name}: the run ends with a checkpoint after this step; a second {name} ends it at once"
            with suppress(OSError):  # not by `print`, which may be what was interrupted
                os.write(2, f"\nfused-grpo: {text}\n".encode())
        self.requested = True
        # A process that was forked off has no loop that would read the flag.
        if again or os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
