"""What the GRPO loss does: names, defaults and meaning are TRL's. And the checks of types and ranges of any options."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import FrozenInstanceError, dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, dataclass_transform, get_args, get_origin

import torch

from fused_grpo.errors import InputError

Options = TypeVar("Options")
# What is wanted, whether a value is that, and the names of the options.
Ranges = tuple[tuple[str, Callable[[Any], bool], str], ...]
# The largest integer range that fp64 represents exactly, and the largest fp32 number. Larger values would be changed.
EXACT, LARGEST = 2**53, 3.4028234663852886e38


def plain_number(value: Any) -> Any:
    """NumPy's numbers, and those of subclasses, as Python's, in a list, tuple or dict too; other values as they are.

    np.float64 is a subclass of float, and YAML and msgspec refuse it as they do np.float32.
    """
    if type(value) in (bool, int, float):
        return value
    if isinstance(value, Integral):
        return operator.index(value)
    if isinstance(value, float) or (isinstance(value, Real) and hasattr(value, "dtype")):  # and not a Fraction
        return float(value)
    if type(value) in (list, tuple) and any(plain_number(item) is not item for item in value):
        return type(value)(map(plain_number, value))
    if type(value) is dict and any(plain_number(item) is not item for item in value.values()):
        return {name: plain_number(item) for name, item in value.items()}
    return value


def take_plain_numbers(options: Any) -> None:
    """Replace numbers of NumPy in a dataclass of options, frozen or not: JSON, YAML and vLLM take Python's."""
    if torch.compiler.is_compiling():
        return
    for entry in dataclasses.fields(options):
        if (plain := plain_number(value := getattr(options, entry.name))) is not value:
            object.__setattr__(options, entry.name, plain)


def check_option_types(options: Any, *, but: Collection[str] = (), other: Mapping[str, Any] | None = None) -> None:
    """Compare the fields of a dataclass, except those in `but`, with their annotations, or `other` ones by name.

    Raises:
        InputError: the first field of another type. An int is accepted as a float.
    """
    if torch.compiler.is_compiling():
        return  # the compiler cannot trace annotations; ranges are still checked
    cls: Any = type(options)
    for name, kind in {**option_types(cls), **(other or {})}.items():
        value = getattr(options, name)
        if name not in but and not has_type(value, kind):
            raise InputError(f"got {name}={repr(value)[:200]}, want {readable(kind)}{number_fix(value, kind)}")


def number_fix(value: Any, kind: Any) -> str:
    """The fix where numbers are text, or an integer has a fraction of 0: what Python and YAML read as the numbers."""
    try:
        numbers: Any = [_number(item) for item in value] if isinstance(value, list) else _number(value)
    except ValueError:
        return ""
    shown = re.sub(r"(?<![.\d])(\d+)e", r"\1.0e", repr(numbers))
    why = " (YAML takes 1e-6, without a dot, for text)" if shown != repr(numbers) else ""
    return f"; fix: {shown}{why}" if has_type(numbers, kind) else ""


def _number(given: Any) -> Any:
    number = float(given) if isinstance(given, str | float) else given
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(given)  # its spelling is a text again, to YAML
    return int(number) if isinstance(number, float) and number.is_integer() else number


def check_ranges(options: Any, ranges: Ranges) -> None:
    """InputError for the first option out of its range. None is in none: the type of an option says where it may be."""
    for wanted, holds, names in ranges:
        for name in names.split():
            value = getattr(options, name)
            if value is not None and not holds(value):
                cls: Any = type(options)
                or_none = ", or None" if has_type(None, option_types(cls)[name]) else ""
                raise InputError(f"got {name}={value!r}, want {wanted}{or_none}")


def has_type(value: Any, kind: Any) -> bool:
    """Whether the value has the type of an annotation."""
    arguments = get_args(kind)
    match get_origin(kind):
        case None if kind is Any:
            return True
        case None if kind is float:
            largest = EXACT if isinstance(value, int) else LARGEST
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and not largest < abs(value) < math.inf
        case None if kind is int:
            return isinstance(value, int) and -(2**63) <= value < 2**63
        case None:
            return isinstance(value, kind)
        case origin if origin in (Union, UnionType):
            return any(has_type(value, argument) for argument in arguments)
        case origin if origin is Literal:
            return isinstance(value, str) and value in arguments
        case origin if origin is dict:
            return isinstance(value, dict) and all(isinstance(key, str) for key in value)
        case origin:
            return isinstance(value, origin) and all(has_type(item, arguments[0]) for item in value)


