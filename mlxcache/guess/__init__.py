"""Guesses of a reply's next tokens from the text of its own conversation, without a model.

Pure Python and NumPy: `candidates` finds earlier text that goes on from here, `forms` prepares tool
results as a reply would write them, `rule` decides how many tokens are worth checking, `purse`
limits what wrong guesses may cost.
"""
