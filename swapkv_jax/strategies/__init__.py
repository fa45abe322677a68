"""How policy `group` knows which groups matter: our own way, and those of the literature, over the same tiers.

A strategy says what the summary holds, how a place of it is scored, and what must be calibrated beforehand; `sizes`
says so in bytes without JAX, `base` is what all of them provide, `named` finds the one that a plan names.
"""
