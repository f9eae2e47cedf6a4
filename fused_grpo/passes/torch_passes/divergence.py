"""The divergence of two softmaxes and its gradient, in plain torch: the pass of `fused_grpo.kernels.divergence`.

Both tiles are visited in blocks of columns that fit the caches, as in `row_passes.py`. With c = z - max z of a row's
logits, e = e^c, S the sum of e over the row (s of the student, t of the teacher), d = c_s - c_t and rho = S_s / S_t,

    reverse_kl   KL(p | q) = X / S_s - log rho               X_v = e_s d
    forward_kl   KL(q | p) = log rho - sum e_t d / S_t       X_v = e_t
    jsd          -((1 - beta) X + beta Y) / S_s              X_v = e_s log1p(beta (f - e_s) / e_s)
                                                             Y_v = f log1p((beta - 1) (f - e_s) / f)     f = rho e_t

and for every kind d divergence / d z_v is a combination x X_v - y e_s,v with numbers x and y of the row. So the first
sweep leaves e_s and X in the two tiles (`jsd` needs a second one, since rho is known after the first), and the last
sweep is one fused product. KL takes two exponentials for each column, `jsd` two exponentials and two logarithms.

The largest logit of a row takes no part in the sums: S - 1 is a sum of its own, log rho is log1p((s - t) / S_t) with
the two sums of the others (near -1, of a student far surer than its teacher, that has lost digits: the logarithm of S_s
/ S_t), and where the student's most probable token has more than half of the probability, its gradient is minus the sum
of the others', which a difference of two probabilities near 1 would lose. Where both models have the same logits, every
difference is 0 exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths.distributions import LogitTransform
from fused_grpo._maths.statistics import RowState, Statistics, finish_rows
from fused_grpo.passes import buffers
from fused_grpo.passes.torch_passes.tile import block_sums, empty_tile, exp, is_plain, narrow_memory, scratch

# For jsd, e^c is not smaller: it is not 0, and no quotient is out of range. Twice as far down it is 0.
_LEAST = {torch.float32: -60.0, torch.float64: -600.0}
_SEARCHED = 128


def divergence_gradient_(
    student: Tensor,
    teacher: Tensor,
    *,
    kind: str,
    beta: float,
    upstream: Tensor | None,
    student_head: LogitTransform,
    teacher_head: LogitTransform,
    targets: Tensor | None = None,
    grad_logprobs: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(the divergence [R], d loss / d(h.w) of the student [R, V] in `dtype` over its tile); both tiles are overwritten.

    The tiles are whole rows of raw h.w; each head is bias [V] or None, temperature [R], logit_scale and softcap.
    `upstream` [R] is d loss / d divergence; None is no gradient. If `targets` [R] and `grad_logprobs` [R] are given,
    the gradient is that of the sum over rows of upstream * divergence + grad_logprobs * log p of the target.
    """
    pair = Divergence(
        student,
        teacher,
        kind=kind,
        beta=beta,
        student_head=student_head,
        teacher_head=teacher_head,
        targets=targets,
        differentiated=upstream is not None,
    )
    gradient = None if upstream is None else pair.gradient_(upstream, grad_logprobs, dtype=dtype)
    return pair.divergence, gradient


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
        self.is_plain = is_plain(bias, temperature, logit_scale, softcap)
        # Those of the soft cap [R, V]: after the sweeps, nothing has the logits any more.
        self.slopes = empty_tile(*raw.shape, dtype=raw.dtype, device=raw.device) if slopes and softcap else None
        width, _ = scratch(raw, 0)
        self.columns = list(buffers.chunks(raw.shape[1], width))
        largest = _largest_of_blocks(self._transformed_(columns) for columns in self.columns)
        peaks = _columns_of_largest(raw, largest)
        self.largest, self.at = raw.gather(1, peaks)[:, 0], peaks[:, 0]

    def _transformed_(self, columns: slice) -> Tensor:
        z = self.z[:, columns]
        if self.is_plain:
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


def _largest_of_blocks(blocks: Iterator[Tensor]) -> Tensor:
    """The elementwise maximum [R, c] of blocks of columns, of which the last may be narrower."""
    largest = next(blocks).clone()
    for block in blocks:
        torch.maximum(largest[:, : block.shape[1]], block, out=largest[:, : block.shape[1]])
    return largest


def _columns_of_largest(z: Tensor, largest: Tensor) -> Tensor:
    """The columns [R, 1] of the largest logits of z [R, V], from the elementwise maximum of its blocks [R, c].

    A search along a row, whose columns are far apart in memory, takes up to fifty times as long for each number as an
    elementwise maximum. So there is one among a few columns only.
    """
    width = largest.shape[1]
    if width <= _SEARCHED:
        at = largest.argmax(1, keepdim=True)
    else:
        at = _columns_of_largest(largest, _largest_of_blocks(iter(largest.split(_SEARCHED, 1))))
    candidates = (at + torch.arange(0, z.shape[1], width, device=z.device)).clamp_max(z.shape[1] - 1)
    return candidates.gather(1, z.gather(1, candidates).argmax(1, keepdim=True))


