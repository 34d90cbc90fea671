"""Which pages of a pool are free, and how many sequences hold each of the others."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Numbers of pages with reference counts. Taking and giving back cost O(1) a page."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of pages that some sequence holds."""
        return len(self._holders) - len(self._free)

    def holders(self, page: int) -> int:
        """Return how many sequences hold a page."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Return ``count`` free pages, now held once each; the caller knows that there are as many."""
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        for page in taken:
            self._holders[page] = 1
        return taken[::-1]

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages once more."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Hold pages once less; those that nobody holds are free."""
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
