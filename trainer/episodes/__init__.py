"""Episodes: completions of several turns, in which the model calls tools and reads their answers.

play.py             plays the episodes of a batch on a rollout engine, each at its own pace
conversation.py     what the chat template makes of messages: the ids of a turn of tools, the calls in a reply
calls.py            calls in the forms of the families
tools.py            the functions that a model may call
isolated_tools.py   tools in processes that can be killed
environments.py     objects whose methods are the tools of one episode, and which may score it
"""

from fused_grpo.trainer.episodes.isolated_tools import isolated_tool

__all__ = ["isolated_tool"]