class _Rows(NamedTuple):
    """What is known of the rows after the sweeps; every field is [R]."""

    divergence: Tensor
    s: Tensor  # S_s - 1
    t: Tensor  # S_t - 1
    x: Tensor  # the sum of X
    x_others: Tensor  # the same without the student's most probable token


class Divergence:
    """The divergence [R] of two tiles, in which it leaves e_s and X, from which `gradient_` makes the gradient.

    The tiles and heads are those of `divergence_gradient_`. The most probable token of each model is a column of
    `peaks` [R, 2], outside of the sweeps. With `targets` [R], `statistics` has their log-probs, and with `entropy` the
    student's entropies, at the cost of one more exponential for each column.
    """

    def __init__(
        self,
        student: Tensor,
        teacher: Tensor,
        *,
        kind: str,
        beta: float,
        student_head: LogitTransform,
        teacher_head: LogitTransform,
        targets: Tensor | None = None,
        entropy: bool = False,
        differentiated: bool = True,
    ) -> None:
        self.student = _Logits(student, slopes=differentiated, **student_head)
        self.teacher = _Logits(teacher, **teacher_head)
        self.kind, self.beta, self.targets, self.entropy = kind, beta, targets, entropy
        self.least = _LEAST[student.dtype]
        self.at = torch.stack([self.student.at, self.teacher.at], 1)
        self.same_peak = self.student.at == self.teacher.at
        _, self.scratch = scratch(student, 2 if entropy or kind == "jsd" else 1)
        self._target_logit = None if targets is None else student.gather(1, targets[:, None])[:, 0]
        self._weighted = torch.zeros_like(self.student.largest)  # the sum of e_s c_s
        self.rows = self.sweep()
        self.divergence = self.rows.divergence.clamp_min(0.0)

    def statistics(self) -> Statistics:
        """The student's log-probs of the targets and, where requested, its entropies."""
        assert self.targets is not None
        assert self._target_logit is not None
        c, s = self._target_logit - self.student.largest, self.rows.s
        e = c.exp()
        total = torch.where(self.student.at == self.targets, s, 1 + s - e)
        weighted = self._weighted - e * c.clamp_min(-128.0)
        state = RowState(self.student.largest, total, weighted, self._target_logit)
        return finish_rows([state], entropy=self.entropy)

    def gradient_(
        self, upstream: Tensor, grad_logprobs: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """d loss / d(h.w) of the student [R, V] over its tile, from d loss / d divergence and d loss / d log p, [R]."""
        z = self.student.z
        out = z if dtype is None or dtype == z.dtype else narrow_memory(z, dtype)
        slope = self.student.scale / self.student.temperature
        g = torch.zeros_like(upstream) if grad_logprobs is None else grad_logprobs * slope
        hit = self._write(out, upstream * slope, g)
        if self.targets is not None:
            column = self.targets[:, None]
            at_target = torch.where(hit, 0.0, g)[:, None] * self.student.slopes_at(column)
            out.scatter_add_(1, column, at_target.to(out.dtype))
        return out

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(columns, student, teacher) of a block [R, c], one after the other."""
        for columns in self.student.columns:
            yield columns, self.student.z[:, columns], self.teacher.z[:, columns]

    def sweep(self) -> _Rows:
        """Leave e_s in the student's tile and X in the teacher's, and those of the peaks in `peaks`."""
        peak_s, peak_t = self.peaks = [x.take_(self.at, self.least) for x in (self.student, self.teacher)]
        for peaks in self.peaks:
            peaks[:, 1].masked_fill_(self.same_peak, 2 * self.least)
        # Of each model, e of the other's peak; its own is 1.
        s, t = (torch.where(self.same_peak, 0.0, c.exp()) for c in (peak_s[:, 1], peak_t[:, 0]))
        t_sums = t.clone()
        self._add_entropy(peak_s)
        weighted = self._exponentials_(peak_s, peak_t)[2]
        total = peak_t[:, 1].clone() if self.kind == "reverse_kl" else weighted
        for _, e_s, e_t in self.blocks():
            e_s.sub_(self.student.largest[:, None])
            e_t.sub_(self.teacher.largest[:, None])
            self._add_entropy(e_s)
            for sums, part in zip((s, t, total), self._exponentials_(e_s, e_t), strict=True):
                sums += part
        difference = (s - t) / (1 + t)
        if self.kind == "jsd":
            return self._mix_(s, t, difference)
        log_rho = torch.where(difference < -0.5, torch.log((1 + s) / (1 + t)), torch.log1p(difference))
        if self.kind == "reverse_kl":
            x = total + peak_t[:, 0]
            return _Rows(x / (1 + s) - log_rho, s, t, x, total)
        return _Rows(log_rho + total / (1 + t), s, t, 1 + t, torch.where(self.same_peak, t, 1 + t - t_sums))

    def _add_entropy(self, c: Tensor) -> None:
        """Add e c of some columns [R, c] of the student. Below -128 e is 0 or almost 0: this only avoids 0 * -inf."""
        if self.entropy:
            clamped, e = (memory[:, : c.shape[1]] for memory in self.scratch)
            self._weighted += block_sums(exp(c, out=e).mul_(torch.clamp_min(c, -128.0, out=clamped)))

    def _exponentials_(self, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """c_s and c_t [R, c] become e_s and X (e_t for jsd); (their sums, that of X or of -e_t d, each [R])."""
        if self.kind == "jsd":
            s_sums, t_sums = (block_sums(exp(c.clamp_min_(self.least), out=c)) for c in (s, t))
            return s_sums, t_sums, torch.zeros_like(s_sums)
        reverse = self.kind == "reverse_kl"
        weights, other = (s, t) if reverse else (t, s)
        d = torch.sub(weights, other, out=self.scratch[0][:, : s.shape[1]])
        s_sums, t_sums = block_sums(exp(s, out=s)), block_sums(exp(t, out=t))
        x = torch.mul(d, weights, out=t if reverse else d)
        total = block_sums(x)
        # 0 * inf is to be 0, not NaN. On a GPU, the question would synchronize.
        if not s.is_cpu or total.isnan().any():
            total = block_sums(x.masked_fill_(weights == 0.0, 0.0))
        return s_sums, t_sums, total

    def _mix_(self, s: Tensor, t: Tensor, difference: Tensor) -> _Rows:
        """The second sweep of jsd: e_t [R, c] becomes X."""
        rho = ((1 + s) / (1 + t))[:, None]
        peak_s, peak_t = self.peaks
        peak_difference = peak_t.mul_(rho) - peak_s
        peak_difference[:, 0] = torch.where(self.same_peak, difference, peak_difference[:, 0])
        _, y = self._logarithms_(peak_s, peak_t, peak_difference)
        x_others = peak_t[:, 1].clone()
        for _, e_s, f in self.blocks():
            f.mul_(rho)
            parts = self._logarithms_(e_s, f, torch.sub(f, e_s, out=self.scratch[0][:, : f.shape[1]]))
            for sums, part in zip((x_others, y), parts, strict=True):
                sums += part
        x = x_others + peak_t[:, 0]
        return _Rows(-((1 - self.beta) * x + self.beta * y) / (1 + s), s, t, x, x_others)

    def _logarithms_(self, e_s: Tensor, f: Tensor, difference: Tensor) -> tuple[Tensor, Tensor]:
        """f [R, c] becomes X; (the sums of X and of Y, both [R])."""
        zero = f.new_zeros(())  # the quotient and its factor in one operation
        memory = self.scratch[1][:, : f.shape[1]]
        log_student = torch.addcdiv(zero, difference, e_s, value=self.beta, out=memory).log1p_()
        y = block_sums(torch.addcdiv(zero, difference, f, value=self.beta - 1, out=difference).log1p_().mul_(f))
        return block_sums(torch.mul(log_student, e_s, out=f)), y

    def _write(self, out: Tensor, upstream: Tensor, g: Tensor) -> Tensor:
        """d loss / d(h.w) into `out` [R, V], the memory of the student's tile, but for g at the targets of some rows.

        Returns which rows [R] have it already.
        """
        rows, (x, y) = self.rows, self._coefficients(upstream, g)
        peak_s, peak_t = self.peaks
        at_peaks = (x * peak_t.t() - y * peak_s.t()).t()
        confident, hit = rows.s < 1, self.student.at == (-1 if self.targets is None else self.targets)
        others_sum = x * rows.x_others - y * rows.s
        at_peaks[:, 0] = torch.where(confident, -others_sum - torch.where(hit, 0.0, g), at_peaks[:, 0])
        for columns, e_s, x_block in self.blocks():
            buffer = e_s if out.dtype == e_s.dtype else self.scratch[0][:, : e_s.shape[1]]
            values = torch.mul(e_s, -y[:, None], out=buffer).addcmul_(x_block, x[:, None])
            if self.student.slopes is not None:
                values.mul_(self.student.slopes[:, columns])
            if values is not e_s:
                out[:, columns].copy_(values)
        at_peaks = (at_peaks * self.student.slopes_at(self.at)).to(out.dtype)
        for column in (1, 0):  # where both are one, the first is right
            out.scatter_(1, self.at[:, column, None], at_peaks[:, column, None])
        return confident & hit

    def _coefficients(self, upstream: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """x and y [R] of the gradient x X - y e_s."""
        rows = self.rows
        p = 1 / (1 + rows.s)
        if self.kind == "forward_kl":
            return -upstream / (1 + rows.t), (g - upstream) * p
        factor = upstream if self.kind == "reverse_kl" else (self.beta - 1) * upstream
        return factor * p, (factor * rows.x * p + g) * p
