"""The cases that `pytest bench` measures: works, their implementations, and what was promised of the outcome.

Two suites, for a CPU and for a GPU, have the same kinds of cases: the head by itself (log-probs and loss; without
gradient, frozen, trainable), rollouts of GRPO (uneven lengths, idle sequences, peaked and flat softmax), curves over N
and V. `tiny` is the same list at sizes that run anywhere in seconds, so that every path runs before it is on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from fused_grpo.bench.heads.work import Gradients, Kind, Work

FLOOR = "products alone"
OURS = ("fused-grpo", "fused-grpo, needed")
FULL = ("full logits", "full logits, compiled")
PEERS = ("TRL", "Liger GRPO", "Liger FSLCE", "CCE", "CCE, exact", "CCE, torch", "torch core", "verl", "quack")
DISTILLERS = (FLOOR, "fused-grpo", "full logits", "TRL divergence", "Liger JSD")
EVERYONE = (FLOOR, *OURS, *FULL, *PEERS)


# These compile for each shape, which takes long, so that few cases have them.
COMPILED = ("full logits, compiled", "CCE, torch")
UNCOMPILED = tuple(name for name in EVERYONE if name not in COMPILED)


@dataclass(frozen=True)
class Case:
    """A work, its implementations and its rounds."""

    work: Work
    names: tuple[str, ...] = EVERYONE
    rounds: int = 5
    slow: tuple[str, ...] = ()
    """Implementations that are measured in every third round only: so far from the others that a few rounds tell."""
    memory: bool = True
    """Whether to count bytes as well."""
    long: bool = False
    """Whether it is measured with `-m long` alone."""

    @property
    def name(self) -> str:
        return self.work.name

    def tiny(self) -> Case:
        """The same case at a size that runs anywhere in seconds."""
        return replace(self, work=replace(self.work.small(), dtype="float32"), rounds=2)


@dataclass(frozen=True)
class Promise:
    """A bound on the quotient of two implementations' medians ("seconds") or peaks ("bytes beside gradients")."""

    case: Case
    over: str
    under: str
    bound: str  # "<= 1.12"
    what: str = "seconds"

    @property
    def name(self) -> str:
        return f"{self.case.work.kind}, {self.case.work.gradients}: {self.what} of {self.over} / {self.under}"

    def value(self, over: float, under: float) -> float:
        return over / under if under else math.nan


def is_met(value: float, bound: str) -> bool:
    """Of `<= 1.12` or `>= 2`. NaN meets none."""
    sign, number = bound.split()
    return value <= float(number) if sign == "<=" else value >= float(number)


SLOW = ("TRL", "Liger GRPO", "Liger FSLCE")
# Implementations whose times were promised are measured without the others, at the size of the promise.
PROMISED = (FLOOR, "fused-grpo", "full logits", "TRL", "Liger GRPO")
LOSS = Case(Work(kind="loss", head="GPT-2", tokens=2048), PROMISED, slow=("TRL", "Liger GRPO"))
TRAINABLE = Case(
    Work(kind="logprobs", head="GPT-2", tokens=2048), (FLOOR, "fused-grpo", "TRL"), 4, slow=("TRL",), memory=False
)
FROZEN = Case(
    Work(kind="logprobs", head="GPT-2", tokens=2048, gradients="frozen"), (FLOOR, "fused-grpo", "TRL"), 2, memory=False
)
KEPT = Case(
    Work(kind="loss", head="GPT-2", tokens=2048, kept=20),
    ("fused-grpo", "full logits"),
    6,
    slow=("full logits",),
    memory=False,
)
ONE_TARGET = "fused-grpo, one target"
SEVERAL = Case(
    Work(kind="logprobs", head="GPT-2", tokens=2048, several=8),
    (ONE_TARGET, "fused-grpo", "full logits"),
    3,
    slow=("full logits",),
    memory=False,
)
# Of the kinds of divergence, the one that takes longest; in the distillation, the default and that one. Other projects'
# divergences take so long that they are measured on fewer tokens.
DIVERGENCE = Case(Work(kind="divergence", head="GPT-2", tokens=2048), (FLOOR, "fused-grpo"), memory=False)
SMALL_DIVERGENCE = Case(Work(kind="divergence", head="GPT-2", tokens=256), DISTILLERS, 3, memory=False)
NO_TEACHER, OF_JSD = "fused-grpo, no teacher", "fused-grpo, JSD"
DISTILLATION = Case(
    Work(kind="distillation", head="GPT-2", tokens=2048), (NO_TEACHER, "fused-grpo", OF_JSD), 4, memory=False
)

