"""The OpenAI SDK against a Tidemill server: upload, create, poll, download.

Start a server first (``make serve``), then run this with ``.venv/bin/python examples/sdk.py``.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:10900/v1", api_key="not-needed-on-loopback")
requests = Path(__file__).with_name("requests.jsonl")

file = client.files.create(file=requests, purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(1)
    batch = client.batches.retrieve(batch.id)

for row in client.files.content(batch.output_file_id).text.splitlines():
    answer = json.loads(row)
    print(answer["custom_id"], "→", answer["response"]["body"]["choices"][0]["message"]["content"])
