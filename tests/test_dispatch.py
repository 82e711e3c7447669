"""The dispatcher: what is tried next, and what failures mean."""

from __future__ import annotations

import random

from jobs.dispatch import Dispatcher, Work


def drain(dispatcher: Dispatcher, killers: dict[int, set[int]], rows: int, budget: int = 10_000) -> int:
    """Play workers that die on any work that touches a killer row; returns how many deaths there were."""
    deaths = 0
    for _ in range(budget):
        work = dispatcher.next_work()
        if work is None:
            assert dispatcher.finished
            return deaths
        start, stop = work.probe or (0, rows)
        touched = killers.get(work.shard, set()) & set(range(start, stop)) - set(work.poison_rows)
        if touched:
            deaths += 1
            dispatcher.worker_died(work, "killed")
        else:
            dispatcher.succeeded(work)
    raise AssertionError("the dispatcher did not come to an end")


def work_of(dispatcher: Dispatcher) -> Work:
    work = dispatcher.next_work()
    assert work is not None
    return work


def test_every_shard_is_handed_out_once_when_nothing_fails() -> None:
    dispatcher = Dispatcher([(i, 10) for i in range(50)], max_attempts=3)
    seen = []
    while (work := dispatcher.next_work()) is not None:
        seen.append(work.shard)
        dispatcher.succeeded(work)
    assert seen == list(range(50))
    assert dispatcher.finished
    assert dispatcher.done == set(range(50))


def test_a_shard_fails_after_exactly_max_attempts_errors_and_others_go_on() -> None:
    dispatcher = Dispatcher([(0, 10), (1, 10)], max_attempts=3)
    tries = 0
    while (work := dispatcher.next_work()) is not None:
        if work.shard == 0:
            tries += 1
            dispatcher.errored(work, "broken", "mend it")
        else:
            dispatcher.succeeded(work)
    assert tries == 3
    assert dispatcher.failed[0].error == "broken"
    assert dispatcher.failed[0].hint == "mend it"
    assert dispatcher.done == {1}


def test_attempt_numbers_of_a_shard_never_repeat() -> None:
    dispatcher = Dispatcher([(0, 10)], max_attempts=5)
    attempts = []
    while (work := dispatcher.next_work()) is not None:
        attempts.append(work.attempt)
        dispatcher.errored(work, "again")
    assert attempts == [1, 2, 3, 4, 5]


def test_one_death_of_a_worker_is_retried_whole_without_probing() -> None:
    dispatcher = Dispatcher([(0, 100)], max_attempts=1)
    dispatcher.worker_died(work_of(dispatcher), "killed")
    again = work_of(dispatcher)
    assert again.probe is None
    dispatcher.succeeded(again)
    assert dispatcher.done == {0}


def test_a_row_that_kills_workers_is_isolated_and_the_shard_is_done_without_it() -> None:
    for row in (0, 1, 499, 777, 999):
        dispatcher = Dispatcher([(0, 1000)], max_attempts=3)
        poison: tuple[int, ...] = ()
        for _ in range(1000):
            work = dispatcher.next_work()
            if work is None:
                break
            start, stop = work.probe or (0, 1000)
            if start <= row < stop and row not in work.poison_rows:
                dispatcher.worker_died(work, "killed")
            else:
                poison = work.poison_rows if work.probe is None else poison
                dispatcher.succeeded(work)
        assert dispatcher.done == {0}
        assert poison == (row,)


def test_several_killer_rows_in_several_shards_are_all_isolated() -> None:
    rng = random.Random(5)
    killers = {shard: set(rng.sample(range(300), 1 + shard % 4)) for shard in range(6)}
    dispatcher = Dispatcher([(shard, 300) for shard in range(8)], max_attempts=3)
    deaths = drain(dispatcher, killers, 300)
    assert dispatcher.done == set(range(8))
    assert not dispatcher.failed
    assert deaths < 250


def test_a_shard_with_too_many_killer_rows_fails_instead_of_killing_for_ever() -> None:
    dispatcher = Dispatcher([(0, 4000), (1, 10)], max_attempts=3)
    drain(dispatcher, {0: set(range(0, 4000, 7))}, 4000)
    assert set(dispatcher.failed) == {0}
    assert dispatcher.done == {1}


def test_deaths_of_whole_nodes_are_never_held_against_the_rows() -> None:
    dispatcher = Dispatcher([(0, 10)], max_attempts=1)
    for _ in range(20):
        work = work_of(dispatcher)
        assert work.probe is None
        dispatcher.worker_died(work, "node gone", blameless=True)
    dispatcher.succeeded(work_of(dispatcher))
    assert dispatcher.done == {0}


def test_a_shard_that_kills_only_as_a_whole_fails_after_max_attempts() -> None:
    dispatcher = Dispatcher([(0, 8)], max_attempts=2)
    for _ in range(100):
        work = dispatcher.next_work()
        if work is None:
            break
        if work.probe is None:
            dispatcher.worker_died(work, "out of memory")
        else:
            dispatcher.succeeded(work)
    assert dispatcher.finished
    assert dispatcher.failed[0].error == "out of memory"
