"""Speed of the ops, measured so that a broken or cheating kernel cannot look fast.

The walk: `cases` (what is declared) -> `runner` (one row) -> `prepare` (is it right, did it run)
-> `rounds` (interleaved timing) -> `floors` (can that be) -> `results` -> `table`. `gate` walks the
same way and compares with stored medians.
"""
