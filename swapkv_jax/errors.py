"""The errors a user can meet. Each message names what was wrong and what would work."""


class SwapKVError(Exception):
    """Base of every error this package raises on purpose; `exit_code` is what the CLI returns."""

    exit_code = 1


class UsageError(SwapKVError):
    """A flag, prompt, plan or budget that cannot work as given."""

    exit_code = 2


class PlanError(UsageError):
    """A plan that contradicts itself, the model's geometry, or a memory budget."""


class ModelError(SwapKVError):
    """A model that is missing, unreadable, damaged, or of a kind that is not supported."""


class TierError(SwapKVError):
    """A tier (DRAM pool or disk store) that cannot hold, write or faithfully return KV."""
