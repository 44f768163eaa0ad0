"""The language-model server: the HTTP face of inference and learner, in OpenAI's API."""
