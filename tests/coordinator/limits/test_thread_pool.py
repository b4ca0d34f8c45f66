"""What one owner asks for keeps no other from its turn."""

from __future__ import annotations

import asyncio
from threading import Event, get_ident

import pytest

from tessera.coordinator.limits.thread_pool import FairThreadPool, KeyedLocks


def test_one_owner_s_work_keeps_half_of_the_threads_free_for_others() -> None:
    async def scenario() -> None:
        shares, ended, begun = FairThreadPool("test", 4), Event(), []

        def long(number: int) -> None:
            begun.append(number)
            ended.wait()

        flood = [asyncio.create_task(shares.run("a", long, number)) for number in range(50)]
        # Whoever comes later is served at once, again and again.
        for _ in range(3):
            assert await shares.run("b", get_ident)
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        assert sorted(begun) == [0, 1]
        ended.set()
        await asyncio.gather(*flood)
        # In turns, though of four threads that begin at once any may be the first to say so.
        assert all(number < place + 4 for place, number in enumerate(begun))
        assert sorted(begun) == list(range(50))
        shares.close()

    asyncio.run(scenario())


def test_those_who_wait_are_served_in_turns() -> None:
    async def scenario() -> None:
        shares, ended, served = FairThreadPool("test", 1), Event(), []
        first = asyncio.create_task(shares.run("a", ended.wait))
        await asyncio.sleep(0)
        more = [asyncio.create_task(shares.run(owner, served.append, owner)) for owner in "aaabbc"]
        await asyncio.sleep(0)
        ended.set()
        await asyncio.gather(first, *more)
        assert "".join(served) == "abcaba"
        shares.close()

    asyncio.run(scenario())


def test_who_is_cancelled_while_waiting_or_at_work_gives_its_turn_back() -> None:
    async def scenario() -> None:
        shares, ended = FairThreadPool("test", 2), Event()
        first = asyncio.create_task(shares.run("a", ended.wait))
        second = asyncio.create_task(shares.run("a", ended.wait))
        await asyncio.sleep(0)
        second.cancel()
        first.cancel()
        ended.set()
        assert await shares.run("a", lambda: "served") == "served"
        assert not shares._working
        assert not shares._waiting
        with pytest.raises(ZeroDivisionError):
            await shares.run("a", lambda: 1 // 0)
        assert not shares._working
        shares.close()

    asyncio.run(scenario())


def test_what_is_done_one_at_a_time_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        one, order = KeyedLocks(), []

        async def work(number: int) -> None:
            async with one.hold("x"):
                order.append(number)
                await asyncio.sleep(0)
                order.append(number)

        await asyncio.gather(*(work(number) for number in range(3)))
        assert order == [0, 0, 1, 1, 2, 2]
        assert not one._locks

    asyncio.run(scenario())
