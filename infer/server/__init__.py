"""An OpenAI-compatible HTTP server over the engine. Needs the extra `serve`; `medusa.infer.server.run.serve` starts it.

schema and responses: the protocol's bodies. limits: what a request may ask for. prepare: from a body to engine
requests. streams: from the engine's thread to the event loop. chat, completions, tokens, info: the routes. gate: what
every request passes (request id, API key, body limit, log line). run: the process, and how it ends.
"""
