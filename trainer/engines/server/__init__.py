"""vLLM servers over HTTP.

engine.py           the engine: replicas.py asks them, urls.py and facts.py say which they are
choose_transfer.py  which way the weights go: weight_transfer.py through files, nccl_transfer.py by NCCL
serve.py            how to start such a server
"""
