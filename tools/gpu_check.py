"""tools/accelerator_check.py, for a GPU, by the name that issues know it by."""

from __future__ import annotations

import sys

from accelerator_check import main

if __name__ == "__main__":
    sys.exit(main())
