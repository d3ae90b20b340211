"""The engine: requests become sequences, which share steps until their generations are done."""

import os

# Results of large prompt steps are new memory each: in huge pages a step has a tenth of the page
# faults. torch reads this once, at its first allocation; later, or where users set it, nothing
# changes.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # noqa: TID251 - for torch, not a setting
