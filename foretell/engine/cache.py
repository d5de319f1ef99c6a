"""Pages: one index space for target and drafter, reference counts, and the prefix cache.

A page is *free*, *held* (by one or more sequences) or *idle*: in the prefix cache and held by
nobody, so that it may be taken again, the longest unused first. Only committed tokens ever enter
the prefix cache: rejected drafts live in scratch cells past ``num_computed`` and are never named.
"""

from __future__ import annotations

from collections import OrderedDict

from foretell.sequence import Sequence


class PageCache:
    """Hands out KV pages.

    Args:
        num_pages: pages in the pool.
        page_size: tokens in a page.
        prefix_caching: share pages among requests that start alike.
        lookahead: 1 if a drafter's entry at position t depends on token t + 1: a page is then
            shared only among texts that agree on the token behind it too.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_caching: bool = True,
        lookahead: int = 0,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.lookahead = lookahead
        self.free = list(range(num_pages))[::-1]
        """The last is taken first: what was used lately is in caches, and in memory at all."""
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.refs = [0] * num_pages
        self._entries: dict[tuple[int, tuple[int, ...]], int] = {}
        """(identity of the page before, tokens of this page and of the lookahead) to page: exact,
        no hash collisions."""
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._identity: dict[int, int] = {}
        self._next_identity = 1
        self._observed: set[int] = set()
        """Pages that hold the drafter's KV too, where it may be filled in later."""

    @property
    def num_free(self) -> int:
        """Pages that could be taken now."""
        return len(self.free) + len(self.idle)

    def pages_for(self, num_cells: int) -> int:
        return -(-num_cells // self.page_size)

    def num_cells(self, sequence: Sequence) -> int:
        """Cells that a sequence could have now, the pages it holds included."""
        return (len(sequence.pages) + self.num_free) * self.page_size

    def match(self, sequence: Sequence) -> int:
        """Gives a new sequence the pages that its tokens share with the prefix cache.

        Returns:
            How many tokens need not be computed; at least the last one always does.
        """
        assert not sequence.pages
        if not self.prefix_caching:
            return 0
        size, parent = self.page_size, 0
        parents: list[int] = []
        for end in range(size, len(sequence.tokens), size):
            page = self._entries.get(self._key_of(sequence, end, parent))
            if page is None:
                break
            sequence.pages.append(page)
            parents.append(parent := self._identity[page])
        for page in sequence.pages:
            self._hold(page)
        sequence.num_hashed_pages = len(sequence.pages)
        sequence.hash_parent = parents[-1] if parents else 0
        return len(sequence.pages) * size

    def reserve(self, sequence: Sequence, num_cells: int) -> bool:
        """Extends a sequence's pages to ``num_cells`` cells; False, and nothing taken, if short."""
        missing = self.pages_for(num_cells) - len(sequence.pages)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            sequence.pages.append(self._take())
        return True

    def trim(self, sequence: Sequence, num_cells: int) -> None:
        """Gives back pages past ``num_cells``: those that only rejected drafts had reached."""
        keep = self.pages_for(num_cells)
        while len(sequence.pages) > keep:
            self._release(sequence.pages.pop())

    def publish(self, sequence: Sequence, end: int | None = None) -> None:
        """Enters the pages whose tokens are all committed into the prefix cache.

        Args:
            end: position behind the last token that may be shared; num_computed if not given.
        """
        if not self.prefix_caching:
            return
        size, last = self.page_size, sequence.num_computed if end is None else end
        while (end := (sequence.num_hashed_pages + 1) * size) <= last:
            page = sequence.pages[sequence.num_hashed_pages]
            key = self._key_of(sequence, end, sequence.hash_parent)
            if key not in self._entries:
                self._entries[key] = page
                self._key[page] = key
                self._identity[page] = self._next_identity
                self._next_identity += 1
            sequence.hash_parent = self._identity[self._entries[key]]
            sequence.num_hashed_pages += 1

    def set_observed(self, sequence: Sequence, start: int, end: int) -> None:
        """The drafter has filled in positions start .. end - 1, and those before."""
        size = self.page_size
        self._observed.update(sequence.pages[start // size : end // size])

    def unset_observed(self, sequence: Sequence, start: int) -> None:
        """It has not, from position start on."""
        self._observed.difference_update(sequence.pages[start // self.page_size :])

    def num_observed(self, sequence: Sequence) -> int:
        """Positions at a sequence's beginning whose pages hold the drafter's KV too."""
        for count, page in enumerate(sequence.pages):
            if page not in self._observed:
                return count * self.page_size
        return len(sequence.pages) * self.page_size

    def release(self, sequence: Sequence) -> None:
        """Takes all pages back, the last first, so that the tails of prefixes go first."""
        while sequence.pages:
            self._release(sequence.pages.pop())
        sequence.num_hashed_pages = sequence.hash_parent = 0

    def clear(self) -> None:
        """Forgets every idle page."""
        while self.idle:
            self.free.append(self._evict())

    def check(self, sequences: list[Sequence]) -> None:
        """Asserts that every page is accounted for, given the sequences that hold pages."""
        held = [0] * self.num_pages
        for sequence in sequences:
            for page in sequence.pages:
                held[page] += 1
        assert held == self.refs, "reference counts differ from what sequences hold"
        unheld = sorted([*self.free, *self.idle])
        assert unheld == [page for page, count in enumerate(held) if not count]
        assert {self._entries[key] for key in self._key.values()} == set(self._key)
        assert set(self.idle) <= set(self._key)

    def _key_of(self, sequence: Sequence, end: int, parent: int) -> tuple[int, tuple[int, ...]]:
        return parent, tuple(sequence.tokens[end - self.page_size : end + self.lookahead])

    def _hold(self, page: int) -> None:
        if self.refs[page] == 0:
            self.idle.pop(page)
        self.refs[page] += 1

    def _take(self) -> int:
        page = self.free.pop() if self.free else self._evict()
        self._observed.discard(page)
        self.refs[page] = 1
        return page

    def _evict(self) -> int:
        page, _ = self.idle.popitem(last=False)
        del self._entries[self._key.pop(page)]
        del self._identity[page]
        return page

    def _release(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if page in self._key:
                self.idle[page] = None
            else:
                self.free.append(page)