def readable(kind: Any) -> str:
    """The annotation in words."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(readable, get_args(kind)))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) is dict:
        return "a mapping"
    return "None" if kind is NoneType else kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def choices(kind: Any) -> list[str | None]:
    """The strings of an annotation, and None if that may be; empty where others may be."""
    parts = (kind, *get_args(kind))
    literals = [text for part in parts if get_origin(part) is Literal for text in get_args(part)]
    return [*literals, None] if literals and NoneType in parts else literals


@functools.cache
def option_types(cls: Any) -> dict[str, Any]:
    """Annotations of the options by name, but for fields that a subclass of a user's adds: those may be anything."""
    base: Any = next((parent for parent in cls.__mro__ if parent.__module__.startswith("fused_grpo.")), cls)
    hints = typing.get_type_hints(base)
    return {field.name: hints[field.name] for field in dataclasses.fields(base)}


LossType = Literal[
    "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo",  # TRL's
    "gmpo", "dppo_tv", "dppo_kl", "ipo", "gpg", "dro",
]  # fmt: skip
Level = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop"]
Rejection = Literal["ratio", "geometric_ratio", "k1", "k2", "k3"]
Centering = Literal["off", "topk", "kept"]
LOSS_TYPES, LEVELS, KL_ESTIMATORS = map(get_args, (LossType, Level, KLEstimator))
TRL_LOSS_TYPES, CLIPPED, CORRECTIONS = LOSS_TYPES[:8], LOSS_TYPES[:5], get_args(Correction)[:4]
# "ipo" is DPPO that masks on both sides.
DPPO = ("dppo_tv", "dppo_kl", "ipo")
# Those that `delta` bounds the ratio of.
BOUNDED = (*CLIPPED, *DPPO)
# Those that take the sampler's log-probs for the old ones, and those without a ratio: -A log p.
OF_SAMPLER, REINFORCE = (*DPPO, "dro"), ("vespo", "gpg", "dro")
ICEPOP = {"sampling_correction": "token_mask", "sampling_clip_min": 0.5, "sampling_clip_max": 5.0}
RANGES: Ranges = (
    ("a share in (0, 1]", lambda share: 0.0 < share <= 1.0, "top_entropy_quantile"),
    ("a share in [0, 1]; 0 selects no token", lambda share: 0.0 <= share <= 1.0, "clip_cov_ratio kl_cov_ratio"),
    (
        "a finite value >= 0",
        lambda value: 0.0 <= value < math.inf,
        "epsilon epsilon_high beta log_ratio_penalty entropy_coef kl_cov_coef sampling_clip_min vespo_k_pos "
        "vespo_k_neg",
    ),
    (
        "a finite value > 0",
        lambda value: 0.0 < value < math.inf,
        "delta sampling_clip_max max_completion_length sapo_temperature_pos sapo_temperature_neg vespo_lambda_pos "
        "vespo_lambda_neg",
    ),
    ("a number", lambda value: value == value, "off_policy_mask_threshold"),
)
BOUNDS = (("clip_cov_lb", "clip_cov_ub"), ("sequence_rejection_min", "sequence_rejection_max"))


@dataclass_transform(kw_only_default=True, frozen_default=True)
def _frozen(cls: type[Options]) -> type[Options]:
    """A dataclass whose `__setattr__` refuses: `frozen=True` does not go with a base whose fields can be assigned."""
    return dataclass(kw_only=True, unsafe_hash=True)(cls)


