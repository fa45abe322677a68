"""`python -m swapkv_jax.planner`: see `command`."""

from swapkv_jax.interrupts import run_command
from swapkv_jax.planner.command import main

run_command("python -m swapkv_jax.planner", main)
