"""The divergence of two softmaxes and its gradient, in plain torch: the pass of `fused_grpo.kernels.divergence`.

Both tiles are visited in blocks of columns that fit the caches, as in `torch_passes.py`. With c = z - max z of a row's
logits, e = e^c, S the sum of e over the row (s of the student, t of the teacher), d = c_s - c_t and rho = S_s / S_t,

    reverse_kl   KL(p | q) = X / S_s - log rho               X_v = e_s d
    forward_kl   KL(q | p) = log rho - sum e_t d / S_t       X_v = e_t
    jsd          -((1 - beta) X + beta Y) / S_s              X_v = e_s log1p(beta (f - e_s) / e_s)
                                                             Y_v = f log1p((beta - 1) (f - e_s) / f)     f = rho e_t

and for every kind d divergence / d z_v is a combination x X_v - y e_s,v with numbers x and y of the row. So the first
sweep leaves e_s and X in the two tiles (`jsd` needs a second one, since rho is known after the first), and the last
sweep is one fused product. KL takes two exponentials for each column, `jsd` two exponentials and two logarithms.

The largest logit of a row takes no part in the sums: S - 1 is a sum of its own, log rho is log1p((s - t) / S_t) with
the two sums of the others, and where the student's most probable token has more than half of the probability, its
gradient is minus the sum of the others', which a difference of two probabilities near 1 would lose. Where both models
have the same logits, every difference is 0 exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_grpo import chunking
from fused_grpo.torch_passes import _all_equal, _exp, _in_place, _sums, block_width, empty_tile

# For jsd, e^c is not smaller: it is not 0, and no quotient is out of range. Twice as far down it is 0.
_LEAST = {torch.float32: -60.0, torch.float64: -600.0}


def divergence_gradient_(
    student: Tensor,
    teacher: Tensor,
    *,
    kind: str,
    beta: float,
    upstream: Tensor | None,
    student_head: dict[str, Any],
    teacher_head: dict[str, Any],
    targets: Tensor | None = None,
    grad_logprobs: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(the divergence [R], d loss / d(h.w) of the student [R, V] in `dtype` over its tile); both tiles are overwritten.

    The tiles are whole rows of raw h.w; each head is bias [V] or None, temperature [R], logit_scale and softcap.
    `upstream` [R] is d loss / d divergence; None is no gradient. If `targets` [R] and `grad_logprobs` [R] are given,
    the gradient is that of the sum over rows of upstream * divergence + grad_logprobs * log p of the target.
    """
    if not len(student):
        return student.new_zeros(0), None if upstream is None else _in_place(student, dtype or student.dtype)
    models = _Logits(student, slopes=upstream is not None, **student_head), _Logits(teacher, **teacher_head)
    pair = _Pair(*models, kind, beta)
    rows = pair.sweep()
    divergence = rows.divergence.clamp_min(0.0)
    if upstream is None:
        return divergence, None
    out = _in_place(student, dtype or student.dtype)
    slope = pair.student.scale / pair.student.temperature
    g = torch.zeros_like(upstream) if grad_logprobs is None else grad_logprobs * slope
    hit = pair.write_gradient(out, rows, upstream * slope, g, targets)
    if targets is not None:
        at_target = torch.where(hit, 0.0, g)[:, None] * pair.student.slopes_at(targets[:, None])
        out.scatter_add_(1, targets[:, None], at_target.to(out.dtype))
    return divergence, out