@dataclass(kw_only=True)
class LossOptions:
    """The options that a loss and a run of the trainer share; `GRPOLossConfig` checks them."""

    loss_type: LossType = "dapo"
    """What a token costs and how tokens are averaged: "grpo" (arXiv:2402.03300), "bnpo", "dr_grpo" (arXiv:2503.20783),
    "dapo" (arXiv:2503.14476), "luspo" (arXiv:2602.05261), "cispo" (arXiv:2506.13585), "sapo" (arXiv:2511.20347),
    "vespo" (arXiv:2602.10693), "gmpo" (arXiv:2507.20673), "dppo_tv" or "dppo_kl" (arXiv:2602.04879), "ipo" (prime-rl),
    "gpg" (arXiv:2504.02546) or "dro" (arXiv:2405.19107). The table is in docs/loss.md."""
    importance_sampling_level: Level = "token"
    """The ratio is taken per "token", or per "sequence": exp of the mean log-ratio (GSPO, arXiv:2507.18071)."""
    epsilon: float = 0.2
    """Lower clip: below a ratio of 1 - epsilon the loss is constant if the advantage is negative. Above 1: never. For
    "gmpo" the bound of the log-ratio is -epsilon; for "dppo_*" and "ipo" the divergence of a falling probability is
    bounded."""
    epsilon_high: float | None = None
    """Upper clip: above a ratio of 1 + epsilon_high the loss is constant if the advantage is positive. None: epsilon.
    For "cispo" the ratio itself is capped at epsilon_high (MiniMax-M1 uses 5.0), for "gmpo" the log-ratio; for "dppo_*"
    and "ipo" the divergence of a rising probability is bounded."""
    delta: float | None = None
    """Upper bound of the ratio in the unclipped branch (two-sided clipping, arXiv:2505.07291; above 1 + epsilon_high
    the c of dual clip, arXiv:1912.09729), and of the ratio of "dppo_*" and "ipo"; other losses have no use for it."""
    sapo_temperature_pos: float = 1.0
    """Temperature of the gate of "sapo" where the advantage is positive."""
    sapo_temperature_neg: float = 1.05
    """Temperature of the gate of "sapo" elsewhere."""
    vespo_k_pos: float = 2.0
    """Power of the sequence weight of "vespo" where the advantage is not negative."""
    vespo_lambda_pos: float = 3.0
    """Decay of the sequence weight of "vespo" where the advantage is not negative."""
    vespo_k_neg: float = 3.0
    """Power of the sequence weight of "vespo" where the advantage is negative."""
    vespo_lambda_neg: float = 2.0
    """Decay of the sequence weight of "vespo" where the advantage is negative."""
    beta: float = 0.0
    """Weight of the KL term against the reference model. 0 needs no reference."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL divergence; with q = log p_ref - log p, "k1" is -q, "k2" q^2 / 2, and "k3" exp(q) - q - 1."""
    use_bias_correction_kl: bool = True
    """Multiply the KL term by the differentiable ratio (DeepSeek-V3.2, arXiv:2512.02556), so that it stays unbiased
    off policy."""
    log_ratio_penalty: float = 0.0
    """Weight of (log p - old log p)^2 / 2, which keeps the policy near the old one, or near the sampler for "dppo_*",
    "ipo" and "dro": the beta of "dro", twice the kl_tau of prime-rl's losses."""
    top_entropy_quantile: float = 1.0
    """Keep the policy term of this share of the tokens of a step, those of highest entropy (arXiv:2506.01939)."""
    clip_cov_ratio: float = 0.0
    """Leave out the policy term of this share of the tokens of a step, among those whose covariance (log p - mean log
    p) * (advantage - mean advantage) is within `clip_cov_lb` and `clip_cov_ub` (Clip-Cov, arXiv:2505.22617, which takes
    0.0002). Excludes `kl_cov_ratio`."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance for Clip-Cov."""
    clip_cov_ub: float = 5.0
    """Upper bound of the covariance for Clip-Cov."""
    kl_cov_ratio: float = 0.0
    """Add kl_cov_coef * |log p - old log p| to this share of the tokens of a step, those of largest covariance (KL-Cov,
    arXiv:2505.22617, which takes 0.0002 to 0.002)."""
    kl_cov_coef: float = 1.0
    """Weight of the term of KL-Cov."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the loss falls by entropy_coef times the mean entropy of the tokens."""
    off_policy_mask_threshold: float | None = None
    """Leave out the policy term of sequences with a negative advantage whose mean (sampling log p - log p), in nats, is
    above this (DeepSeek-V3.2); the old log-probs stand in where there are no sampling log-probs."""
    sequence_rejection: Rejection | None = None
    """Leave out the policy term of sequences that the sampler and the policy disagree on, where there are sampling
    log-probs: by the mean over tokens of rho = exp(old log p - sampling log p) ("ratio"), the exponential of the mean
    log rho ("geometric_ratio"), or the mean KL divergence ("k1" -log rho, "k2" (log rho)^2 / 2, "k3" rho - log rho -
    1)."""
    sequence_rejection_min: float | None = None
    """The least value of that statistic that is kept."""
    sequence_rejection_max: float | None = None
    """The greatest value of that statistic that is kept."""
    score_centering: Centering = "off"
    """Subtract from the policy gradient of each token its mean over the sampler (arXiv:2609.20807), where the sampler's
    log-probs of several tokens are given: of its likeliest tokens ("topk", the rest taken for the policy's own), or of
    all tokens that a truncated sampler kept ("kept")."""


