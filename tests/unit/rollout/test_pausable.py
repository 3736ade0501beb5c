"""A deadline that stands still."""

import asyncio
import time

import pytest

from rlcore.rollout.pausable import PausableTimeout


def test_overlapping_pauses_stop_the_time_once_and_what_is_left_is_kept():
    async def pause(deadline, after_s, for_s):
        await asyncio.sleep(after_s)
        with deadline.paused():
            await asyncio.sleep(for_s)

    async def main():
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with PausableTimeout(0.4) as deadline:
                # Still from 0.1 to 0.7 s: 0.3 s are left then.
                pauses = [
                    asyncio.create_task(pause(deadline, *p)) for p in ((0.1, 0.4), (0.3, 0.4))
                ]
                await asyncio.sleep(30)
        assert deadline.expired()
        assert 0.95 < time.monotonic() - began < 5
        await asyncio.gather(*pauses)

    asyncio.run(main())


def test_a_pause_that_outlives_the_deadline_is_harmless():
    async def main():
        async with PausableTimeout(0.2) as deadline:
            with deadline.paused():
                await asyncio.sleep(0.3)
        assert not deadline.expired()
        with deadline.paused():
            pass
        late = PausableTimeout(0.05)
        with pytest.raises(TimeoutError):
            async with late:
                try:
                    await asyncio.sleep(30)
                finally:
                    with late.paused():
                        pass
        assert late.expired()

    asyncio.run(main())
