"""vLLM servers over HTTP.

server_engine.py    the rollout engine
replicas.py         requests to one or several servers: retries, failover, one deadline
answers.py          what routes answer, as dataclasses, and the check of an answer against them
urls.py             the check of server URLs: this machine only, unless the user allows others
server_info.py      the configuration that a server reports, and whether a trainer can use it
served_model.py     whether a server has the model that is trained
weight_transfer.py  weights to servers through files, or by NCCL (nccl_transfer.py)
serve.py            the command that starts a server
"""