@_frozen
class GRPOLossConfig(LossOptions):  # type: ignore[misc]  # frozen, unlike its base
    """The GRPO loss: the variant, its clipping, and the weight of the KL term against the reference model.

    Raises:
        InputError: a value out of its range, or options that do not go together.
    """

    sampling_correction: Correction | None = "token_truncate"
    """Correction where `sampling_logprobs` are given, with rho = exp(old log p - sampling log p) of a token, or of a
    whole sequence (the sum of its log-ratios): "token_truncate" and "sequence_truncate" multiply the policy term by rho
    clipped to the bounds, "token_mask" and "sequence_mask" by rho, or by 0 outside of the bounds. "icepop" stands for
    "token_mask" with bounds of 0.5 and 5 (arXiv:2510.18855). None: rho is only measured. "dppo_*", "ipo" and "dro"
    take the sampling log-probs for the old ones instead, unless it is None."""
    sampling_clip_max: float | None = 3.0
    """Upper bound of rho."""
    sampling_clip_min: float | None = None
    """Lower bound of rho."""
    max_completion_length: int | None = None
    """"dr_grpo": the constant length that it divides by."""

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        check_option_types(self)
        for name, values in _CHOICES.items():  # again, for a compiler
            if getattr(self, name) not in values:
                raise InputError(f"got {name}={getattr(self, name)!r}, want one of {values}")
        if self.sampling_correction == "icepop":
            self._take_icepop()
        check_ranges(self, RANGES)
        self._check_together()

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__ or name not in self.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    @functools.cached_property
    def ratio_of_sequence(self) -> bool:
        """Whether all tokens of a sequence have the same ratio."""
        return self.importance_sampling_level == "sequence" or self.loss_type == "gmpo"

    @functools.cached_property
    def corrects_sequences(self) -> bool:
        """Whether the sampling correction has one weight for a whole sequence."""
        return (self.sampling_correction or "").startswith("sequence")

    @functools.cached_property
    def selects_by_covariance(self) -> bool:
        """Whether Clip-Cov or KL-Cov is on."""
        return self.clip_cov_ratio > 0 or self.kl_cov_ratio > 0

    @functools.cached_property
    def token_terms(self) -> TokenTerms:
        """What of it decides the loss of one token."""
        return TokenTerms.of(self)

    def _take_icepop(self) -> None:
        if (self.sampling_clip_min, self.sampling_clip_max) != (None, 3.0):
            raise InputError(
                f"got sampling_clip_min={self.sampling_clip_min} and sampling_clip_max={self.sampling_clip_max} with "
                "'icepop', which has bounds of its own; fix: 'token_mask' with these bounds"
            )
        for name, value in ICEPOP.items():
            object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise InputError(
                "got loss_type='dr_grpo' without max_completion_length; fix: pass the constant it divides by"
            )
        if self.loss_type == "dro" and not self.log_ratio_penalty:
            raise InputError(
                "got loss_type='dro' with log_ratio_penalty=0, want the weight of its quadratic term; fix: a weight "
                "above 0, such as 0.05, or loss_type='gpg', which has no such term"
            )
        if self.delta is not None and self.loss_type not in BOUNDED:
            raise InputError(
                f"got delta={self.delta} with loss_type={self.loss_type!r}, which has no unclipped branch to bound; "
                f"fix: delta=None, or one of {BOUNDED}"
            )
        if self.loss_type in ("vespo", *OF_SAMPLER) and self.corrects_sequences:
            why = "weight is of the sequence" if self.loss_type == "vespo" else "ratio is to the sampler"
            raise InputError(
                f"got sampling_correction={self.sampling_correction!r} with loss_type={self.loss_type!r}, whose {why} "
                "already; fix: 'token_truncate' or 'token_mask'"
            )
        if self.loss_type in OF_SAMPLER and self.ratio_of_sequence:
            raise InputError(
                f"got importance_sampling_level='sequence' with loss_type={self.loss_type!r}, whose distance from the "
                "sampler is of a token; fix: 'token'"
            )
        bounds = (self.sequence_rejection_min, self.sequence_rejection_max)
        if (self.sequence_rejection is None) != (bounds == (None, None)):
            raise InputError(
                f"got sequence_rejection={self.sequence_rejection!r} with sequence_rejection_min={bounds[0]} and "
                f"sequence_rejection_max={bounds[1]}, want a statistic and a bound of it; fix: set or leave out both"
            )
        if self.clip_cov_ratio and self.kl_cov_ratio:
            raise InputError(
                f"got clip_cov_ratio={self.clip_cov_ratio} and kl_cov_ratio={self.kl_cov_ratio}, want one of them; "
                "fix: leave one at 0"
            )
        if (self.sampling_clip_min or 0.0) > (math.inf if self.sampling_clip_max is None else self.sampling_clip_max):
            raise InputError(
                f"got sampling_clip_min={self.sampling_clip_min} above {self.sampling_clip_max}, the maximum"
            )
        for low, high in BOUNDS:
            least, most = getattr(self, low), getattr(self, high)
            # Not math.isnan, which breaks the graph of a loss that torch 2.10 compiles.
            low_end, high_end = -math.inf if least is None else least, math.inf if most is None else most
            if not -math.inf <= low_end <= high_end <= math.inf:
                raise InputError(f"got {low}={least} and {high}={most}, want numbers, the first no larger")


