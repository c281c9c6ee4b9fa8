"""One folder an op. `registry` lists them; each folder's README has the maths."""
