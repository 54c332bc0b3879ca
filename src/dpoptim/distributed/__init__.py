"""Several processes that train one model together, under ``torch.distributed``: see
docs/guides/many-processes.md.
"""
