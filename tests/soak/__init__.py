"""The whole server under random agents, faults and kills, and what must hold all the while.

`bin/soak --minutes 60 --seed 1` runs it from a clone. A seed decides what the agents do and which
faults come when (`plan`); how far each gets by then is the machine's affair.
"""
