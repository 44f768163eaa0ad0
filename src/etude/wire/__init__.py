"""The wire formats of OpenAI's and Anthropic's APIs, and the recording of calls that use them."""