class _Logits:
    """A tile of logits z, transformed in place, and the largest of each row with its column, both [R]."""

    def __init__(
        self,
        raw: Tensor,
        *,
        bias: Tensor | None = None,
        temperature: Tensor,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        slopes: bool = False,
    ) -> None:
        self.z, self.bias, self.temperature, self.scale, self.softcap = raw, bias, temperature, logit_scale, softcap
        self.as_it_is = bias is None and softcap is None and _all_equal(temperature, logit_scale)
        # Those of the soft cap [R, V]: after the sweeps, nothing has the logits any more.
        self.slopes = empty_tile(*raw.shape, dtype=raw.dtype, device=raw.device) if slopes and softcap else None
        width = block_width(raw)
        self.columns = list(chunking.chunks(raw.shape[1], width))
        # Elementwise over the blocks first: a maximum of each row in each block takes twice as long.
        tops = self._transformed_(self.columns[0]).clone()
        for columns in self.columns[1:]:
            z = self._transformed_(columns)
            torch.maximum(tops[:, : z.shape[1]], z, out=tops[:, : z.shape[1]])
        starts = torch.arange(0, raw.shape[1], width, device=raw.device)
        candidates = (tops.argmax(1)[:, None] + starts).clamp_max(raw.shape[1] - 1)
        largest, block = raw.gather(1, candidates).max(1, keepdim=True)
        self.largest, self.at = largest[:, 0], candidates.gather(1, block)[:, 0]

    def _transformed_(self, columns: slice) -> Tensor:
        z = self.z[:, columns]
        if self.as_it_is:
            return z
        if self.bias is not None:
            z.add_(self.bias[columns])
        if self.softcap is None:
            return z.mul_((self.scale / self.temperature)[:, None])
        z.mul_(self.scale / self.softcap).tanh_()
        if self.slopes is not None:
            torch.mul(z, z, out=self.slopes[:, columns]).neg_().add_(1.0)
        return z.mul_((self.softcap / self.temperature)[:, None])

    def take_(self, at: Tensor, least: float) -> Tensor:
        """c [R, 2] at two columns of each row, which are left out of the sums from now on."""
        taken = self.z.gather(1, at) - self.largest[:, None]
        # Next to a huge logit, a small difference would be rounded away.
        self.z.scatter_(1, at, (self.largest + 2 * least - self.largest.abs() / 1024)[:, None].expand(at.shape))
        return taken

    def slopes_at(self, columns: Tensor) -> Tensor | float:
        """Those of the soft cap at columns [R, c] of each row."""
        return 1.0 if self.slopes is None else self.slopes.gather(1, columns)


class _Rows(NamedTuple):
    """What is known of the rows after the sweeps; every field is [R]."""

    divergence: Tensor
    s: Tensor  # S_s - 1
    t: Tensor  # S_t - 1
    x: Tensor  # the sum of X
    x_others: Tensor  # the same without the student's most probable token


