"""Chats that were logged in production: read from the formats of others, and stored as episodes."""
