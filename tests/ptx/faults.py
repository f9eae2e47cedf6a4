"""Faults planted in compiled kernels, which are then emulated.

Each barrier, fence and wait is removed in turn. What is not found stays removed, so of two barriers that do the same,
the second is found. Each wait is also for one group less. In one kernel each mask of a store is removed, and in one
each vector access is moved.

Run as a script in a process without TRITON_INTERPRET: `faults.py architecture ...`. Prints a JSON object per kernel and
kind of fault.
"""

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from cases import Case, cases, errors, logprobs, weights_of_head
from emulator.instructions import Instruction, Program
from emulator.memory import Fault

MASKED, VECTORS = "logits gradient in fp32", "softmax weights of rising logits"
# A kernel that other cases launch as well.
HAS_CASES = {"_finish_rows_kernel": "finish rows", "_logprob_forward_kernel": "logprobs"}
Edit = Callable[[Program, int], None]


def repeated_cases(arch: str) -> dict[str, Case]:
    """Small ones, in which every barrier of their kernels is reached more than once."""
    by_name = cases(arch)
    D = 5 * (64 if arch == "sm_90" else 32)  # one block of features more than there are stages
    names = ("logprobs of unaligned rows", "logprobs in fp32", "softmax weights of rising logits", "logits gradient")
    names += ("divergence, jsd", "finish rows", "losses of one program", "scale", "entry logits")
    repeated: dict[str, Case] = {"logprobs": functools.partial(logprobs, N=9, D=D, V=600, full=True)}
    if arch == "sm_90":
        repeated["weights of a head"] = functools.partial(weights_of_head, N=9, D=D, V=600)
    return repeated | {name: by_name[name] for name in names}


def orders(instruction: Instruction) -> bool:
    """Whether this is a barrier, a fence, a wait, or what an mbarrier needs to be waited for."""
    op = instruction.op
    return op[0] in ("bar", "mbarrier") or bool({"fence", "wait_group"} & set(op))


def is_masked_store(instruction: Instruction) -> bool:
    return instruction.op[:2] == ("st", "global") and instruction.guard is not None


def is_vector(instruction: Instruction) -> bool:
    return instruction.op[1:2] == ("global",) and instruction.op[2] in ("v2", "v4")


def is_wait(instruction: Instruction) -> bool:
    return "wait_group" in instruction.op


def unmask(program: Program, place: int) -> None:
    program.code[place] = program.code[place]._replace(guard=None)


def move(program: Program, place: int) -> None:
    """By one element of 32 bits."""
    arguments = tuple(x.replace("+ ", "+ 4") if x[0] == "[" else x for x in program.code[place].arguments)
    program.code[place] = program.code[place]._replace(arguments=arguments)


def relax(program: Program, place: int) -> None:
    """Wait for one group less."""
    groups = str(int(program.code[place].arguments[0]) + 1)
    program.code[place] = program.code[place]._replace(arguments=(groups,))


def plant(arch: str, name: str, case: Case, where: Callable[[Instruction], bool], edit: Edit) -> None:
    """Each fault has a process of its own, forked from this one where it comes to the place of the fault."""
    facts: dict[str, dict[str, Any]] = {}
    report: list[int] = []  # in such a process: where it says what was found

    def prepare(program: Program) -> None:
        if name.startswith(HAS_CASES.get(program.name, "")):
            places = [place for place, instruction in enumerate(program.code) if where(instruction)]
            # What is never reached is not found.
            silent = {place: program.code[place].text for place in places}
            facts[program.name] = {"planted": len(places), "found": Counter(), "silent": silent}
            program.breakpoints.update({place: functools.partial(attempt, program, place) for place in places})

    def attempt(program: Program, place: int) -> None:
        if report:
            return
        reader, writer = os.pipe()
        if not (process := os.fork()):
            report.append(writer)
            return edit(program, place)
        os.close(writer)
        with open(reader) as pipe:
            finding = pipe.read()
        assert os.waitpid(process, 0)[1] == 0, finding
        if finding:
            facts[program.name]["found"][finding] += 1
            del facts[program.name]["silent"][place]
        else:
            edit(program, place)

    try:
        wrong, _ = errors(case, arch, prepare=prepare)
        finding = "wrong values, or padding" if max(wrong.values()) > 1.0 else ""
    except Fault as fault:
        finding = str(fault).partition(":")[0]
    if report:
        os.write(report[0], finding.encode())
        os._exit(0)
    assert not finding, "without a fault, and with those that are not found"
    for kernel, findings in facts.items():
        findings = {"arch": arch, "case": name, "kernel": kernel, "kind": where.__name__, **findings}
        print(json.dumps(findings | {"silent": list(findings["silent"].values())}), flush=True)


if __name__ == "__main__":
    for arch in sys.argv[1:]:
        for name, case in repeated_cases(arch).items():
            plant(arch, name, case, orders, Program.remove)
            if name.startswith(("logprobs", "weights")):
                plant(arch, name, case, is_wait, relax)
        plant(arch, MASKED, cases(arch)[MASKED], is_masked_store, unmask)
        plant(arch, VECTORS, cases(arch)[VECTORS], is_vector, move)
