"""The errors that are particular to private training.

Bad arguments raise ``ValueError`` or ``TypeError`` as everywhere in Python. The classes here are for a promise that
cannot be kept. No message ever contains a value computed from private data: names, shapes and public numbers only.
"""


class PrivacyError(RuntimeError):
    """Going on would break the promise of the plan; the message names the place and the fix."""


class SamplesInteractError(PrivacyError):
    """The gradient of one record depends on other records in the batch, so clipping it bounds nothing."""
