"""The mechanical part of the project's style: what a lint can find in a sentence."""

import re

BANNED = re.compile(
    r"\b(ours|anew|mend(s|ed)?|shall|whoever|told|tells|stands?|lies|beside|in place of|waited for|nobody|of its own|"
    r"by the caller)\b",
    re.IGNORECASE,
)
LONGEST = 28


def sentences(text):
    """The sentences of a text, without code, quotations, formulas and roles."""
    text = re.sub(r"``[^`]*``|`[^`]*`", "CODE", text)
    text = re.sub(r"(?s)\.\. math::.*?(?=\n\S|\Z)|:math:CODE", "FORMULA", text)
    text = re.sub(r":[a-z]+:CODE", "LINK", text)
    text = re.sub(r'"[^"]*"', "QUOTED", text)
    text = re.sub(r"^(.+)\n[-=~^]{4,}$", r"\1.", text, flags=re.MULTILINE)
    for part in re.split(r"\n\s*\n|\n\s*[-*] ", text):
        yield from (s.strip() for s in re.split(r"(?<=[.!?:])\s+(?=[A-Z*\d])", " ".join(part.split())) if s.strip())


def faults(text):
    """What is wrong with each sentence of a text, in words."""
    found = []
    for sentence in sentences(text):
        said = [f"the word {word[0]!r}" for word in BANNED.finditer(sentence)]
        words = len(re.findall(r"[\w'.%-]*\w[\w'.%-]*", sentence))
        if words > LONGEST:
            said.append(f"{words} words")
        if re.match(r"(Of|What|Where) [^,]*,[^.]* is\b", sentence):
            said.append("an inversion")
        if re.search(r"\bways?\b", sentence, re.IGNORECASE):
            said.append("'way', for an implementation")
        if re.search(r"\([^()]{61,}\)", sentence):
            said.append("a bracket of more than 60 characters")
        found += [f"{what}: {sentence}" for what in said]
    return found
