"""Requests of many clients become few searches.

A thread takes whatever is waiting, up to a number of queries, and searches it in one call; nobody waits for others to
come. What waits is bounded: a request that would go beyond the bound is refused at once, and one whose client has given
up is not searched.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from corral.retrieval.answer import Ask
from corral.retrieval.base import Found

Answer = list[list[Found]]
Waiting = tuple[Ask, "Future[Answer]"]


class Overloaded(Exception):
    """Too many queries are waiting."""


class Batcher:
    def __init__(
        self,
        answer: Callable[[Sequence[Ask]], list[Answer]],
        *,
        max_waiting: int,
        max_batch: int,
        num_threads: int = 1,
        on_search: Callable[[int], None] = lambda num_queries: None,
    ) -> None:
        self.answer, self.max_waiting, self.max_batch, self.on_search = answer, max_waiting, max_batch, on_search
        self.waiting: deque[Waiting] = deque()
        self.num_waiting = 0
        """Queries, not requests."""
        self.news = threading.Condition()
        self.closed = False
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        for thread in self.threads:
            thread.start()

    def submit(self, asks: Sequence[Ask]) -> "list[Future[Answer]]":
        """All of them or none."""
        futures: list[Future[Answer]] = [Future() for _ in asks]
        number = sum(len(ask.queries) for ask in asks)
        with self.news:
            if self.is_full(number) or self.closed:
                raise Overloaded
            self.waiting.extend(zip(asks, futures, strict=True))
            self.num_waiting += number
            self.news.notify(len(asks))
        return futures

    def is_full(self, more: int = 1) -> bool:
        """Whether so many more queries would be too many. If nothing waits, no request is."""
        with self.news:
            if self.num_waiting + more > self.max_waiting:
                self.waiting = deque(one for one in self.waiting if not one[1].cancelled())
                self.num_waiting = sum(len(ask.queries) for ask, _ in self.waiting)
            return self.num_waiting > 0 and self.num_waiting + more > self.max_waiting

    def close(self) -> None:
        """What waits is not searched any more; what is being searched is finished."""
        with self.news:
            self.closed = True
            for _, future in self.waiting:
                future.cancel()
            self.waiting.clear()
            self.num_waiting = 0
            self.news.notify_all()

    def _work(self) -> None:
        while batch := self._next_batch():
            asks, futures = [ask for ask, _ in batch], [future for _, future in batch]
            self.on_search(sum(len(ask.queries) for ask in asks))
            try:
                answers = self.answer(asks)
            except Exception as error:
                for future in futures:
                    future.set_exception(error)
            else:
                for future, answer in zip(futures, answers, strict=True):
                    future.set_result(answer)

    def _next_batch(self) -> list[Waiting]:
        """Waits for one. Empty: there will be none."""
        while True:
            with self.news:
                self.news.wait_for(lambda: self.waiting or self.closed)
                if self.closed:
                    return []
                batch: list[Waiting] = []
                size = 0
                while self.waiting and (not batch or size + len(self.waiting[0][0].queries) <= self.max_batch):
                    batch.append(self.waiting.popleft())
                    size += len(batch[-1][0].queries)
                self.num_waiting -= size
            if batch := [one for one in batch if one[1].set_running_or_notify_cancel()]:
                return batch
