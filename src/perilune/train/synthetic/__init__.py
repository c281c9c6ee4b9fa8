"""Chats made by program, where the answer is known."""
