"""What has come in on a subscription without a callback, and the wait for more: no task or timer for each message."""

import asyncio

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

__all__ = ["Inbox", "give_inbox"]

_CLOSING: str = "inbox"


class Inbox(asyncio.Queue[Msg]):
    """Messages in their order, for one reader at a time.

    nats-py's own wait makes two tasks for each message, and a timer that is cancelled at once. Here the reader itself
    is woken; the timer goes on from one wait to the next, and looks when it fires whether anybody's time is over.
    """

    def __init__(self, max_messages: int) -> None:
        super().__init__(max_messages)
        self.is_closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    async def wait(self, timeout_s: float) -> bool:
        """Whether a message is there, after at most this long; False at once when the connection is closed for good."""
        if not self.empty() or self.is_closed:
            return not self.empty()
        assert self._waiter is None
        loop = asyncio.get_running_loop()
        self._due = loop.time() + timeout_s
        if self._timer is None or self._timer.when() > self._due:
            self._set_timer(loop)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        return not self.empty()

    def cancel(self) -> None:
        """Nothing will come any more."""
        self.is_closed = True
        self._wake()
        if self._timer is not None:
            self._timer.cancel()

    def _put(self, item: Msg) -> None:
        super()._put(item)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self._due, self._on_time, loop)

    def _on_time(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if loop.time() < self._due:
            self._set_timer(loop)
        else:
            self._wake()


def give_inbox(subscription: Subscription) -> None:
    """Have a subscription of nats-py keep its messages in an `Inbox`; what it has already goes there in order."""
    old = subscription._pending_queue
    inbox = Inbox(old.maxsize)
    while not old.empty():
        inbox.put_nowait(old.get_nowait())
    subscription._pending_queue = inbox
    subscription._pending_next_msgs_calls[_CLOSING] = inbox  # closing the client cancels what is in here
