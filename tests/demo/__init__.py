"""Training of the built-in demo model, whose weights the package ships.

`python -m tests.demo.train` in a clone. Needs no test extra.
"""
