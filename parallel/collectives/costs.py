"""Cost model of collectives: its constants, and the formulas that choose an algorithm.

Seconds of a round, of a message and of a byte (Hockney: The communication challenge for MPP, 1994; with a term for the
overhead of a process for each message, as in Culler et al.: LogP, 1993). The constants of one host were fitted to two
processes that share memory, the message's to the processor time of up to fifteen of them in one exchange; those between
hosts are figures of 10 Gbit Ethernet that were not measured here. They affect only the choice of the algorithm, never
the result.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Network(NamedTuple):
    """Seconds of one round, of one message that a process sends and takes in it, and of one byte that it receives."""

    round: float
    message: float
    byte: float


class Ways(NamedTuple):
    """Seconds of each algorithm; infinite for those that do not apply."""

    direct: float
    scattered: float = math.inf
    doubling: float = math.inf
    halving: float = math.inf
    relayed: float = math.inf


def depth(processes: int) -> int:
    """Rounds of a tree.

    >>> depth(1), depth(2), depth(5), depth(1024)
    (0, 1, 3, 10)
    """
    return (processes - 1).bit_length()


class Costs(NamedTuple):
    """The constants: ``inside`` a host, ``between`` hosts, and seconds to ``join`` a byte to another contribution.

    ``only`` takes one algorithm wherever it applies.
    """

    inside: Network = Network(24e-6, 18e-6, 0.75e-9)
    between: Network = Network(80e-6, 20e-6, 1e-9)
    join: float = 0.02e-9
    only: str | None = None

    def reduction(self, n: int, nbytes: int, *, scatter: bool = False, hosts: int = 1, tree: bool = True) -> Ways:
        """An all-reduce of blocks of ``nbytes`` between ``n`` processes; with ``scatter`` a reduce-scatter, whose parts
        make so many bytes together. ``tree``: whether the algorithms along the tree apply.

        A tree crosses hosts in its last rounds only, as neighbours in the mesh are most often on one host.

        >>> [COSTS.best(COSTS.reduction(n, size)) for n, size in ((2, 1 << 10), (1024, 64), (1024, 1 << 20))]
        ['direct', 'doubling', 'halving']
        """
        net, rounds = self.inside if hosts == 1 else self.between, depth(n)
        crossing = depth(hosts)
        levels = (rounds - crossing) * (self.inside.round + self.inside.message) + crossing * (net.round + net.message)
        share = nbytes * (n - 1) / n  # bytes that a process gets of all others, if parts are equal
        # Halving sends half of the block in the first round, within the host, and ever less afterwards.
        inner = nbytes * (1 - hosts / n)
        halves = inner * self.inside.byte + (share - inner) * net.byte
        halves *= 1.4 if n & (n - 1) else 1.0  # without a power of two, some send for two others
        one, trees = net.round + (n - 1) * net.message, 1.0 if tree else math.inf
        if scatter:
            halving = levels + halves + share * self.join
            return Ways(one + share * (net.byte + self.join), halving=trees * halving)
        return Ways(
            one + (n - 1) * nbytes * (net.byte + self.join),
            scattered=2 * one + share * (2 * net.byte + self.join),
            doubling=trees * (levels + rounds * nbytes * (net.byte + self.join)),
            halving=trees * (2 * (levels + halves) + share * self.join),
        )

    def movement(self, n: int, partners: int, gets: float, out: float, gives: float, hosts: int = 1) -> Ways:
        """Blocks that go where they are needed, and are not joined. ``partners`` has the busiest process; it ``gets``
        so many bytes, or sends ``out``, among which ``gives`` are different.

        >>> [COSTS.best(COSTS.movement(1024, 1023, 1023 * b, 1023 * b, b)) for b in (8, 1 << 20)]  # an all-gather
        ['relayed', 'direct']
        """
        net, rounds = self.inside if hosts == 1 else self.between, depth(n)
        # A relayed parcel for one process travels in half of the rounds; copies are made as late as possible.
        travels = max(gets, rounds * gives) if out > gives else max(gets, gives) * rounds / 2
        scattered = 2 * (net.round + partners * net.message) + 2 * gives * net.byte
        return Ways(
            net.round + partners * net.message + max(gets, out) * net.byte,
            scattered=scattered if gets <= gives < out else math.inf,
            relayed=rounds * (net.round + net.message) + 2 * travels * net.byte,
        )

    def best(self, ways: Ways) -> str:
        """The name of the fastest; the first of equal ones."""
        if self.only is not None and getattr(ways, self.only) < math.inf:
            return self.only
        return min(ways._fields, key=lambda name: getattr(ways, name))


COSTS = Costs()
"""Those that are used."""
