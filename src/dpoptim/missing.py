"""Texts that stand for a value which is not there, as files and programs write them."""

# in any case
WORDS = frozenset(
    {"", "na", "n/a", "nan", "null", "none", "?", "<na>", "#n/a", "#na", "n.a.", "nat"}
)


def is_missing(text: str) -> bool:
    """Whether a text says that there is no value."""
    return text.strip().lower() in WORDS
