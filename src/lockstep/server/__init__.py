"""OpenAI-compatible HTTP over an engine that it knows only as `EngineClient`. Knows text and the wire; does not know where tokens come from.

protocol, settings     what the server needs from others
app, serving           routes; sockets, signals and shutdown
endpoint, exchange     one request: its tasks, its bytes, its end when the client leaves
access, admission      who may call, and how much at once
requests, fields       bodies as typed structs; which foreign fields may be ignored
prompts, sampling      bodies to token ids and SamplingParams
choices, delivery      engine events to pieces of text; pieces to one answer or a stream
completions, chat, tokenization, pages     what each path answers
identity, logprobs, responses, errors      the shapes of answers
"""
