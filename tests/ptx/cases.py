"""The kernels as compiled for an architecture, emulated, beside the same passes of plain torch in fp64.

Run as a script in a process without TRITON_INTERPRET: `cases.py architecture ...`. Prints a JSON object per case: the
programs that ran, and how far each result is from fp64, in units of what is allowed; or the fault. A case is a function
of `Device`, called once with the emulated kernels and once with plain torch.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from emulator.instructions import Program
from emulator.launch import Emulation
from emulator.memory import Fault
from torch import Tensor

from fused_grpo import kernels
from fused_grpo._maths.moments import Moments
from fused_grpo._maths.statistics import RowState, Statistics
from fused_grpo.config import TokenTerms
from fused_grpo.kernels.tuning import GemmTile
from fused_grpo.passes import torch_passes

EPS = torch.finfo(torch.float32).eps
BF16 = torch.bfloat16
# Errors that are allowed: of fp32 numbers, times the largest logit or result; of fp32 gradients and of those rounded to
# bf16, relative to the norm of a row.
NUMBER, GRADIENT, ROUNDED = 4 * EPS, 32 * EPS, 2.0**-8
Results = dict[str, Tensor]


@dataclass
class Device:
    """Where a case runs: `passes` is the kernels, or plain torch with all floats in fp64."""

    passes: ModuleType
    exact: bool
    seed: int = 0
    largest: float = 1.0  # logit
    tiles: list[tuple[Tensor, int]] = field(default_factory=list)

    def of(self, x: Tensor) -> Tensor:
        return x.double() if self.exact and x.is_floating_point() else x

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of what a pass writes."""
        return torch.float64 if self.exact else dtype

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0, rise: float = 0.0) -> Tensor:
        """Rounded to `dtype` on both devices; `rise` is added from the first column to the last."""
        self.seed += 1
        values = spread * torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed))
        return self.of((values + rise * torch.linspace(0, 1, shape[-1])).to(dtype))

    def positive(self, *shape: int) -> Tensor:
        self.seed += 1
        return self.of(torch.rand(*shape, generator=torch.Generator().manual_seed(self.seed)) + 0.3)

    def tile(self, values: Tensor) -> Tensor:
        """In memory as `empty_tile` gives it, amid NaN."""
        rows, columns = values.shape
        around = torch.full((rows + 1, columns + 64 - columns % 64), torch.nan, dtype=values.dtype)
        self.tiles.append((around, columns))
        self.largest = max(self.largest, float(values[values.isfinite()].abs().max()))
        tile = around[:rows, :columns]
        return tile.copy_(values)

    def head(self, R: int, V: int, *, full: bool) -> dict[str, Any]:
        head = {"temperature": self.positive(R)}
        return head | {"bias": self.normal(V, dtype=BF16), "softcap": 20.0, "logit_scale": 0.7} if full else head


def gradient_of(dtype: torch.dtype) -> str:
    return "rounded gradient" if dtype == BF16 else "gradient"


def logprobs(device: Device, N: int, D: int, V: int, *, dtype: torch.dtype = BF16, full: bool = False) -> Results:
    hidden, weight = device.normal(N, D, dtype=dtype), device.normal(V, D, dtype=dtype, spread=3 / D**0.5)
    device.largest = 15.0
    targets = torch.arange(N) * 37 % V
    targets[-2:] = torch.tensor([V - 1, -1])
    head = device.head(N, V, full=full)
    if device.exact:
        state = RowState(*device.passes.row_statistics(hidden @ weight.T, targets, entropy=full, **head))
        out = device.passes.finish_rows([state], entropy=full)
    else:
        out = device.passes.logprob_forward(hidden, weight, targets, entropy=full, **head)
    return {"logprobs": out[0]} | ({"entropy": out[1]} if full else {})


