"""What several ops need: the packed layout."""
