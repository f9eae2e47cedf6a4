"""The text of a PTX kernel as a list of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

KERNEL = re.compile(r"\.entry (\w+)\((.*?)\)\s*\.reqntid (\d+).*?^\{(.*)^\}", re.DOTALL | re.MULTILINE)
STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
ARGUMENT = re.compile(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+")  # a list in brackets or braces is one


@dataclass(frozen=True)
class Instruction:
    """`@guard op[0].op[1]... arguments`, or `@!guard`."""

    op: tuple[str, ...]
    arguments: tuple[str, ...]
    guard: str | None = None
    negated: bool = False
    text: str = ""


NOTHING = Instruction(("mov", "b32"), ("_", "0"))


@dataclass(frozen=True)
class Program:
    name: str
    threads: int
    parameters: tuple[str, ...]
    code: tuple[Instruction, ...]
    labels: dict[str, int]

    def without(self, place: int) -> Program:
        """The same without an instruction; without a wait and the branch of its loop."""
        gone = 2 if "try_wait" in self.code[place].op else 1
        return replace(self, code=(*self.code[:place], *[NOTHING] * gone, *self.code[place + gone :]))


def split(text: str) -> list[str]:
    """The elements of "{a, b}" or "[a, {b, c}]", or "a" itself."""
    return ARGUMENT.findall(text[1:-1] if text[0] in "{[" else text)


def parse(ptx: str) -> Program:
    """The one kernel in a module of Triton's."""
    name, parameters, threads, body = KERNEL.search(ptx).groups()  # type: ignore[union-attr]
    code, labels = [], dict[str, int]()
    for line in body.splitlines():
        line = line.partition("//")[0].strip()
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
            continue
        for text in filter(lambda x: x.strip("{}") and x[0] != ".", map(str.strip, line.split(";"))):
            negated, guard, op, rest = STATEMENT.fullmatch(text).groups()  # type: ignore[union-attr]
            arguments = tuple(ARGUMENT.findall(rest))
            if op.startswith("bra") and arguments[0] in labels:  # inline assembly may give the label again
                labels[str(labels[arguments[0]])] = labels[arguments[0]]
                arguments = (str(labels[arguments[0]]),)
            code.append(Instruction(tuple(op.split(".")), arguments, guard, negated == "!", text))
    return Program(name, int(threads), tuple(re.findall(rf"{name}_param_\d+", parameters)), tuple(code), labels)
