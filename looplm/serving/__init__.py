"""An OpenAI-compatible server over the engine, with depth as a dial, and a page to watch it think.

Reading order: `worker` (the one thread that runs the engine, and how tokens come back from it) -> `schema` (what may
be asked) -> `depth` (the extras that say how deep tokens go) -> `prompts` (from messages and texts to token ids) ->
`answers` (what comes back, in OpenAI's form) -> `loops` (what every loop says of a text) -> `errors`, `limits`,
`metrics` -> `app` (the routes) -> `server` (sockets, slow clients, shutting down). `page.html` is the playground.

Needs the extra `serve`: pip install 'looplm[serve]'.
"""
