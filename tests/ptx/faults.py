"""Faults planted in compiled kernels, which are then emulated.

Each barrier, fence and wait is removed in turn. What is not found stays removed, so of two barriers that do the same,
the second is found. In one kernel also each mask of a store is removed, and each vector access is moved.

Run as a script in a process without TRITON_INTERPRET: `faults.py architecture ...`. Prints a JSON object per kernel and
kind of fault.
"""

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from cases import Case, cases, errors, logprobs, weights_of_head
from emulator.memory import Fault
from emulator.program import Instruction, Program

MASKED, VECTORS = "logits gradient in fp32", "softmax weights of rising logits"
# A kernel that other cases launch as well.
HAS_CASES = {"_finish_rows_kernel": "finish rows", "_logprob_forward_kernel": "logprobs"}
Edit = Callable[[Program, int], Program]


def repeated_cases(arch: str) -> dict[str, Case]:
    """Small ones, in which every barrier of their kernels is reached more than once."""
    known = cases(arch)
    D = 5 * (64 if arch == "sm_90" else 32)  # one block of features more than there are stages
    names = ("logprobs of unaligned rows", "logprobs in fp32", "softmax weights of rising logits", "logits gradient")
    names += ("divergence, jsd", "finish rows", "losses of one program", "scale", "entry logits")
    found: dict[str, Case] = {"logprobs": functools.partial(logprobs, N=9, D=D, V=600, full=True)}
    if arch == "sm_90":
        found["weights of a head"] = functools.partial(weights_of_head, N=9, D=D, V=600)
    return found | {name: known[name] for name in names}


def orders(instruction: Instruction) -> bool:
    """Whether this is a barrier, a fence, a wait, or what an mbarrier needs to be waited for."""
    op = instruction.op
    return op[0] in ("bar", "mbarrier") or bool({"fence", "wait_group"} & set(op))


def is_masked_store(instruction: Instruction) -> bool:
    return instruction.op[:2] == ("st", "global") and instruction.guard is not None


def is_vector(instruction: Instruction) -> bool:
    return instruction.op[1:2] == ("global",) and instruction.op[2] in ("v2", "v4")


def unmasked(program: Program, place: int) -> Program:
    return edited(program, place, replace(program.code[place], guard=None))


def moved(program: Program, place: int) -> Program:
    """By one element of 32 bits."""
    arguments = tuple(x.replace("+ ", "+ 4") if x[0] == "[" else x for x in program.code[place].arguments)
    return edited(program, place, replace(program.code[place], arguments=arguments))


def edited(program: Program, place: int, instruction: Instruction) -> Program:
    return replace(program, code=(*program.code[:place], instruction, *program.code[place + 1 :]))


def plant(arch: str, name: str, case: Case, where: Callable[[Instruction], bool], edit: Edit) -> None:
    _, programs = errors(case, arch)
    for program in programs.values():
        if not name.startswith(HAS_CASES.get(program.name, "")):
            continue
        found, silent, changed = Counter[str](), [], program
        places = [place for place, instruction in enumerate(program.code) if where(instruction)]
        for place in places:
            faulty = edit(changed, place)
            try:
                wrong, _ = errors(case, arch, change=lambda x, y=program, z=faulty: z if x is y else x)
            except Fault as fault:
                found[str(fault).partition(":")[0]] += 1
                continue
            if max(wrong.values()) > 1.0:
                found["wrong values, or padding"] += 1
            else:
                silent.append(program.code[place].text)
                changed = faulty
        facts = {"arch": arch, "case": name, "kernel": program.name, "kind": where.__name__, "planted": len(places)}
        print(json.dumps(facts | {"found": found, "silent": silent}), flush=True)


if __name__ == "__main__":
    for arch in sys.argv[1:]:
        for name, case in repeated_cases(arch).items():
            plant(arch, name, case, orders, Program.without)
        plant(arch, MASKED, cases(arch)[MASKED], is_masked_store, unmasked)
        plant(arch, VECTORS, cases(arch)[VECTORS], is_vector, moved)
