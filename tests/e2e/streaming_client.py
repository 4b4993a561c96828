"""A client process with many open streams: says "open" once each has begun, and reads on until it is killed. Run by test_serve_two_stages.py.

python streaming_client.py URL COUNT
"""

from __future__ import annotations

import asyncio
import sys

import openai


async def read_stream(client: openai.AsyncOpenAI, number: int, begun: asyncio.Barrier) -> None:
    stream = await client.completions.create(
        model="smollm2", prompt=f"Story number {number}: once upon a time", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    await begun.wait()
    async for _ in stream:
        pass


async def main(url: str, count: int) -> None:
    begun = asyncio.Barrier(count + 1)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=600) as client, asyncio.TaskGroup() as streams:
        for number in range(count):
            streams.create_task(read_stream(client, number, begun))
        await begun.wait()
        print("open", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
