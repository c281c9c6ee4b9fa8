"""Backends: the ChatModels that the router can send a request to."""
