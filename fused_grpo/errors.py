"""Every error that fused-grpo raises on purpose. Each is also the standard exception that a caller would expect.

    FusedGRPOError
    +-- InputError(ValueError)              an argument that cannot be right: shape, dtype, device, range
    |   +-- WrongTypeError(TypeError)       an argument of another type than the one that is wanted
    +-- UnsupportedError(NotImplementedError)   a known option that this version does not offer
    +-- UnavailableError(RuntimeError)      an implementation or engine that cannot run on this machine
    +-- DataError(ValueError)               a dataset or a column that cannot be used
    +-- RewardError(RuntimeError)           a reward function that raised or returned something unusable
    +-- WeightSyncError(RuntimeError)       the rollout engine does not serve the trainer's weights
    +-- CheckpointError(RuntimeError)       an output directory or checkpoint that cannot be used
    +-- NonFiniteError(ArithmeticError)     a loss or gradient that is NaN or infinite; nothing was updated
    +-- PeerError(RuntimeError)             another rank of the run failed, and this rank stopped with it

Messages have three parts: what was got, what is wanted, and how to fix it.
"""

from __future__ import annotations


class FusedGRPOError(Exception):
    """Base of all errors of this package."""


class InputError(FusedGRPOError, ValueError):
    """An argument that cannot be right: shape, dtype, device or range."""


class WrongTypeError(InputError, TypeError):
    """An argument of another type than the one that is wanted."""


class UnsupportedError(FusedGRPOError, NotImplementedError):
    """A known option that this version does not offer."""


class UnavailableError(FusedGRPOError, RuntimeError):
    """An implementation or engine that cannot run on this machine."""


class DataError(FusedGRPOError, ValueError):
    """A dataset or a column that cannot be used."""


class DatasetTypeError(DataError, TypeError):
    """Something else than a dataset."""


class RewardError(FusedGRPOError, RuntimeError):
    """A reward function that raised or returned something unusable."""


class RewardValueError(RewardError, ValueError):
    """A reward function that returned something unusable."""


class WeightSyncError(FusedGRPOError, RuntimeError):
    """The rollout engine does not serve the trainer's weights."""


class CheckpointError(FusedGRPOError, RuntimeError):
    """An output directory or checkpoint that cannot be used."""


class NonFiniteError(FusedGRPOError, ArithmeticError):
    """A loss or gradient that is NaN or infinite. Parameters were not updated."""


class PeerError(FusedGRPOError, RuntimeError):
    """Another rank of the run failed, and this rank stopped with it."""
