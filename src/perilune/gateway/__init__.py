"""The HTTP front: OpenAI wire types, routing by model id, server-sent events, backends."""
