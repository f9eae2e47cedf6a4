"""Calls of an environment that wait: for a client that it keeps open, or for long."""

import asyncio
import re
import threading
import time

import pytest
from talkers import ConcurrentTalker, call

from fused_grpo.trainer.episodes import environments


class Door:
    """Opens where somebody knocks; keeps what belongs to an event loop, as a client of HTTP does."""

    def reset(self, **row) -> str:
        self.loop = None
        return "Knock."

    async def knock(self) -> str:
        """Knock."""
        self.loop = asyncio.get_running_loop()
        return "open"

    async def get_reward(self) -> float:
        await asyncio.sleep(0.01)
        return float(self.loop is asyncio.get_running_loop())


def knocks(read: str, member: int) -> str:
    return "I am in." if re.search("<answer>open", read) else call("knock")


def test_coroutines_of_an_environment_share_an_event_loop(make_trainer):
    trainer = make_trainer(knocks, reward=None, rows=None, environment_factory=Door, max_steps=1)
    trainer.train()
    assert [sample.reward for sample in trainer.scored.samples] == [1.0] * 4


def test_a_reset_that_takes_long_is_named(make_trainer, monkeypatch, caplog):
    monkeypatch.setattr(environments, "_LONG", 0.05)

    class Slow(Door):
        def reset(self, **row) -> str:
            time.sleep(0.3)
            return super().reset(**row)

    make_trainer(knocks, reward=None, rows=None, environment_factory=Slow, max_steps=1).train()
    warnings = [record.getMessage() for record in caplog.records if "has not returned" in record.getMessage()]
    assert len(warnings) == 4
    assert warnings[0].startswith("reset() of Slow has not returned for 0.05 s, and the run waits for it; fix: a time")


@pytest.mark.parametrize("stops", [KeyboardInterrupt, ConnectionError])
def test_no_later_episode_has_an_environment_that_is_still_called(make_trainer, stops):
    """The first call waits, the engine stops at the answer to another one."""
    called, released = list[Door](), threading.Event()

    class Gate(Door):
        def knock(self) -> str:
            """Knock."""
            called.append(self)
            if called[0] is self:
                released.wait(60)
            return "open"

    def talk(read: str, member: int) -> str:
        if "<answer>" in read:
            raise stops
        return call("knock")

    trainer = make_trainer(talk, engine=ConcurrentTalker, rows=None, environment_factory=Gate, max_steps=1)
    with pytest.raises(stops):
        trainer.train()
    released.set()
    assert called[0] not in trainer._environment_pool[None]
