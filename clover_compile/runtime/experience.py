"""How well guesses have fared in a Session: counts, and what may be expected of the next guess.

Kept are, for each place r of a draft, how often it was tried (all drafts before it were kept) and
how often it was kept then; for blocks, passes and the rows they fixed, blocks and the tokens they
emitted. A count loses 1 / MEMORY of its weight with each new one, so the text at hand matters most;
what the profile saw counts as TRUST observations, so one surprise outweighs it. Only how many
tokens a block emits is a matter of how long answers are, of which one says little: there the
profile counts as LENGTH_TRUST. Passes over one block fade together.

Drafts and blocks come from the same previews: whether the first pass of a block is sure of its
first row also counts as a first draft.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from clover_compile.runtime.costs import Outlook

MEMORY = 16.0
TRUST, LENGTH_TRUST = 0.25, 4.0
FIRST_TRIAL = 2
"""Width of the first draft that is tried."""

PLACES = 31
"""Places of the widest draft that is made."""


@dataclass
class Ratio:
    """A fading average of what observations gave."""

    given: float = 0.0
    weight: float = 0.0

    def see(self, value: float) -> None:
        """Adds an observation and lets those before it fade."""
        self.fade()
        self.add(value)

    def add(self, value: float) -> None:
        """Adds an observation to those of the same moment."""
        self.given += value
        self.weight += 1

    def fade(self) -> None:
        """Takes from all observations a share of their weight."""
        self.given -= self.given / MEMORY
        self.weight -= self.weight / MEMORY

    def expect(self, prior: float, trust: float = TRUST) -> float:
        """What the next will give, with a prior worth `trust` observations."""
        return (self.given + trust * prior) / (self.weight + trust)


def _places() -> list[Ratio]:
    return [Ratio() for _ in range(PLACES)]


@dataclass
class Experience:
    """Counts of a Session; see the module. Trials are booked by who makes them."""

    drafts: dict[str, list[Ratio]] = field(
        default_factory=lambda: {"exact": _places(), "release": _places()}
    )
    """Rule -> chance to be kept of the drafts at place 1, 2, ..."""
    rows: Ratio = field(default_factory=Ratio)
    """Rows that a pass over a block fixes."""
    tokens: Ratio = field(default_factory=Ratio)
    """Tokens that a block emits."""
    spent: float = 0.0
    """Cost of everything so far."""
    lost: dict[str, float] = field(default_factory=dict)
    """Way -> what trials of it lost, net of what they gained."""
    width: int = FIRST_TRIAL
    """Of the draft to try next."""

    def copy(self) -> Experience:
        """An independent copy."""
        return copy.deepcopy(self)

    def tokens_of_draft(self, width: int, rule: str, outlook: Outlook) -> float:
        """Expected tokens of a round: the first is certain."""
        priors = outlook.exact if rule == "exact" else outlook.release
        total = survives = 1.0
        for place, ratio in enumerate(self.drafts[rule][: width - 1]):
            survives *= ratio.expect(priors[min(place, len(priors) - 1)])
            total += survives
        return total

    def rows_of_pass(self, outlook: Outlook) -> float:
        """Expected rows that a pass fixes."""
        return max(1.0, self.rows.expect(outlook.rows_per_pass))

    def tokens_of_block(self, outlook: Outlook) -> float:
        """Expected tokens of a resolved block."""
        return max(1.0, self.tokens.expect(outlook.tokens_per_block, LENGTH_TRUST))

    def drafted(self, width: int, rule: str, tokens: int) -> None:
        """Learns from a round: all but the last of its tokens were drafts.

        A stop among them counts as a rejection: what follows it is as useless.
        """
        places = self.drafts[rule]
        for place in range(min(tokens, width - 1)):
            places[place].see(float(place < tokens - 1))

    def passed(self, fixed: int) -> None:
        """Learns from a pass over a block; passes of one block fade together."""
        self.rows.add(float(fixed))

    def looked(self, rule: str, first_is_sure: bool) -> None:
        """Learns from the first pass over a block, before `passed`."""
        self.rows.fade()
        self.drafts[rule][0].see(float(first_is_sure))
