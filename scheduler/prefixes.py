"""A radix tree over token sequences: who has how much of a prompt."""

from __future__ import annotations


class _Node:
    __slots__ = ("children", "edge", "holders")

    def __init__(self, edge: list[int]) -> None:
        self.edge = edge
        """Tokens between the parent and here."""
        self.children: dict[int, _Node] = {}
        self.holders: set[int] = set()
        """Whose tokens go through here or end here."""


class Prefixes:
    """Token sequences by holder, findable by longest shared prefix.

    A lookup costs the length of what it finds, however many holders there are. ``scope`` is part
    of a sequence: holders of different scopes share nothing.
    """

    def __init__(self) -> None:
        self._root = _Node([])
        self._paths: dict[int, list[int]] = {}
        self._scopes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def put(self, holder: int, tokens: list[int], scope: str = "") -> None:
        """``holder`` has these tokens, and no longer those that it had."""
        self.drop(holder)
        # A scope is a first token that no vocabulary has.
        mark = self._scopes.setdefault(scope, -1 - len(self._scopes))
        path = self._paths[holder] = [mark, *tokens]
        node, depth = self._root, 0
        while depth < len(path):
            child = node.children.get(path[depth])
            if child is None:
                child = node.children[path[depth]] = _Node(path[depth:])
                child.holders.add(holder)
                return
            shared = common(child.edge, path, depth)
            if shared < len(child.edge):
                child = _split(node, child, shared)
            child.holders.add(holder)
            node, depth = child, depth + shared

    def drop(self, holder: int) -> None:
        """``holder`` has nothing any more; one that had nothing is ignored."""
        path = self._paths.pop(holder, None)
        if path is None:
            return
        node, depth = self._root, 0
        while depth < len(path):
            child = node.children[path[depth]]
            child.holders.discard(holder)
            if not child.holders:
                del node.children[path[depth]]
                return
            node, depth = child, depth + len(child.edge)

    def matches(self, tokens: list[int], scope: str = "") -> list[tuple[int, frozenset[int]]]:
        """``(length, holders)`` for every length at which holders part ways, longest first: these
        holders begin with at least that many of ``tokens``. Empty ones are left out."""
        mark = self._scopes.get(scope)
        if mark is None:
            return []
        path = [mark, *tokens]
        found: list[tuple[int, frozenset[int]]] = []
        node, depth = self._root, 0
        while depth < len(path):
            child = node.children.get(path[depth])
            if child is None:
                break
            shared = common(child.edge, path, depth)
            depth += shared
            if depth > 1:
                found.append((depth - 1, frozenset(child.holders)))
            if shared < len(child.edge):
                break
            node = child
        return found[::-1]


def _split(parent: _Node, child: _Node, at: int) -> _Node:
    """Put a node into the middle of the edge to ``child``; returns it."""
    middle = _Node(child.edge[:at])
    middle.holders = set(child.holders)
    middle.children[child.edge[at]] = child
    parent.children[child.edge[0]] = middle
    child.edge = child.edge[at:]
    return middle


def common(a: list[int], b: list[int], start: int = 0) -> int:
    """How many tokens ``a`` and ``b[start:]`` begin with alike."""
    # Slices are compared by C code: a few large comparisons instead of a Python loop over tokens.
    low, high = 0, min(len(a), len(b) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low
