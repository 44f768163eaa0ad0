"""Chats logged in production, read from other tools' formats and stored as episodes."""