def softmax_weights(
    device: Device, R: int, V: int, *, full: bool = False, dtype: torch.dtype = BF16, rising: float = 0.0
) -> Results:
    """With `rising` logits the shift is raised several times, and the last row has no finite total."""
    raw = device.normal(R, V, spread=4, rise=rising)
    if rising:
        raw[-1, V // 3] = torch.inf
    targets, head = torch.arange(R).sub(1) * 37 % V, device.head(R, V, full=full)
    weights, scale, statistics = device.passes.softmax_weights_(
        device.tile(raw), targets, entropy=full, dtype=device.dtype(dtype), **head
    )
    results = {gradient_of(dtype): weights.double() * scale[:, None], "logprobs": statistics[0]}
    return results | ({"entropy": statistics[1]} if full else {})


def weights_of_head(device: Device, N: int, D: int, V: int, *, full: bool = False) -> Results:
    """The first row's target is e^68 times less likely than the others. Without a cap the last row has no total."""
    hidden, weight = device.normal(N, D, dtype=BF16), device.normal(V, D, dtype=BF16, spread=3 / D**0.5)
    hidden[0] *= 16
    targets, head = torch.arange(N) * 37 % V, device.head(N, V, full=False)
    if not full:
        hidden[-1, 0] = torch.inf
    targets[0], device.largest = (hidden[0].double() @ weight.double().T).argmin(), 150.0
    if full:
        head |= {"bias": device.normal(V, dtype=BF16), "logit_scale": 0.7, "softcap": 200.0}
    if device.exact:
        out = device.passes.softmax_weights_(hidden @ weight.T, targets, entropy=full, dtype=torch.float64, **head)
    else:
        tile = device.tile(torch.zeros(N, V, dtype=BF16))
        out = device.passes.softmax_weights_forward(hidden, weight, targets, out=tile, entropy=full, **head)
    weights, scale, statistics = out
    results = {gradient_of(BF16): weights.double() * scale[:, None], "logprobs": statistics[0]}
    return results | ({"entropy": statistics[1]} if full else {})


def known_weights(device: Device, R: int, V: int) -> Results:
    """The weights of two slices of a vocabulary, from the statistics of both."""
    raw, targets, temperature = device.normal(R, V, spread=4), torch.arange(R).sub(1) * 37 % V, device.positive(R)
    slices = [(raw[:, : V // 2], targets), (raw[:, V // 2 :], targets - V // 2)]
    states = [
        RowState(*device.passes.row_statistics(device.tile(x), t, entropy=True, temperature=temperature))
        for x, t in slices
    ]
    statistics = Statistics(*device.passes.finish_rows(states, entropy=True))
    results = {"logprobs": statistics[0], "entropy": statistics[1]}
    for i, (x, t) in enumerate(slices):
        weights, scale, _ = device.passes.softmax_weights_(
            device.tile(x), t, statistics=statistics, temperature=temperature, dtype=device.dtype(BF16)
        )
        results[f"{gradient_of(BF16)} {i}"] = weights.double() * scale[:, None]
    return results


def moments(device: Device, R: int, V: int, *, full: bool = False) -> Results:
    """The first row's target is in a tile before, the last one's in a later one. Of one row it leads."""
    raw, targets, head = device.normal(R, V, spread=4), torch.arange(R).sub(1) * 37 % V, device.head(R, V, full=full)
    targets[0], targets[-1], raw[1, targets[1]] = -1, V, 30.0
    taken: list[Moments] = []
    passed = {"entropy": True, "moments": lambda fields, columns: taken.append(Moments(*fields))}
    device.passes.row_statistics(device.tile(raw), targets, **passed, **head)
    (row_moments,) = taken
    leads = (row_moments.target_logit >= row_moments.largest) & (row_moments.target_logit > row_moments.before)
    numbers = {"largest": row_moments.largest, "squares": row_moments.squares, "mean": row_moments.logits / V}
    return numbers | {"target logit": row_moments.target_logit, "leads": leads.double()}


def logits_gradient(device: Device, R: int, V: int, *, dtype: torch.dtype = BF16, full: bool = False) -> Results:
    raw, targets, head = device.normal(R, V, spread=4), torch.arange(R).sub(1) * 37 % V, device.head(R, V, full=full)
    same = {name: x.double() if isinstance(x, Tensor) else x for name, x in head.items()}
    state = RowState(*torch_passes.row_statistics(raw.double(), targets, entropy=True, **same))
    statistics = Statistics(*(device.of(x.float()) for x in torch_passes.finish_rows([state], entropy=True)))
    upstream = {"grad_logprobs": device.normal(R), "grad_entropy": device.normal(R) if full else None}
    gradient = device.passes.logits_gradient_(
        device.tile(raw), targets, statistics=statistics, dtype=device.dtype(dtype), **upstream, **head
    )
    return {gradient_of(dtype): gradient}


def divergence(device: Device, R: int, V: int, *, kind: str, full: bool = False) -> Results:
    tiles = [device.tile(device.normal(R, V, spread=3)) for _ in ("student", "teacher")]
    heads = {f"{model}_head": device.head(R, V, full=full) for model in ("student", "teacher")}
    targets = {"targets": torch.arange(R).sub(1) * 37 % V, "grad_logprobs": device.normal(R)} if full else {}
    value, gradient = device.passes.divergence_gradient_(
        *tiles, kind=kind, beta=0.3, upstream=device.normal(R), dtype=device.dtype(BF16), **heads, **targets
    )
    return {"divergence": value, gradient_of(BF16): gradient}


def finish_rows(device: Device, parts: int, N: int) -> Results:
    """The target's logit is in the last part, and each part has three equal others."""
    nowhere, totals = device.of(torch.full([N], -torch.inf)), [device.positive(N) for _ in range(parts)]
    states = [RowState(device.normal(N), s, s * torch.log(s / 3), nowhere) for s in totals]
    states[-1] = states[-1]._replace(target_logit=device.normal(N))
    return dict(
        zip(("logprobs", "entropy", "shift", "total"), device.passes.finish_rows(states, entropy=True), strict=True)
    )


def loss(device: Device, N: int, form: str, correction: str | None = None, calls: int = 25) -> Results:
    """The partial sums of more programs than are added at a time, or of a single one, which finishes them itself."""
    names = ("old_logprobs", "ref_logprobs", "sampling_logprobs", "entropy_weights", "policy_weights", "kl_cov_weights")
    logprobs, rest = -device.positive(N), {name: -device.positive(N) for name in names}
    rest |= {"entropy": device.positive(N), "advantages": device.normal(N), "weights": device.positive(N)}
    rest["mask"] = device.normal(N) > -0.5
    terms = TokenTerms(form, 0.2, 0.28, 3.0, (1.0, 1.05), 0.1, "k3", True, correction, 0.5, 3.0, 0.2)
    gradient, by_ratio, sums = device.passes.grpo_token_loss(
        logprobs, log_ratio=device.normal(N), inputs=rest, terms=terms
    )
    results = device.passes.token_statistics([sums] * calls)
    results |= {name: results[name] / (calls * N) for name in ("loss", "policy_term", "loss_tokens")}
    return results | {"gradient": gradient, "gradient by the ratio": by_ratio}


def scale_hidden(device: Device, R: int, D: int) -> Results:
    hidden, scale, g = device.normal(R, D, dtype=BF16), device.normal(R), device.normal(R)
    g[1] = 0.0
    factor, scaled = device.passes.scale_hidden(hidden, scale, g)
    return {"factor": factor, gradient_of(BF16): scaled}


def scale(device: Device, count: int) -> Results:
    values, others = device.normal(count, dtype=BF16), device.normal(count + 5)
    device.passes.scale_(values, device.of(torch.tensor(0.3)), others)
    return {gradient_of(BF16): values, "others": others}


def targets(device: Device, count: int) -> Results:
    values = torch.arange(count) * 37 % 50
    kept, cleaned = device.passes.clean_targets(values, ignore_index=7, vocab_size=50)
    return {"kept": kept.double(), "targets": cleaned.double()}


def entry_logits(device: Device, E: int, D: int) -> Results:
    hidden, weight, entries = device.normal(7, D, dtype=BF16), device.normal(19, D), torch.arange(E) * 5
    if device.exact:  # plain torch rounds to the dtype of `hidden`, too
        weight = weight.to(BF16).double()
    out = device.passes.entry_logits(hidden, weight, entries % 7, entries % 19, dtype=device.dtype(torch.float32))
    return {"logits": out}


def weighted_rows(device: Device, D: int, *, accumulate: bool) -> Results:
    out, matrix = device.normal(7, D, dtype=BF16), device.normal(19, D, dtype=BF16)
    entries, offsets, places = torch.arange(29) * 5 % 19, torch.tensor([0, 1, 1, 12, 29]), torch.tensor([4, 0, 6, 2])
    options = {"cast": device.dtype(BF16), "accumulate": accumulate}
    device.passes.weighted_rows_(out, places, offsets, entries, device.normal(29), matrix, **options)
    return {gradient_of(BF16): out}


Case = Callable[[Device], Results]


def cases(arch: str) -> dict[str, Case]:
    """By name. Rows end soon after the start of a tile, so that each access of the last tile is masked somewhere."""
    V = 3 + 2 * (4096 if arch == "sm_90" else 1024)  # of the row passes
    call = functools.partial
    by_name: dict[str, Case] = {
        # Five blocks of features in four stages, two row tiles, and several splits.
        "logprobs": call(logprobs, N=130, D=320, V=600),
        "logprobs of all options": call(logprobs, N=9, D=72, V=600, full=True),
        "logprobs of unaligned rows": call(logprobs, N=9, D=165, V=300, full=True),
        "logprobs in fp32": call(logprobs, N=9, D=40, V=200, dtype=torch.float32, full=True),
        "softmax weights": call(softmax_weights, R=2, V=V),
        "softmax weights of rising logits": call(softmax_weights, R=2, V=V + 500, rising=120.0),
        "softmax weights of all options": call(softmax_weights, R=2, V=V, full=True),
        "softmax weights in fp32": call(softmax_weights, R=2, V=V, dtype=torch.float32),
        "softmax weights of slices": call(known_weights, R=3, V=V),
        "moments": call(moments, R=4, V=V),
        "moments of all options": call(moments, R=4, V=V, full=True),
        "logits gradient": call(logits_gradient, R=2, V=V),
        "logits gradient of all options": call(logits_gradient, R=2, V=V, full=True),
        "logits gradient in fp32": call(logits_gradient, R=2, V=V, dtype=torch.float32),
        "divergence of all options": call(divergence, R=2, V=2051, kind="jsd", full=True),
        "finish rows": call(finish_rows, parts=7, N=21),
        "scale hidden": call(scale_hidden, R=3, D=1500),
        "scale": call(scale, count=9000),
        "targets": call(targets, count=1500),
        "entry logits": call(entry_logits, E=29, D=600),
        "weighted rows": call(weighted_rows, D=600, accumulate=False),
        "weighted rows, accumulated": call(weighted_rows, D=601, accumulate=True),
    }
    by_name |= {f"divergence, {x}": call(divergence, R=2, V=2051, kind=x) for x in ("reverse_kl", "forward_kl", "jsd")}
    by_name |= {f"loss, {x}": call(loss, N=700, form=x, correction="truncate") for x in ("cispo", "sapo")}
    one_program = call(loss, N=400, form="clipped", correction="mask")
    by_name |= {"loss of one program": call(one_program, calls=1), "losses of one program": call(one_program, calls=50)}
    if arch == "sm_90":  # no other has tiles for them
        by_name["weights of a head"] = call(weights_of_head, N=130, D=320, V=600)
        by_name["weights of a head of all options"] = call(weights_of_head, N=9, D=320, V=600, full=True)
    return by_name | {"loss, dppo_kl": call(loss, N=700, form="dppo_kl", correction="sampler")}


@functools.cache
def of_fp64(case: Case) -> Results:
    return case(Device(torch_passes, exact=True))


def errors(case: Case, arch: str, **options: Any) -> tuple[dict[str, float], dict[str, Program]]:
    """(each result's distance from fp64, in units of what is allowed, the programs that ran)."""
    exact = of_fp64(case)
    # Fewer programs, which loop more often.
    few = mock.patch.object(GemmTile, "max_splits", property(lambda tile: 2))
    fewer = mock.patch.object(sys.modules[kernels.scale_.__module__], "PROGRAMS", 2)
    with Emulation(arch, **options) as emulation, few, fewer:
        results = case(device := Device(kernels, exact=False))
    out = {name: distance(name, results[name], exact[name], device.largest) for name in exact}
    for around, columns in device.tiles:
        untouched = around[:-1, columns:].isnan().all() and around[-1].isnan().all()
        out["padding"] = 0.0 if untouched and not out.get("padding") else torch.inf
    return out, emulation.launched


def distance(name: str, ours: Tensor, exact: Tensor, largest: float) -> float:
    if not torch.equal(ours.isfinite(), exact.isfinite()):
        return torch.inf
    difference = (ours.double() - exact).nan_to_num(0.0, 0.0, 0.0)
    if "gradient" in name:
        allowed = ROUNDED if name.startswith("rounded") else GRADIENT
        relative = difference.norm(dim=-1) / exact.norm(dim=-1).nan_to_num(0.0).clamp_min(1e-30)
        return float(relative.max() / allowed)
    largest = max(largest, float(exact.nan_to_num(0.0, 0.0, 0.0).abs().max()))
    return float(difference.abs().max() / (NUMBER * largest))


def main(*arches: str) -> None:
    for arch in arches:
        for name, case in cases(arch).items():
            facts: dict[str, Any] = {"arch": arch, "case": name}
            try:
                facts["errors"], programs = errors(case, arch)
                facts["programs"] = list(programs)
            except Fault as fault:
                facts["fault"] = str(fault)
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
