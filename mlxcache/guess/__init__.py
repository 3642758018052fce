"""Guesses of a reply's next tokens from the text of its own conversation, without a model.

Pure Python and NumPy. `candidates` finds the earlier place whose text is most like the newest, and
what followed it. `forms` rewrites tool results as a reply would repeat them. `rule` decides how
many guessed tokens are worth checking, and `purse` limits what wrong guesses may cost. `drafts`
decides how many tokens a draft model should propose.
"""
