"""SequenceOrder against a model that is a plain list of (name, active), oldest use first."""

from hypothesis import given
from hypothesis import strategies as st

from swapkv_jax.tiers import SequenceOrder

NAMES = st.sampled_from("abcdef")
STEPS = st.lists(st.tuples(st.sampled_from(["activate", "finish", "discard"]), NAMES), max_size=40)


def replay(steps: list[tuple[str, str]]) -> tuple[SequenceOrder, list[tuple[str, bool]]]:
    order, model = SequenceOrder(), []
    for action, name in steps:
        getattr(order, action)(name)
        model = [entry for entry in model if entry[0] != name]
        if action != "discard":
            model.append((name, action == "activate"))
    return order, model


@given(STEPS)
def test_order_is_that_of_last_use(steps):
    order, model = replay(steps)
    assert list(order.active) == [name for name, active in model if active]
    assert list(order.past) == [name for name, active in model if not active]
    assert all((name in order) == any(name == known for known, _ in model) for name in "abcdef")


@given(STEPS, st.dictionaries(NAMES, st.integers(0, 9)), st.integers(1, 30), st.sets(NAMES, max_size=2))
def test_victims_are_the_shortest_oldest_run_of_past_sequences(steps, sizes, needed, keep):
    order, model = replay(steps)
    before = (order.active, order.past)
    freed = 0

    def suffices(sequence: str) -> bool:
        nonlocal freed
        freed += sizes.get(sequence, 0)
        return freed >= needed

    victims = order.victims(suffices, keep)

    candidates = [name for name, active in model if not active and name not in keep]
    runs = [candidates[:count] for count in range(1, len(candidates) + 1)]
    enough = (run for run in runs if sum(sizes.get(name, 0) for name in run) >= needed)
    assert victims == next(enough, None)
    assert (order.active, order.past) == before
