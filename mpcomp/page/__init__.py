"""Pages that show figures: one file each, that a browser opens without a network."""

from mpcomp.page.writing import write_page

__all__ = ["write_page"]
