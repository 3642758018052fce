"""Guesses of a reply's next tokens from the text of its own conversation, or by a draft model.

Pure Python and NumPy. `history` finds the earlier place whose text is most like the newest, and
what followed it. `forms` rewrites tool results as a reply would repeat them. `rule` decides which
proposal a pass checks, and how many of its tokens.
"""
