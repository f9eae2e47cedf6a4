"""Episodes: completions of several turns, in which the model calls tools and reads their answers.

play.py           plays the episodes of a batch on a rollout engine, each at its own pace
sessions.py       how an engine samples turns that come one after the other
conversation.py   what the chat template makes of messages: the ids of a turn of tools, the calls in a reply
tools.py          the functions that a model may call
environments.py   objects whose methods are the tools of one episode, and which may score it
"""
