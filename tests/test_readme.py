"""The README's Python runs as printed."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_python_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert len(blocks) == 1
    printed: list[str] = []
    exec(compile(blocks[0], str(README), "exec"), {"print": lambda value: printed.append(str(value))})
    assert printed == ["epsilon=2.00 at delta=1e-05 (add-or-remove-one, PLD)"]
