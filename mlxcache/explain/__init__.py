"""Why a prefix was not reused, and what is likely to change in the next request.

`compare` finds where and why two prompts differ, `audit` examines one request alone, and
`prefix_loss` does this for the requests of a running server.
"""
