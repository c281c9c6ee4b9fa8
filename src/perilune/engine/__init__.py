"""Several token sequences in flight on one model. Start reading at `core`, enter by `client`."""
