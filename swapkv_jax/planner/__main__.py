"""`python -m swapkv_jax.planner`: see `command`."""

import sys

from swapkv_jax.planner.command import main

sys.exit(main())
