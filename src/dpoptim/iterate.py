"""Names of what a run may end with."""

from typing import Literal

# a mean of the last iterates, the last one, or one by chance among those that steps left
Iterate = Literal["average", "last", "random"]
