"""Several processes that train one model together, under ``torch.distributed``.

See docs/guides/many-processes.md.
"""
