"""Objects in storage that several servers share: names, sealing, deadlines and the breaker.

`Objects` reads and writes whole objects by name. It knows no tokens, models or sessions: what is
stored under which name is decided above. Nothing here is imported unless `--remote` is set.
"""
