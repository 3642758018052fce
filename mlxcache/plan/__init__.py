"""Planning: a simulation of the server's cache, without a model, over a trace of requests.

It reads traces, makes synthetic ones, and plays them to a `KVCache` whose lineages hold no arrays
and to the index of the disk tier without files. It must not import the engine or any HTTP.
"""
