"""The load generator: traces and arrivals in, latencies and a performance profile out."""
