"""What vLLM's routes answer, as dataclasses, and the check of an answer against them.

The answer may come from another program, another version or a broken server. `parsed` compares all of it with the types
of a dataclass, so that the code behind it needs no guards. Fields that no dataclass has are left out. Values and lengths
of completions are checked with those of all engines, in checked_engine.py.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Model:
    id: str
    max_model_len: int


@dataclass(frozen=True)
class Models:
    data: list[Model]


@dataclass(frozen=True)
class ModelConfig:
    logprobs_mode: str
    dtype: str | None = None
    max_logprobs: int = 0  # how many most likely tokens it lists; -1: all


@dataclass(frozen=True)
class DeviceConfig:
    device: str | None


@dataclass(frozen=True)
class TransferConfig:
    backend: str


@dataclass(frozen=True)
class VLLMConfig:
    model_config: ModelConfig
    device_config: DeviceConfig
    weight_transfer_config: TransferConfig | None = None


@dataclass(frozen=True)
class ServerConfig:
    vllm_config: VLLMConfig


@dataclass(frozen=True)
class Version:
    version: str


@dataclass(frozen=True)
class WeightInfo:
    weight_version: str | None


@dataclass(frozen=True)
class Checksums:
    checksums: dict[str, str]


@dataclass(frozen=True)
class WorldSize:
    world_size: int


@dataclass(frozen=True)
class CacheReset:
    success: bool = True


@dataclass(frozen=True)
class Inspection:
    results: list[str]  # of each worker


@dataclass(frozen=True)
class Logprobs:
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None = None


@dataclass(frozen=True)
class Choice:
    index: int
    token_ids: list[int]
    logprobs: Logprobs
    finish_reason: str


@dataclass(frozen=True)
class Completions:
    choices: list[Choice]


def parsed(kind: Any, value: Any, at: str = "it") -> Any:
    """JSON as `kind`: a dataclass, a list, a dict, a plain type, or one of these or None.

    Raises:
        ValueError: says where it is something else.
    """
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer is UnionType:
        optional, *_ = (option for option in inner if option is not NoneType)
        return None if value is None else parsed(optional, value, at)
    if outer is float and type(value) is int and abs(value) < 1e300:
        return float(value)
    if type(value) is not (dict if is_dataclass(outer) else outer):
        raise ValueError(f"{at} is {type(value).__name__}, want {getattr(outer, '__name__', outer)}")
    if outer is str:
        value.encode()  # a lone surrogate can be sent to no server and written to no file
    if is_dataclass(outer):
        if missing := _required(kind) - value.keys():
            raise ValueError(f"{at} is without {min(missing)}")
        hints = _hints(kind)
        return outer(**{name: parsed(hints[name], value[name], f"{at}.{name}") for name in hints.keys() & value.keys()})
    # All at once where it can be: item by item takes half a second for a million.
    if outer is list and (inner[0] is str or set(map(type, value)) != {inner[0]}):
        return [parsed(inner[0], item, f"{at}[{index}]") for index, item in enumerate(value)]
    if outer is dict and (inner[1] is str or set(map(type, value.values())) != {inner[1]}):
        return {name: parsed(inner[1], item, f"{at}[{name[:20]!r}]") for name, item in value.items()}
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _required(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind) if field.default is MISSING)
