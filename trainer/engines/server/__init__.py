"""vLLM servers over HTTP.

server_engine.py    the rollout engine
replicas.py         requests to one or several servers: which URLs are allowed, failures, one deadline
answers.py          what routes answer, as dataclasses, and the check of an answer against them
server_info.py      the configuration that a server reports, and whether a trainer can use it
served_model.py     whether a server has the model that is trained
weight_transfer.py  weights to servers through files, or by NCCL (nccl_transfer.py)
serve.py            the command that starts a server
"""
