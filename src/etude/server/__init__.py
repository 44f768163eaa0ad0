"""The language-model server: inference and training over HTTP, in OpenAI's API."""
