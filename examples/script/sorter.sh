#!/bin/sh
# The same program for a shell, with curl: sh sorter.sh letters
set -eu
curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
  --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
  --data '{"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Sort: '"$1"'"}]}' |
  sed 's/.*"content": *"\([^"]*\)".*/\1/'
