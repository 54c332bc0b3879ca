"""Text from elsewhere (labels, file names), made safe for terminals and pages."""

import unicodedata

# Control characters, surrogates, and format characters: a terminal obeys the first, and the last
# can reverse or hide what is read. Line and paragraph separators break a line where none was
# meant.
_UNSAFE = frozenset({"Cc", "Cs", "Cf", "Zl", "Zp"})


def printable(text: str) -> str:
    r"""The text with everything that is obeyed rather than shown replaced by its ``\x1b`` form.

    What is left shows the same in a terminal, a log and a page, on one line.
    """
    return "".join(
        _escaped(sign) if unicodedata.category(sign) in _UNSAFE else sign for sign in text
    )


def storable(text: str) -> str:
    """The text with what UTF-8 cannot hold (as file names may) escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _escaped(sign: str) -> str:
    return sign.encode("unicode_escape").decode("ascii")
