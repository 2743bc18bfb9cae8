"""Models: one config-driven decoder, its weights and its tokenizer.

config     the facts of a model family, from a Hugging Face config.json
rope       rotary frequencies, one function per scaling rule
decoder    the fast forward over a flat batch and a paged cache
reference  the same mathematics written plainly, without a cache
load       weights from a directory, a hub id, a GGUF file or memory
convert    GGUF, once, into a cached directory of safetensors
tokenizer  text to ids and back, a token at a time
"""
