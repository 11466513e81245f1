"""The pool of KV blocks: which blocks are held, by how many contexts, and which contents can be found again by name.

A block holds the keys and values of `block_size` tokens. A *full* block of accepted tokens is published: it becomes
immutable and is named by a chain hash (h_0 = namespace, h_i = BLAKE2b(h_{i-1} ‖ token ids)), so that any context whose
tokens begin the same way shares it. A published block that nobody holds stays until its room is needed.

    free ──allocate──▶ held ──release──▶ free          (not published)
                        ▲ └───release──▶ evictable     (published; least recently released is evicted first)
                        └──share─────────────┘
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class BlockKey:
    """What a full block holds: its name, the key before it (None for a first block), and the very tokens.

    The name is how a key is found, the key itself what is compared: two keys are the same only if they are one object,
    so a context whose name collides with another's can't lead anyone into its chain.
    """

    name: bytes
    parent: BlockKey | None
    tokens: tuple[int, ...]


class OutOfBlocks(RuntimeError):
    """A bug: more blocks were asked for than are free; the scheduler looks before it allocates."""


class BlockPool:
    """Owns block ids 0 … num_blocks-1; never touches the memory behind them. Not thread-safe."""

    def __init__(self, num_blocks: int, block_size: int, namespace: bytes = b"") -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        #: The chain's beginning. A digest of everything that makes KV differ: weights, tokenizer, layout, numerics.
        self.root = hashlib.blake2b(namespace, digest_size=16).digest()
        self._free: deque[int] = deque(range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._published: dict[int, BlockKey] = {}
        self._by_name: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._evictable)

    @property
    def num_held(self) -> int:
        """Blocks in some context's table."""
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting published ones that nobody holds if need be. Contents are undefined."""
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_available} of {self.num_blocks} available")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._withdraw(block)
        self._references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Hold published blocks once more."""
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a context's blocks (in table order, or a tail of it)."""
        # From the end, so that a chain's leaf is older than its root and is evicted first: a root without its leaf can
        # still be found, a leaf without its root can't.
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released more often than held"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._published:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def name_of(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The chain hash of a full block that follows the one called `parent` (the root for a first block)."""
        return hashlib.blake2b(parent + array("I", tokens).tobytes(), digest_size=16).digest()

    def publish(self, block: int, parent: BlockKey | None, tokens: Sequence[int]) -> BlockKey:
        """Name a held, full block so that others can share it. Where the name is taken, the first holder keeps it.

        Returns the key to pass as `parent` for the block after it.
        """
        assert self._references[block] > 0
        assert len(tokens) == self.block_size
        assert block not in self._published
        found = self.lookup(parent, tokens)
        if found is not None:
            return found[1]
        key = BlockKey(self._child_name(parent, tokens), parent, tuple(tokens))
        if key.name not in self._by_name:
            self._by_name[key.name] = block
            self._published[block] = key
        return key

    def withdraw(self, block: int) -> None:
        """Take back a held block's publication (its contents were never computed)."""
        assert self._references[block] > 0
        if block in self._published:
            self._withdraw(block)

    def reset_prefix_cache(self) -> None:
        """Forget the contents of all blocks; nobody may hold one. They stay in memory but can't be found any more."""
        assert self.num_held == 0, f"{self.num_held} blocks are held"
        for block in self._evictable:
            self._withdraw(block)
        self._free.extend(self._evictable)
        self._evictable.clear()

    def _withdraw(self, block: int) -> None:
        del self._by_name[self._published.pop(block).name]

    def _child_name(self, parent: BlockKey | None, tokens: Sequence[int]) -> bytes:
        return self.name_of(self.root if parent is None else parent.name, tokens)

    def lookup(self, parent: BlockKey | None, tokens: Sequence[int]) -> tuple[int, BlockKey] | None:
        """The published block that holds exactly these tokens after `parent`, with its key."""
        block = self._by_name.get(self._child_name(parent, tokens))
        if block is None:
            return None
        key = self._published[block]
        return (block, key) if key.parent is parent and key.tokens == tuple(tokens) else None

    def is_published(self, block: int) -> bool:
        """Whether the block is immutable, because others may share it."""
        return block in self._published

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Validate everything against the block tables of all contexts. Raises AssertionError naming the block."""
        held = Counter(block for table in tables for block in table)
        for block in range(self.num_blocks):
            assert self._references[block] == held[block], (
                f"block {block}: {self._references[block]} references, in {held[block]} tables"
            )
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & evictable
        assert free | evictable == set(range(self.num_blocks)) - set(held), "a block is lost"
        assert not free & self._published.keys(), "a free block is published"
        assert evictable <= self._published.keys(), "an evictable block has no name"
        assert len(self._by_name) == len(self._published)
        for block, key in self._published.items():
            assert self._by_name[key.name] == block
            assert self._child_name(key.parent, key.tokens) == key.name
