"""A process that serves one scripted engine until a signal comes, then says that `serve` has returned. Run by test_server_serving.py."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from scripted_engine import ScriptedEngine, byte_tokenizer, say

from lockstep.server.app import create_app
from lockstep.server.serving import serve
from lockstep.server.settings import ServerSettings


async def main(folder: Path) -> None:
    engine = ScriptedEngine(say("Hello"))
    app = create_app(engine, byte_tokenizer(folder), ServerSettings(served_model_names=("m",)))
    await serve(app, port=0, on_listening=lambda url: print(url, flush=True))
    print("returned", [name for name in ("torch", "numpy", "pydantic") if name in sys.modules], flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
