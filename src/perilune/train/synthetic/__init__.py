"""Chats made by program, where the answer is known: sums, words, recall, facts, tools, JSON, code."""
