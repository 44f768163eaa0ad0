"""A program that knows nothing of Etude: it finds its model by OPENAI_BASE_URL and OPENAI_API_KEY.

python sorter.py letters
"""

import sys

from openai import OpenAI

client = OpenAI()
answer = client.chat.completions.create(
    model="gpt-4o-mini", messages=[{"role": "user", "content": f"Sort: {sys.argv[1]}"}]
)
print(answer.choices[0].message.content)
