"""vLLM servers over HTTP.

server_engine.py    the rollout engine
replicas.py         requests to one or several servers: which URLs are allowed, failures, one deadline
answers.py          the comparison of what routes answer with dataclasses
server_info.py      what a server reports, and whether a trainer can use it: its configuration and its model
weight_transfer.py  weights to servers: through files, or by NCCL
serve.py            the command that starts a server
"""
