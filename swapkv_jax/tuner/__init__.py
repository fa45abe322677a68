"""The offline tuner of policy `group` (KVSwap, arXiv 2511.11907): from a model, the largest batch and context, a
memory budget, a disk and a bound on what may be lost, to a plan.

`replay` measures what choices lose and read, on a captured prefill; `timing` what their graphs take; `step_time` puts
them together with a disk's curve; `search` walks from choice to choice; `tune` runs it all and keeps every table.
"""
