"""Metrics of the server, in the format that Prometheus reads."""