NOT_CENTRED = "fused-grpo, not centred"
CENTRED = Case(
    Work(kind="loss", head="GPT-2", tokens=2048, centred=128),
    (NOT_CENTRED, "fused-grpo", "full logits"),
    6,
    slow=("full logits",),
)

# The heads of real models over N. A worker of Qwen3's head keeps 1.2 GiB of weights and gradients, and full logits of
# 4,096 tokens take three times 2.3 GiB: with more implementations 20 GiB would not do.
ON_CPU = (FLOOR, "fused-grpo", "full logits", "TRL", "Liger GRPO", "Liger FSLCE", "torch core")
OVER_N: list[Case] = [
    Case(Work(kind="loss", head=head, tokens=tokens), names, rounds, slow=SLOW, long=True)
    for head, tokens, names, rounds in (
        ("SmolLM2", 512, (*ON_CPU, *COMPILED), 3),
        ("SmolLM2", 1024, ON_CPU, 3),
        ("SmolLM2", 2048, (*ON_CPU, *COMPILED), 3),
        ("SmolLM2", 4096, ON_CPU, 3),
        ("Qwen3-0.6B", 512, (*ON_CPU, *COMPILED), 3),
        ("Qwen3-0.6B", 1024, PROMISED, 3),
        ("Qwen3-0.6B", 2048, PROMISED, 2),
        ("Qwen3-0.6B", 4096, PROMISED, 2),
    )
]

CPU: list[Case] = [
    LOSS,
    TRAINABLE,
    FROZEN,
    KEPT,
    SEVERAL,
    SMALL_DIVERGENCE,
    DIVERGENCE,
    DISTILLATION,
    CENTRED,
    Case(Work(kind="logprobs", head="GPT-2", tokens=256), rounds=2),
    Case(Work(kind="loss", head="GPT-2", tokens=512, idle=0.5), (FLOOR, *OURS, "TRL"), rounds=2),
    Case(Work(kind="loss", head="Qwen3-0.6B", tokens=96, uneven=True), (*PROMISED, "torch core"), rounds=2),
    Case(Work(kind="logprobs", head="Qwen3-0.6B", tokens=192, gradients="no_grad"), UNCOMPILED, rounds=3),
    Case(Work(kind="loss", head="GPT-2", tokens=256), PROMISED, rounds=2),
    *OVER_N,
]

PROMISES = [
    Promise(LOSS, "fused-grpo", FLOOR, "<= 1.12"),
    Promise(LOSS, "TRL", "fused-grpo", ">= 2.3"),
    Promise(LOSS, "Liger GRPO", "fused-grpo", ">= 1.5"),
    Promise(LOSS, "full logits", "fused-grpo", ">= 1.2"),
    Promise(LOSS, "full logits", "fused-grpo", ">= 10", what="bytes beside gradients"),
    Promise(TRAINABLE, "fused-grpo", FLOOR, "<= 1.1"),
    Promise(TRAINABLE, "TRL", "fused-grpo", ">= 2.1"),
    Promise(FROZEN, "fused-grpo", FLOOR, "<= 1.15"),
    Promise(FROZEN, "TRL", "fused-grpo", ">= 1.8"),
    Promise(KEPT, "fused-grpo", "full logits", "<= 0.04"),
    Promise(SEVERAL, "fused-grpo", ONE_TARGET, "<= 1.1"),
    Promise(DIVERGENCE, "fused-grpo", FLOOR, "<= 1.2"),
    Promise(SMALL_DIVERGENCE, "TRL divergence", "fused-grpo", ">= 1.4"),
    Promise(DISTILLATION, "fused-grpo", NO_TEACHER, "<= 1.4"),
    Promise(CENTRED, "fused-grpo", NOT_CENTRED, "<= 1.03"),
    Promise(CENTRED, "full logits", "fused-grpo", ">= 10", what="bytes beside gradients"),
    # Not kept by a CPU without AVX-512 yet (1.43 to 1.45): two logarithms for each column.
    Promise(DISTILLATION, OF_JSD, NO_TEACHER, "<= 1.4"),
]

