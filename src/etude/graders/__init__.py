"""OpenAI's graders: scores of an answer, declared as JSON, for jobs, for the API and for any config."""
