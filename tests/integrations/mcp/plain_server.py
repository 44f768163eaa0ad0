"""A server of the standard library alone, which breaks the protocol in the way that its argument names."""

import json
import os
import sys
import time

FAULT = " ".join(sys.argv[1:])
GOOD = {"type": "object", "properties": {}}
TOOLS = {"no schema": [{"name": "odd", "inputSchema": 7}]}


total = 0


def answer(request: dict) -> dict:
    method = request["method"]
    if method == "initialize":
        version = request["params"]["protocolVersion"]
        info = {"name": "broken", "version": "1"}
        return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}}
    if method == "tools/list":
        names = ["odd", "die", "remember"]
        return {
            "result": {"tools": TOOLS.get(FAULT, [{"name": name, "inputSchema": GOOD} for name in names])}
        }
    if method == "tools/call":
        if FAULT == "hangs":
            time.sleep(600)
        if FAULT == "answers with an error":
            return {"error": {"code": -32603, "message": "out of coffee"}}
        if FAULT == "answers nonsense":
            return {"result": {"content": "not a list"}}
        return {"result": {"content": [{"type": "text", "text": work(**request["params"])}]}}
    return {"error": {"code": -32601, "message": f"no method {method}"}}


def work(name: str, arguments: dict, **_: object) -> str:
    global total
    if name == "die":
        sys.stderr.write("a meteor struck\n")
        sys.stderr.flush()
        os._exit(3)
    total += arguments.get("number", 0)
    return str(total) if name == "remember" else "fine"


if FAULT == "dies at once":
    sys.exit("no license key")
if FAULT == "hangs at once":
    time.sleep(600)
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer(request)}) + "\n")
        sys.stdout.flush()