GPU_KINDS: list[tuple[Kind, Gradients]] = [("logprobs", "frozen"), ("logprobs", "no_grad"), ("loss", "frozen")]
BF16: dict[str, Any] = {"dtype": "bfloat16", "sequences": 16}
MAIN = (FLOOR, "fused-grpo", "full logits", "TRL", "Liger FSLCE", "CCE", "verl")
GPU: list[Case] = [
    Case(Work(kind="loss", head="Qwen3-0.6B", tokens=8192, **BF16)),
    Case(Work(kind="logprobs", head="Qwen3-8B", tokens=8192, **BF16)),
    Case(Work(kind="loss", head="Qwen3-8B", tokens=8192, **BF16), UNCOMPILED),
    *(
        Case(Work(kind=kind, head=head, tokens=8192, gradients=gradients, **BF16), MAIN)
        for head in ("Qwen3-0.6B", "Qwen3-8B")
        for kind, gradients in GPU_KINDS
    ),
    *(
        Case(Work(kind="loss", head=head, tokens=8192, **BF16), MAIN, rounds=3)
        for head in ("Qwen3-1.7B", "Llama-3-8B", "Gemma-2-2B", "Gemma-3-4B", "Phi-4-mini")
    ),
    # Rollouts: uneven lengths, half of the groups without an advantage, a low and a high entropy.
    Case(Work(kind="loss", head="Qwen3-8B", tokens=8192, uneven=True, **BF16), (*MAIN, "Liger GRPO"), rounds=3),
    Case(Work(kind="loss", head="Qwen3-8B", tokens=8192, idle=0.5, **BF16), (*MAIN, *OURS[1:]), rounds=3),
    *(
        Case(Work(kind="loss", head="Qwen3-8B", tokens=8192, entropy=entropy, **BF16), MAIN, rounds=3)
        for entropy in (0.3, 4.0)
    ),
    *(
        Case(Work(kind="loss", head="Qwen3-1.7B", tokens=tokens, **BF16), MAIN, rounds=3)
        for tokens in (1024, 2048, 4096, 16384, 32768, 131072)
    ),
    # The heads beside that of one token over the vocabulary.
    Case(Work(kind="divergence", head="Qwen3-8B", tokens=8192, **BF16), DISTILLERS, rounds=3),
    Case(Work(kind="divergence", head="Qwen3-0.6B", tokens=8192, **BF16), DISTILLERS, rounds=3),
    Case(Work(kind="logprobs", head="Qwen3-8B", tokens=8192, several=8, **BF16), (FLOOR, *OURS[:1], "full logits")),
    Case(Work(kind="loss", head="Qwen3-8B", tokens=8192, kept=20, **BF16), (*OURS[:1], "full logits")),
]
LONGEST = [Work(kind="loss", head="Qwen3-8B", tokens=4096, **BF16)]
MOST_TOKENS = 2**20


def cases(suite: str, *, tiny: bool) -> list[Case]:
    """The cases of "cpu" or "gpu"; tiny ones of the same name are one, with the implementations of all."""
    by_name: dict[str, Case] = {}
    for case in (case.tiny() if tiny else case for case in {"cpu": CPU, "gpu": GPU}[suite]):
        names = (*by_name[case.name].names, *case.names) if case.name in by_name else case.names
        by_name[case.name] = replace(case, names=tuple(dict.fromkeys(names)))
    return list(by_name.values())
