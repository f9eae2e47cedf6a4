"""Games of TextArena for one player: the tool `act` makes a move."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError, shown
from fused_grpo.trainer.common.packages import installed


def textarena_environment(game: str, **options: Any) -> type[Any]:
    """A class for `environment_factory`: `reset` begins a game with the seed of the group; the reward is the game's.

    Args:
        game: the id of a game for one player, such as "Wordle-v0".
        options: of this game, such as num_guesses=8.

    Raises:
        InputError: no such game, or an option that it does not have.
        UnavailableError: textarena is not installed, or the game cannot load its data.
        UnsupportedError: a game for several players.
    """
    arena = installed("textarena", extra="textarena")
    try:
        template = arena.make(game, **options)
    except Exception as error:
        raise (InputError if isinstance(error, TypeError | ValueError) else UnavailableError)(
            f"got {game!r} with the options {options}, of which TextArena makes no game ({shown(error, 500)}), want "
            "one of textarena.pprint_registry_detailed(); fix: the id or an option; games of words read NLTK's `words` "
            "and `averaged_perceptron_tagger_eng`, in a folder that NLTK_DATA names"
        ) from error
    with suppress(Exception):  # games for several players refuse to begin with one
        template.reset(num_players=1)
    if not isinstance(getattr(template, "state", None), arena.SinglePlayerState):
        raise UnsupportedError(f"got {game!r}, a game for several players, want one for a single player; fix: the id")
    dictionary = getattr(template, "dictionary", None)  # some 500,000 words, which no game changes: not copied

    class Game:
        def __init__(self) -> None:
            self._game, self.done = copy.deepcopy(template, {id(dictionary): dictionary}), False

        def reset(self, seed: int, **row: Any) -> str:
            self._game.reset(num_players=1, seed=seed)
            _unswap(self._game.state)
            self.done = False
            return self._news()

        def act(self, action: str) -> str:
            """Make a move in the game.

            Args:
                action: The move, in the form that the rules of the game ask for.
            """
            if self.done:
                raise ValueError("the game is over")
            self.done = bool(self._game.step(action)[0])
            return self._news()

        def get_reward(self) -> float:
            return float((self._game.state.rewards or {}).get(0, 0.0))

        def _news(self) -> str:
            # Of the state: the game's wrappers say everything again after each move.
            state, own = self._game.state, arena.ObservationType.PLAYER_ACTION
            said = [text for _, text, kind in state.get_current_player_observation() if kind is not own]
            # Some games swap the fields of the player's own action, so that its text is a number.
            news = [text for text in said if isinstance(text, str)]
            return "\n".join([*news, str(state.game_info[0].get("reason") or "")] if self.done else news)

    Game.__name__ = game  # the reward's column
    return Game


def _unswap(state: Any) -> None:
    """Some games swap the arguments of an invalid move that ends them, so that their reward is a text."""
    invalid = state.set_invalid_move

    def set_invalid_move(reason: Any = None, reward: Any = -1.0) -> None:
        invalid(*((reward, reason) if isinstance(reward, str) else (reason, reward)))

    state.set_invalid_move = set_invalid_move
