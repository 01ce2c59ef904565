"""Views of a run, of the files in its folder: tables, a picture while it trains, a page."""
