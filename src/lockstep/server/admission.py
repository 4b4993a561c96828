"""How much may be open at once, and the end of it all. Counts engine requests; does not know what they are or how they stop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.errors import CapacityError, InvalidRequestError


class Admission:
    """The server's one count of open work.

    open_count: engine requests now open. draining: no new work is taken. stopped(): a future that is done when open work must end at once.
    """

    __slots__ = ("_requests_max", "_stopped", "draining", "open_count")

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._stopped: asyncio.Future[None] | None = None
        self.open_count = 0
        self.draining = False

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Hold room for `count` engine requests. Raises CapacityError if there is none now, InvalidRequestError if there never will be."""
        if count > self._requests_max:
            message = f"n times the number of prompts may be at most {self._requests_max} on this server, got {count}; ask in several requests"
            raise InvalidRequestError(message, param="n")
        if self.draining:
            raise CapacityError("the server is shutting down; send the request again, to another server")
        if self.open_count + count > self._requests_max:
            raise CapacityError(f"{self.open_count} of at most {self._requests_max} requests are open, no room for {count} more; try again later")
        self.open_count += count
        try:
            yield
        finally:
            self.open_count -= count

    def stopped(self) -> asyncio.Future[None]:
        """Done from the moment of `stop`. Call inside the server's event loop."""
        if self._stopped is None:
            self._stopped = asyncio.get_running_loop().create_future()
        return self._stopped

    def drain(self) -> None:
        """Take no new work."""
        self.draining = True

    def stop(self) -> None:
        """Take no new work and end what is open."""
        self.draining = True
        if not self.stopped().done():
            self.stopped().set_result(None)
