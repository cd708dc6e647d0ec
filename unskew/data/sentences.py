"""Generated pairs of sentences in five genres with different vocabularies: a text data set without download.

As in MultiNLI (Williams, Nangia, Bowman 2017, arXiv:1704.05426), a pair is a premise and a hypothesis that follows from
it, is neutral, or contradicts it.
"""

from __future__ import annotations

import numpy as np

Row = dict[str, str]
CLASSES = ("entailment", "neutral", "contradiction")
GENRES: dict[str, tuple[str, str, str]] = {
    "fiction": ("dragon knight witch prince raven", "guards follows curses finds fears", "dark old silent golden lost"),
    "government": (
        "agency senate council bureau mayor",
        "funds audits approves amends delays",
        "federal public annual new joint",
    ),
    "slate": (
        "critic editor novel movie column",
        "praises mocks quotes reviews ignores",
        "clever dull recent famous long",
    ),
    "telephone": (
        "neighbor cousin boss doctor teacher",
        "calls helps visits misses thanks",
        "nice busy young tired kind",
    ),
    "travel": (
        "island harbor castle museum beach",
        "overlooks borders attracts charms hides",
        "sunny steep quiet ancient wide",
    ),
}


def sentences(seed: int, each: int) -> list[Row]:
    """Generate pairs of sentences as rows with the columns ``premise``, ``hypothesis``, ``genre`` and ``label``.

    Args:
        seed: Random seed of the data set.
        each: Number of pairs per genre.

    >>> sentences(0, 1)[0]["genre"]
    'fiction'
    """
    draws = np.random.default_rng(seed)
    return [make_pair(genre, draws) for genre in GENRES for _ in range(each)]


def make_pair(genre: str, draws: np.random.Generator) -> Row:
    """Generate one pair.

    Args:
        genre: Name of the genre.
        draws: Random number generator.
    """
    nouns, verbs, adjectives = (words.split() for words in GENRES[genre])
    subject, other, third = draws.choice(nouns, 3, replace=False)
    verb, adjective, unsaid = draws.choice(verbs), *draws.choice(adjectives, 2, replace=False)
    label = draws.choice(CLASSES)
    hypothesis = {
        "entailment": f"The {subject} is {adjective}.",
        "neutral": f"The {third} is {unsaid}.",
        "contradiction": f"The {subject} never {verb} the {other}.",
    }[label]
    return {
        "premise": f"The {adjective} {subject} {verb} the {other}.",
        "hypothesis": hypothesis,
        "genre": genre,
        "label": str(label),
    }
