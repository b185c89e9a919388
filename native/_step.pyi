"""
One step of llama.cpp without the GIL; use it through tidemill.native.step.
"""

def version() -> str:
    """The llama-cpp-python that this was built against."""

def sizes() -> dict[str, int]:
    """Bytes of the structs that cross the interface."""

def offer_attention() -> str:
    """
    Let contexts that are made from now on compute attention here; why they cannot, or nothing.
    """

def share(beginnings: list[tuple[int, int]]) -> None:
    """
    (group, length) by sequence id of the context that computes next: how many first tokens are the
    same in memory as those of others of the group; a group below 0 is none.
    """

class Choice:
    """How the next token of one sequence is chosen."""

    def __init__(self, *, chain: int = 0, grammar: int = 0, top: int | None = None) -> None:
        """
        Addresses of samplers (0: none) that outlive this; ``top`` as Generation.logprobs.
        """

class Step:
    """
    Steps of one llama.cpp context; used by one thread, but for ``interrupt``.
    """

    def __init__(self, context: int, threads: int = 1) -> None:
        """``context``: the address of a llama_context that outlives this."""

    def interrupt(self) -> None:
        """Let the run that is at work return 2, at its next operation on a CPU."""

    def run(
        self, chunks: list[tuple[int, int, list[int], list[int], Choice | None]]
    ) -> tuple[int, list[list[tuple[int, bool, float | None, list[tuple[int, float]]]]]]:
        """
        (seq, start, tokens, drafts, choice) to rc and, by choice, [(token, end, logprob, top)].
        """
