"""The data block of a memory page, read back as the page's own program reads it."""

import base64
import json
import re
import zlib


def data_of(text: str) -> dict:
    """`text` is the whole page; its data may be plain JSON or deflated."""
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert block, "no data in the page"
    data = json.loads(block[1])
    return json.loads(zlib.decompress(base64.b64decode(data["deflate"]))) if "deflate" in data else data
