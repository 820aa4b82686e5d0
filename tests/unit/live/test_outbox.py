"""What readers find in a loop."""

import asyncio

from headrace.live.outbox import AsyncInbox


def test_a_look_comes_first_only_where_somebody_waits_for_nothing_else() -> None:
    async def test() -> None:
        seen: list[int] = []

        def look(item: int) -> int | None:
            seen.append(item)
            return None if item % 2 else -item

        inbox = AsyncInbox[int](asyncio.get_running_loop(), look)
        inbox.put(1)
        assert await inbox.take() == [1]
        taking = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        for item in (3, 4, 5):
            inbox.put(item)
        assert await taking == [-4, 5]
        assert seen == [3, 4]

    asyncio.run(test())