# Of each option that has some. A compiler cannot trace annotations.
_CHOICES = {name: allowed for name, kind in option_types(GRPOLossConfig).items() if (allowed := choices(kind))}
DEFAULT_LOSS = GRPOLossConfig()
"""What `config=None` stands for, checked once: the checks take longer than a small loss."""


class TokenTerms(NamedTuple):
    """The part of a config that decides the loss of one token from its own numbers: the input of the row passes."""

    form: str
    """"clipped", "cispo", "sapo", "reinforce", "gmpo", "dppo_tv", "dppo_kl" or "ipo"."""
    epsilon_low: float
    epsilon_high: float
    delta: float | None
    sapo_temperatures: tuple[float, float]
    beta: float
    kl_estimator: str
    bias_correction_kl: bool
    correction: str | None
    """What sampling log-probs are to a token: "truncate" or "mask": its term is times its own rho; "sampler": they are
    the denominator of its ratio, and there is no rho; None: neither, where rho is of a sequence, too."""
    clip_min: float | None
    clip_max: float | None
    log_ratio_penalty: float = 0.0

    @staticmethod
    def of(config: GRPOLossConfig) -> TokenTerms:
        """The terms of a config.

        >>> pairs = ("dapo", "token_mask"), ("dapo", "sequence_mask"), ("vespo", "token_mask"), ("ipo", "token_mask")
        >>> configs = [GRPOLossConfig(loss_type=name, sampling_correction=how) for name, how in pairs]
        >>> [TokenTerms.of(config).correction for config in configs]
        ['mask', None, None, 'sampler']
        """
        forms = dict.fromkeys(CLIPPED, "clipped") | dict.fromkeys(REINFORCE, "reinforce")
        correction = None
        if config.loss_type in OF_SAMPLER and config.sampling_correction is not None:
            correction = "sampler"
        elif config.loss_type != "vespo" and config.sampling_correction in ("token_truncate", "token_mask"):
            correction = config.sampling_correction.removeprefix("token_")
        return TokenTerms(
            form=forms.get(config.loss_type, config.loss_type),
            epsilon_low=config.epsilon,
            epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
            delta=config.delta,
            sapo_temperatures=(config.sapo_temperature_pos, config.sapo_temperature_neg),
            beta=config.beta,
            kl_estimator=config.kl_estimator,
            bias_correction_kl=config.use_bias_correction_kl,
            correction=correction,
            clip_min=config.sampling_clip_min,
            clip_max=config.sampling_clip_max,
            log_ratio_penalty=config.log_ratio_penalty,
        )
