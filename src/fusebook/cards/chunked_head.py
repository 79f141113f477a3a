"""The page on cross entropy of hidden states; its card shares its reference with `fusebook.cards.losses`."""

from fusebook.cards.losses import LINEAR_CROSS_ENTROPY

__all__ = ["LINEAR_CROSS_ENTROPY", "PAGE"]

#: The page that has them.
PAGE = 108