class _Pair:
    """Two tiles of logits. The most probable token of each is a column of `peaks` [R, 2], outside of the sweeps."""

    def __init__(self, student: _Logits, teacher: _Logits, kind: str, beta: float) -> None:
        self.student, self.teacher, self.kind, self.beta = student, teacher, kind, beta
        self.least = _LEAST[student.z.dtype]
        self.at = torch.stack([student.at, teacher.at], 1)
        self.same = student.at == teacher.at
        self._scratch = dict[int, Tensor]()

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(columns, student, teacher) of a block [R, c], one after the other."""
        for columns in self.student.columns:
            yield columns, self.student.z[:, columns], self.teacher.z[:, columns]

    def scratch(self, number: int, like: Tensor) -> Tensor:
        """Memory of the shape of a block, column-major as the tile."""
        rows, columns = like.shape
        if number not in self._scratch:
            self._scratch[number] = like.new_empty(rows * max(2, self.student.columns[0].stop))
        return self._scratch[number][: rows * columns].view(columns, rows).t()

    def sweep(self) -> _Rows:
        """Leave e_s in the student's tile and X in the teacher's, and those of the peaks in `peaks`."""
        peak_s, peak_t = self.peaks = [x.take_(self.at, self.least) for x in (self.student, self.teacher)]
        for peaks in self.peaks:
            peaks[:, 1].masked_fill_(self.same, 2 * self.least)
        # Of each model, e of the other's peak; its own is 1.
        s, t = (torch.where(self.same, 0.0, c.exp()) for c in (peak_s[:, 1], peak_t[:, 0]))
        of_t = t.clone()
        weighted = self._exponentials_(peak_s, peak_t)[2]
        total = peak_t[:, 1].clone() if self.kind == "reverse_kl" else weighted
        for _, e_s, e_t in self.blocks():
            e_s.sub_(self.student.largest[:, None])
            e_t.sub_(self.teacher.largest[:, None])
            for sums, part in zip((s, t, total), self._exponentials_(e_s, e_t), strict=True):
                sums += part
        difference = (s - t) / (1 + t)
        if self.kind == "jsd":
            return self._mix_(s, t, difference)
        log_rho = torch.log1p(difference)
        if self.kind == "reverse_kl":
            x = total + peak_t[:, 0]
            return _Rows(x / (1 + s) - log_rho, s, t, x, total)
        return _Rows(log_rho + total / (1 + t), s, t, 1 + t, torch.where(self.same, t, 1 + t - of_t))

    def _exponentials_(self, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """c_s and c_t [R, c] become e_s and X (e_t for jsd); (their sums, that of X or of -e_t d, each [R])."""
        if self.kind == "jsd":
            of_s, of_t = (_sums(_exp(c.clamp_min_(self.least), out=c)) for c in (s, t))
            return of_s, of_t, torch.zeros_like(of_s)
        reverse = self.kind == "reverse_kl"
        weights, other = (s, t) if reverse else (t, s)
        d = torch.sub(weights, other, out=self.scratch(0, s))
        of_s, of_t = _sums(_exp(s, out=s)), _sums(_exp(t, out=t))
        x = torch.mul(d, weights, out=t if reverse else d)
        total = _sums(x)
        # 0 * inf is to be 0, not NaN. On a GPU, the question would synchronize.
        if not s.is_cpu or total.isnan().any():
            total = _sums(x.masked_fill_(weights == 0.0, 0.0))
        return of_s, of_t, total

    def _mix_(self, s: Tensor, t: Tensor, difference: Tensor) -> _Rows:
        """The second sweep of jsd: e_t [R, c] becomes X."""
        rho = ((1 + s) / (1 + t))[:, None]
        peak_s, peak_t = self.peaks
        of_peaks = peak_t.mul_(rho) - peak_s
        of_peaks[:, 0] = torch.where(self.same, difference, of_peaks[:, 0])
        _, y = self._logarithms_(peak_s, peak_t, of_peaks)
        x_others = peak_t[:, 1].clone()
        for _, e_s, f in self.blocks():
            f.mul_(rho)
            parts = self._logarithms_(e_s, f, torch.sub(f, e_s, out=self.scratch(0, f)))
            for sums, part in zip((x_others, y), parts, strict=True):
                sums += part
        x = x_others + peak_t[:, 0]
        return _Rows(-((1 - self.beta) * x + self.beta * y) / (1 + s), s, t, x, x_others)

    def _logarithms_(self, e_s: Tensor, f: Tensor, difference: Tensor) -> tuple[Tensor, Tensor]:
        """f [R, c] becomes X; (the sums of X and of Y, both [R])."""
        zero = f.new_zeros(())  # the quotient and its factor in one operation
        of_student = torch.addcdiv(zero, difference, e_s, value=self.beta, out=self.scratch(1, f)).log1p_()
        y = _sums(torch.addcdiv(zero, difference, f, value=self.beta - 1, out=difference).log1p_().mul_(f))
        return _sums(torch.mul(of_student, e_s, out=f)), y

    def write_gradient(self, out: Tensor, rows: _Rows, upstream: Tensor, g: Tensor, targets: Tensor | None) -> Tensor:
        """d loss / d(h.w) into `out` [R, V], the memory of the student's tile, but for g at the targets of some rows.

        Returns which rows [R] have it already.
        """
        x, y = self._coefficients(rows, upstream, g)
        peak_s, peak_t = self.peaks
        at_peaks = (x * peak_t.t() - y * peak_s.t()).t()
        confident, hit = rows.s < 1, self.student.at == (-1 if targets is None else targets)
        of_others = x * rows.x_others - y * rows.s
        at_peaks[:, 0] = torch.where(confident, -of_others - torch.where(hit, 0.0, g), at_peaks[:, 0])
        for columns, e_s, of_x in self.blocks():
            place = e_s if out.dtype == e_s.dtype else self.scratch(0, e_s)
            values = torch.mul(e_s, -y[:, None], out=place).addcmul_(of_x, x[:, None])
            if self.student.slopes is not None:
                values.mul_(self.student.slopes[:, columns])
            if values is not e_s:
                out[:, columns].copy_(values)
        at_peaks = (at_peaks * self.student.slopes_at(self.at)).to(out.dtype)
        for column in (1, 0):  # where both are one, the first is right
            out.scatter_(1, self.at[:, column, None], at_peaks[:, column, None])
        return confident & hit

    def _coefficients(self, rows: _Rows, upstream: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """x and y [R] of the gradient x X - y e_s."""
        p = 1 / (1 + rows.s)
        if self.kind == "forward_kl":
            return -upstream / (1 + rows.t), (g - upstream) * p
        factor = upstream if self.kind == "reverse_kl" else (self.beta - 1) * upstream
        return factor * p, (factor * rows.x * p + g) * p
