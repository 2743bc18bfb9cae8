"""An OpenAI-compatible server over the engine: one thread steps, asyncio answers, `/metrics` tells.

    HTTP (app) -> flow of tokens (loop) -> engine thread -> events -> metrics

Nothing here is imported by the engine: `import kvlab.engine` needs no web framework.
"""
